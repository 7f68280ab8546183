"""`distjax doctor`: joins a job, tries what a training needs, and says what is wrong and the cure.

With --processes it starts them here; otherwise it is one of those that a scheduler has started.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from distjax._src.launch.info import describe, memory
from distjax._src.launch.launcher import Launcher, Options
from distjax._src.tables import Table, as_text, format_bytes
from distjax.errors import ClusterError

_SIZES = (4096, 1 << 18, 1 << 22, 1 << 24)  # bytes of an all-reduce, on each device
_NUM_TRIES = 5
_MAX_SKEW, _MIN_MEMORY = 5.0, 1.0  # seconds between clocks; GiB
_LINK_BYTES = 1 << 26


def main(argv: Sequence[str]) -> int:
    """Runs `distjax doctor` with these arguments; 0: well, 1: something is wrong."""
    parser = argparse.ArgumentParser(prog="distjax doctor", description=__doc__)
    parser.add_argument("--processes", type=int, metavar="P", help="start so many here")
    parser.add_argument("--shared-dir", metavar="DIR", help="that all processes should share")
    parser.add_argument("--seconds", type=int, default=60, metavar="S", help="at most (60)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.processes is None:
        found = examine(options.shared_dir, options.seconds)
    else:
        found = _launch(options.processes, options.shared_dir, options.seconds)
    if found is None:  # not process 0
        return 0
    print(json.dumps(found, indent=2) if options.json else _as_text(found))
    return int(bool(found["wrong"]))


def _launch(num_processes: int, shared: str | None, seconds: int) -> dict[str, Any]:
    """Returns what process 0 of a job on this machine has found, which prints it."""
    said: list[str] = []
    show = lambda index, line: said.append(line.decode()) if index == 0 else None
    command = ["-m", "distjax", "doctor", "--json", "--seconds", str(seconds)]
    command += ["--shared-dir", os.path.abspath(shared)] if shared is not None else []
    with tempfile.TemporaryDirectory(prefix="distjax-doctor-") as folder:
        launcher = Launcher(
            Options(tuple(command), max(num_processes, 1)), folder, show, lambda _: None
        )
        try:
            launcher.run(seconds)
            why = launcher.failure.error if launcher.failure is not None else ""
        except TimeoutError:
            why = f"the processes did not end within {seconds} s"
    if "{" in said:  # behind what libraries print
        return json.loads("".join(said[said.index("{") :]))
    cure = "distjax launch --processes 2 script.py shows what each process says"
    return {"processes": [], "all_reduce": [], "wrong": [{"what": why, "cure": cure}]}


def examine(shared: str | None, seconds: int) -> dict[str, Any] | None:
    """Returns what is found in the job of this process; None on all but process 0."""
    import distjax
    from distjax._src.cluster.job import job
    from distjax._src.cluster.meeting import hear_all, hear_first

    wrong: list[dict[str, str]] = []
    is_wrong = lambda what, cure: wrong.append({"what": what, "cure": cure})
    began = time.monotonic()
    try:
        distjax.initialize(initialization_timeout=seconds)
    except ClusterError as error:
        is_wrong(*str(error).split("\n  Fix: "))
        return {"processes": [], "all_reduce": [], "wrong": wrong}
    joined, seconds_to_join = job(), time.monotonic() - began
    hear_all(joined, "the clocks", lambda: None)  # all are here: their clocks say the same
    facts = hear_all(joined, "the facts", lambda: _facts(seconds_to_join))
    first = facts[0]
    for i, own in enumerate(facts):
        skew, where = own["clock"] - first["clock"], f"process {i} on {own['host']}"
        if abs(skew) > _MAX_SKEW:
            is_wrong(f"the clock of {where} is {skew:.1f} s off", "timedatectl set-ntp true")
        if own["available_gib"] < _MIN_MEMORY:
            is_wrong(
                f"{own['available_gib']:.1f} GiB of memory are left for {where}",
                "ps aux --sort=-rss | head, and end what is large",
            )
        for name in ("Python", "jax", "jaxlib", "distjax", "hash_seed"):
            if own[name] != first[name]:
                cures = {"hash_seed": "export PYTHONHASHSEED=0", "Python": "use one Python"}
                cure = cures.get(name, f"pip install {name}=={first[name]}")
                is_wrong(f"{name} of {where} is {own[name]}, of process 0 {first[name]}", cure)
    if shared is not None:
        token = hear_first(joined, "a file for all", lambda: _leave_token(shared))
        for i, sees in enumerate(hear_all(joined, "a look", lambda: _sees(shared, token))):
            if not sees:
                who = f"process {i} on {facts[i]['host']}"
                what = f"{who} does not see process 0's file in {shared}"
                is_wrong(what, f"mount one file system at {shared} everywhere")
        with contextlib.suppress(OSError):
            os.remove(os.path.join(shared, token))
    reduced = _time_all_reduces()
    link = hear_first(joined, "the speed of the link", _link_speed)
    if joined is not None and joined.process_id:
        return None
    for row in reduced:
        row["link_share"] = row["bytes_per_second"] / link if link else None
    found = {"processes": facts, "all_reduce": reduced, "link_bytes_per_second": link}
    return found | {"wrong": wrong}


def _facts(seconds_to_join: float) -> dict[str, Any]:
    found, clock = describe(), time.time()
    names = ("Python", "jax", "jaxlib", "distjax", "host", "devices")
    return {name: found[name].partition(" (")[0] for name in names} | {
        "clock": clock,
        "available_gib": memory()[0],
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "seconds_to_join": round(seconds_to_join, 3),
    }


def _leave_token(shared: str) -> str:
    token = f".distjax-doctor-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # then nobody sees it
        os.makedirs(shared, exist_ok=True)
        open(os.path.join(shared, token), "w").close()
    return token


def _sees(shared: str, token: str) -> bool:
    deadline = time.monotonic() + 5.0  # network file systems take a moment
    while not os.path.exists(os.path.join(shared, token)):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


def _time_all_reduces() -> list[dict[str, Any]]:
    """Returns the time of an all-reduce over all devices, by size."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("d",))
    split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
    rows: list[dict[str, Any]] = []
    for size in _SIZES:
        shape = (len(devices), size // 4)
        ones = np.ones((1, size // 4), np.float32)
        x = jax.make_array_from_callback(shape, split, lambda _, ones=ones: ones)
        total(x).block_until_ready()
        seconds: list[float] = []
        for _ in range(_NUM_TRIES):
            began = time.perf_counter()
            total(x).block_until_ready()
            seconds.append(time.perf_counter() - began)
        best = min(seconds)  # a ring sends 2 (n - 1) / n of the bytes over each link
        sent = 2 * (len(devices) - 1) / len(devices) * size
        rows.append({"bytes": size, "seconds": best, "bytes_per_second": sent / best})
    return rows


def _link_speed() -> float | None:
    """Returns what the link between processes could do, in bytes a second; None: unknown.

    Within one machine it is measured, over loopback; a network card says what it can do.
    """
    from distjax._src.cluster.roll_call import local_address_towards, split_address

    address = os.environ.get("DISTJAX_COORDINATOR", "127.0.0.1:1")
    host = local_address_towards(*split_address(address, "DISTJAX_COORDINATOR"))
    if not host.startswith("127.") and host != "::1":
        speeds: list[float] = []
        for path in glob.glob("/sys/class/net/*/speed"):
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                speeds.append(int(file.read()) * 1e6 / 8)
        return max(speeds, default=None)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sending,
    ):
        theirs, _ = server.accept()
        sender = threading.Thread(target=sending.sendall, args=(bytes(_LINK_BYTES),))
        began, left = time.perf_counter(), _LINK_BYTES
        sender.start()
        with theirs:
            while left:
                left -= len(theirs.recv(1 << 20))
        sender.join()
        return _LINK_BYTES / (time.perf_counter() - began)


def _as_text(found: dict[str, Any]) -> str:
    names = ("host", "devices", "jax", "available_gib", "seconds_to_join")
    text = lambda value: f"{value:.1f}" if isinstance(value, float) else str(value)
    rows = [(str(i), *(text(x[name]) for name in names)) for i, x in enumerate(found["processes"])]
    tables = [Table("Processes:", ("process", *names), tuple(rows))]
    share = lambda row: f"{row['link_share']:.0%}" if row["link_share"] else "unknown"
    reduced = [
        (format_bytes(row["bytes"]), f"{row['seconds'] * 1e3:.2f} ms")
        + (format_bytes(row["bytes_per_second"]), share(row))
        for row in found["all_reduce"]
    ]
    header = ("size", "time", "a second", "of the link")
    tables.append(Table("All-reduce over all devices:", header, tuple(reduced)))
    wrong = [f"Wrong: {each['what']}\n  Cure: {each['cure']}" for each in found["wrong"]]
    return "\n".join([as_text([t for t in tables if t.rows]), *(wrong or ["All is well."])]).strip()
