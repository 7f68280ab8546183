"""What is sent between processes: arrays, programs, orders to workers, and exceptions.

Arrays travel as numpy arrays, without a copy; programs as StableHLO, with none of the user's code;
exceptions as data, since Ray raises one that it cannot unpickle as an error of its own, which looks
like the loss of the process.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.sharding import Sharding, SingleDeviceSharding

from distjax._src import jax_compat
from distjax._src.context.thread_settings import ProgramModes
from distjax._src.placement.topology import abstract_topology
from distjax._src.placement.transfer import transfer_each
from distjax._src.servers.plan import Program, Stage, StepPlan, shardings_of, struct_of
from distjax._src.typing import PyTree
from distjax._src.user_lines import is_library_file
from distjax.errors import ClosureError, UnsupportedError, message, require

# -- arrays -------------------------------------------------------------------

# JAX's own pickle is slower, PRNG keys are not numpy arrays, and numpy pickles dtypes that it
# does not know (bfloat16) through a copy.


class Disguised(NamedTuple):
    """An array of a dtype unknown to numpy, as one of a dtype that numpy knows.

    Attributes:
      data: the same bytes as unsigned integers.
      dtype: the name of the dtype; for a key, the name of its implementation.
      is_key: whether it is a PRNG key.
    """

    data: np.ndarray
    dtype: str
    is_key: bool


#: The wire form of one array.
OnWire = np.ndarray | Disguised


def to_wire(tree: PyTree) -> Any:
    """Returns a tree with its arrays in wire form; waits until they are computed."""
    return jax.tree.map(lambda x: _to_wire(x) if isinstance(x, jax.Array | np.ndarray) else x, tree)


def _to_wire(array: jax.Array | np.ndarray) -> OnWire:
    if isinstance(array, jax.Array) and jax_compat.is_key_dtype(array.dtype):
        data = np.asarray(jax.random.key_data(array))
        return Disguised(data, jax_compat.key_impl(array.dtype), True)
    host = np.asarray(array)
    if host.dtype.kind != "V":
        return host
    return Disguised(host.view(f"u{host.itemsize}"), host.dtype.name, False)


def from_wire(sent: PyTree, device: jax.Device | None = None) -> Any:
    """Returns a tree with its arrays on a device; on a CPU, where they arrived if possible."""
    leaves, treedef = jax.tree.flatten(sent, is_leaf=lambda x: isinstance(x, Disguised))
    arrays = [x for x in leaves if isinstance(x, OnWire)]
    sharding = None if device is None else SingleDeviceSharding(device)
    with jax.enable_x64(True):  # else 64-bit values would be truncated, whoever sent them
        placed: list[jax.Array] = transfer_each(list(map(_as_host, arrays)), sharding)
        found = map(_as_key, arrays, placed)
        return treedef.unflatten([next(found) if isinstance(x, OnWire) else x for x in leaves])


def _as_host(sent: OnWire) -> np.ndarray:
    if not isinstance(sent, Disguised) or sent.is_key:
        return sent.data if isinstance(sent, Disguised) else sent
    return sent.data.view(jax.numpy.dtype(sent.dtype))


def _as_key(sent: OnWire, array: jax.Array) -> jax.Array:
    if not isinstance(sent, Disguised) or not sent.is_key:
        return array
    return jax.random.wrap_key_data(array, impl=sent.dtype)


# -- exceptions ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failed:
    """User code raised an exception in the process of a worker.

    Attributes:
      pickled: the exception; empty if it cannot be pickled.
      text: its type and text.
      lines: the user's lines of its traceback.
    """

    pickled: bytes
    text: str
    lines: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Returns an exception that is being handled, as data."""
        from ray import cloudpickle

        text = "".join(traceback.format_exception_only(error)).strip()
        entries = traceback.extract_tb(error.__traceback__)
        own = [entry for entry in entries if not is_library_file(entry.filename, entry.name)]
        lines = "".join(traceback.format_list(own))
        try:
            return cls(cloudpickle.dumps(error), text, lines)
        except Exception:
            return cls(b"", text, lines)

    @property
    def error(self) -> BaseException:
        """The exception; a ClosureError that quotes it, if it cannot be unpickled."""
        from ray import cloudpickle

        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:
            error = ClosureError(_not_portable(self.text))
        if self.lines:
            error.add_note(f"It was raised in the process of a worker:\n{self.lines}")
        return error


def _not_portable(text: str) -> str:
    return message(
        "an exception needs to be pickled to be raised here",
        got=f"one that cannot be, or cannot be read again: {text}",
        why="it was raised in the process of a worker",
        fix="hand all of its arguments on, and nothing else: "
        "def __init__(self, path, line): super().__init__(path, line)",
    )


# -- orders to a worker -------------------------------------------------------


class Place(NamedTuple):
    """Where an array is: in which of the elements that an order names.

    Attributes:
      element: the number of the element, among these.
      number: the number of the array in it.
      dtype: the dtype in which it is wanted.
    """

    element: int
    number: int
    dtype: np.dtype


class Order(NamedTuple):
    """An order to a worker to run an attempt.

    Attributes:
      plan: its number.
      closure: the number of the closure.
      attempt: 1, 2, ...
      arrays: the flat arguments; a `Place` for an array of an element.
      modes: the JAX modes in effect where the closure was scheduled.
    """

    plan: int
    closure: int
    attempt: int
    arrays: Sequence[OnWire | Place]
    modes: ProgramModes


class Done(NamedTuple):
    """The result of an attempt: results, and versions by server."""

    results: Sequence[OnWire]
    versions: Mapping[int, int]


# -- plans --------------------------------------------------------------------


class StableFunction:
    """A function of flat arrays as StableHLO: sent as bytes, read at its first run."""

    def __init__(self, blob: bytes):
        self._blob = blob
        self._exported: export.Exported | None = None

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if self._exported is None:
            self._exported = export.deserialize(bytearray(self._blob))
            _require_no_callback(self._exported)
        return tuple(self._exported.call(*arrays))

    def __reduce__(self) -> tuple[type[StableFunction], tuple[bytes]]:
        return StableFunction, (self._blob,)


def _require_no_callback(exported: export.Exported) -> None:
    """Raises if a received program would call Python, whatever its sender has checked."""
    found = re.search(r"custom_call @(\w*callback\w*)", exported.mlir_module())
    require(
        found is None,
        "a program that is shipped needs to be all StableHLO",
        got=f"one that calls {found and found[1]}",
        why="it would call Python by an address of another process",
        fix="schedule steps by dj.Coordinator, which ships none of that kind",
        error=UnsupportedError,
    )


def export_plan(
    plan: StepPlan,
    replicas: tuple[int, str],
    worker_platforms: Iterable[str],
    server_platforms: Iterable[str],
) -> StepPlan:
    """Returns a plan in the form in which it is sent.

    Args:
      plan: made by a strategy.
      replicas: how many replicas each worker has, and the name of their axis.
      worker_platforms: the platforms of its workers.
      server_platforms: the platforms of its servers.

    Raises:
      UnsupportedError: a program calls back to Python, or has no stable form.
    """
    anywhere = abstract_topology(*replicas)

    def exported(stage: Stage) -> Stage:
        ins, outs = None, None
        if anywhere.num_replicas > 1:  # over any worker's devices
            ins, (*outs, _) = shardings_of(stage, plan, anywhere)
        return dataclasses.replace(
            stage,
            program=_export(plan.name, stage.program, worker_platforms, ins, outs),
            pushes=tuple(
                dataclasses.replace(p, program=_export(plan.name, p.program, server_platforms))
                for p in stage.pushes
            ),
        )

    # The other fields hold objects of the user or the strategy.
    return dataclasses.replace(
        plan, stages=tuple(map(exported, plan.stages)), rebuild=tuple, kept=()
    )


def _export(
    name: str,
    program: Program,
    platforms: Iterable[str],
    ins: Sequence[Sharding] | None = None,
    outs: Sequence[Sharding] | None = None,
) -> Program:
    pairs = zip(program.avals, ins or (None,) * len(program.avals), strict=True)
    shapes = [struct_of(aval, sharding) for aval, sharding in pairs]
    jitted = jax.jit(program.fn, out_shardings=outs and tuple(outs))
    make: Any = export.export(jitted, platforms=sorted(set(platforms)))
    try:
        blob = bytes(make(*shapes).serialize())
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            message(
                f"{name} needs programs that run in other processes, on RayEngine",
                got=f"one that cannot be shipped: {error}",
                why="workers and servers are sent StableHLO, and nothing of your Python: there is "
                "nothing that jax.debug.print, pure_callback or io_callback could call",
                fix="take the callback out of the step, and return what it needs; or run it on "
                'engine="threads"',
            )
        ) from error
    return Program(program.name, StableFunction(blob), program.avals)
