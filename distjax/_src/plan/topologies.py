"""Devices by name that need not be there: TPU slices, GPUs of this machine's kind, virtual CPUs.

TPU slices are described by libtpu, which is installed apart (`distjax[plan]`); a line of JAX goes
with one line of it. How much memory a chip has, the compiler says itself, when it is asked for too
much. Its speeds it does not say: they are those that the makers publish.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distjax._src import jax_compat
from distjax._src.traces import struct
from distjax.errors import message

#: The libtpu that goes with this line of JAX: newer ones fail to print some programs.
LIBTPU = "0.0.42" if jax_compat.JAX_VERSION < (0, 12) else "0.0.50"
INSTALL = f"pip install 'libtpu=={LIBTPU}.*'"
_KNOWN = "v5e:16x16, v6e:4x4, v5p:8x8x16, v4:2x2x1, tpu7x:4x4x8, cpu:8, gpu:8 where a GPU is"


class Speeds(NamedTuple):
    """What one device of a kind can do at best, as published by `source`, a second.

    Operations of bfloat16, bytes between the device and its memory, bytes over its links to others.
    """

    flops: float
    memory: float
    links: float
    source: str


_GOOGLE = "cloud.google.com/tpu/docs/system-architecture-tpu-vm, per chip"
_DEVICE = "cloud.google.com/tpu/docs/tpu7x, half of a chip"
#: By the kind in a topology's name.
_SPEEDS = {
    "v4": Speeds(275e12, 1228e9, 300e9, _GOOGLE),
    "v5e": Speeds(197e12, 819e9, 200e9, _GOOGLE),
    "v5p": Speeds(459e12, 2765e9, 600e9, _GOOGLE),
    "v6e": Speeds(918e12, 1640e9, 448e9, _GOOGLE),
    "tpu7x": Speeds(1153e12, 3690e9, 600e9, _DEVICE),
}
#: Kinds whose slices have three dimensions; hosts have 2 x 2 x 1 chips.
_THREE = ("v4", "v5p", "tpu7x")


class Described(NamedTuple):
    """A topology by name, and its devices, slice by slice, with a slower network between slices.

    Programs may use `limit_bytes` of a device. None: unknown, as `speeds` may be.
    """

    name: str
    slices: int
    devices: Sequence[jax.Device]
    limit_bytes: int | None = None
    speeds: Speeds | None = None


def squarest(name: str, chips: int) -> str:
    """Returns the name of the squarest slice of a kind with so many chips.

    Example:
      >>> squarest("v5e:2x2", 32), squarest("v5p:2x2x1", 1024), squarest("cpu:8", 64)
      ('v5e:4x8', 'v5p:8x8x16', 'cpu:64')
    """
    kind = name.partition(":")[0]
    if kind not in _SPEEDS:
        return f"{kind}:{chips}"
    sizes, sides = [n for n in range(1, chips + 1) if chips % n == 0], 3 if kind in _THREE else 2
    shapes = [s for s in itertools.product(sizes, repeat=sides) if math.prod(s) == chips]
    if sides == 3 and chips % 4 == 0:  # in whole hosts; the long side last
        shapes = [s for s in shapes if s[0] % 2 == s[1] % 2 == 0]
    return f"{kind}:" + "x".join(map(str, min(shapes, key=lambda s: (max(s) - min(s), s))))


def describe(name: str, slices: int = 1) -> Described:
    """Returns the topology of a name, as "v5e:16x16", "cpu:8", "gpu:8" or "gpu:4x8" (four hosts).

    Raises:
      ValueError: there is no such topology.
      RuntimeError: what describes it is not installed, or in use.
    """
    kind, _, shape = name.partition(":")
    if not shape or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(_unknown_text(name, "no shape" if not shape else f"the shape {shape!r}"))
    if kind == "cpu":
        return Described(name, 1, _cpus(name, shape))
    if kind in ("gpu", "cuda"):
        hosts, _, count = shape.rpartition("x")
        grid = f"{slices}x{hosts or 1}x{count}"
        devices = _asked(name, "cuda", "", topology=grid)
        return Described(name, slices, devices, _limit(devices[:1]))
    require_libtpu()
    if kind not in _SPEEDS:
        raise ValueError(_unknown_text(name, f"the kind {kind!r}"))
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    devices = _asked(name, "tpu", name, **options)
    order = sorted(devices, key=lambda d: getattr(d, "slice_index", 0))
    return Described(name, slices, order, _limit(devices), _SPEEDS[kind])


def require_libtpu() -> None:
    """Raises a RuntimeError unless the libtpu of this line of JAX is installed."""
    try:
        found = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not found.startswith(f"{LIBTPU}."):
        raise RuntimeError(
            message(
                f"a plan for TPUs needs libtpu {LIBTPU}, with JAX {jax.__version__}",
                got="no libtpu" if found is None else f"libtpu {found}",
                why="it holds the compiler for TPUs, and each line of JAX goes with one line of it",
                fix=INSTALL,
            )
        )


def _cpus(name: str, shape: str) -> Sequence[jax.Device]:
    count = int(shape) if shape.isdigit() else 0
    devices = jax.devices("cpu")
    if 1 <= count <= len(devices):
        return devices[:count]
    raise ValueError(
        message(
            f"{name} needs as many virtual CPU devices",
            got=f"{len(devices)} of them in this process",
            why="their number is fixed when JAX first uses them",
            fix=f"python -m distjax plan TARGET --topology {name}, or JAX_NUM_CPU_DEVICES={shape} "
            "before Python starts",
        )
    )


def _asked(name: str, platform: str, known: str, **options: object) -> Sequence[jax.Device]:
    """Returns the devices that a compiler describes."""
    own = {
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the network where it is
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    for key, value in own.items() if platform == "tpu" else ():
        os.environ.setdefault(key, value)
    try:
        return topologies.get_topology_desc(known, platform, **options).devices
    except Exception as error:
        first = str(error).strip().splitlines()[0][:200].rstrip(".")
        if re.search(r"(?i)already in use|lockfile|in use by", str(error)):
            expected = f"{name} needs libtpu, which one process at a time may load"
            why = "libtpu locks a file, /tmp/libtpu_lockfile, while a process has it loaded"
            fix = "wait for the other plan or training to end, and plan again"
        elif platform == "cuda":
            expected = f"{name} needs a GPU in this machine, and JAX's plugin for it"
            why = "GPUs are described by the one that is there"
            fix = 'pip install "jax[cuda13]" on a machine with a GPU; or --topology cpu:8'
        else:
            raise ValueError(_unknown_text(name, first)) from error
        raise RuntimeError(message(expected, got=first, why=why, fix=fix)) from error


def _unknown_text(name: str, got: str) -> str:
    return message(
        f"topology {name!r} needs to be a kind of device and the shape of a slice of it",
        got=got,
        why="a plan is made for devices that a compiler knows",
        fix=f"--topology with one of, or like: {_KNOWN}",
    )


def _limit(devices: Sequence[jax.Device]) -> int | None:
    """Asks for far too much memory, and reads how much there is in the refusal."""
    mesh = Mesh(np.array(devices), "x")
    whole = NamedSharding(mesh, PartitionSpec())
    huge = struct((2**20, 2**20), np.float32, whole)
    try:
        jax.jit(lambda x: (x @ x) @ x, out_shardings=whole).lower(huge).compile()
    except Exception as error:
        found = read_exhausted(str(error))
        return found[1] if found else None
    return None


_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_EXHAUSTED = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} (?i:hbm)")


def read_exhausted(text: str) -> tuple[int, int, bool] | None:
    """Returns what a compiler says that a program needs, and that there is; None if it does not.

    Returns:
      (bytes needed, bytes there are, whether only temporaries are meant).

    Example:
      >>> read_exhausted("required for HLO temporaries (20.00G) exceeds available HBM (15.75G)")
      (21474836480, 16911433728, True)
    """
    found = _EXHAUSTED.search(text) or _USED.search(text)
    if found is None:
        return None
    needed, size = (
        int(float(found[i]) * 1024 ** " KMGT".index(found[i + 1] or " ")) for i in (1, 3)
    )
    return needed, size, "temporaries" in text
