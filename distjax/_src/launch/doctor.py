"""`distjax doctor`: joins a job, tries what a training needs, and says what is wrong and the cure.

With --processes it starts them here; otherwise it is one of those that a scheduler has started.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from distjax._src.launch.info import describe, memory
from distjax._src.launch.launcher import Launcher, Options
from distjax._src.tables import Table, as_text, format_bytes
from distjax.errors import ClusterError

_SIZES = (4096, 1 << 18, 1 << 22, 1 << 24)  # bytes of an all-reduce, on each device
_NUM_TRIES = 6
_MAX_SKEW, _MIN_MEMORY = 5.0, 1.0  # seconds between clocks; GiB
_LINK_BYTES = 1 << 26
#: What is found where nobody could join.
_NOTHING: dict[str, Any] = {"processes": [], "all_reduce": [], "link_bytes_per_second": None}


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
        options = Options(command, max(num_processes, 1))
        launcher = Launcher(options, folder, show, lambda _: None)
        try:
            launcher.run(seconds)
            why = launcher.failure.error if launcher.failure is not None else ""
        except TimeoutError:
            why = f"the processes did not end within {seconds} s"
    if "{" in said:  # behind what libraries print
        return json.loads("".join(said[said.index("{") :]))
    cure = "distjax launch --processes 2 script.py shows what each process says"
    return _NOTHING | {"wrong": [_wrong(why, cure)]}


def _wrong(what: str, cure: str) -> dict[str, str]:
    return {"what": what, "cure": cure}


def examine(shared: str | None, seconds: int) -> dict[str, Any] | None:
    """Returns what is found in the job of this process; None on all but process 0."""
    import distjax
    from distjax._src.cluster.job import job
    from distjax._src.cluster.meeting import hear_all, hear_first, who_sees

    began = time.monotonic()
    try:
        distjax.initialize(initialization_timeout=seconds)
    except ClusterError as error:
        what, _, cure = str(error).partition("\n  Fix: ")
        return _NOTHING | {"wrong": [_wrong(what, cure)]}
    joined, seconds_to_join = job(), time.monotonic() - began
    hear_all(joined, "the clocks", lambda: None)  # all are here: their clocks say the same
    facts = hear_all(joined, "the facts", lambda: _facts(seconds_to_join))
    wrong = [*_compare(facts)]
    if shared is not None:
        said = who_sees(joined, "a file for all", shared) or [False] * len(facts)
        for own in (own for own, sees in zip(facts, said, strict=True) if not sees):
            what = f"{own['who']} does not see process 0's file in {shared}"
            wrong.append(_wrong(what, f"mount one file system at {shared} everywhere"))
    reduced = _time_all_reduces()
    measure = _loopback_speed if len({own["host"] for own in facts}) == 1 else _card_speed
    link = hear_first(joined, "the speed of the link", measure)
    if joined is not None and joined.process_id:
        return None
    for row in reduced:
        row["link_share"] = row["bytes_per_second"] / link if link else None
    found = {"processes": facts, "all_reduce": reduced, "link_bytes_per_second": link}
    return found | {"wrong": wrong}


def _compare(facts: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields what is wrong with processes, and the cure; those of other versions cannot join."""
    for own in facts:
        skew = own["clock"] - facts[0]["clock"]
        if abs(skew) > _MAX_SKEW:
            what = f"the clock of {own['who']} is {skew:.1f} s off"
            yield _wrong(what, "timedatectl set-ntp true")
        if own["available_gib"] < _MIN_MEMORY:
            what = f"{own['available_gib']:.1f} GiB of memory are left for {own['who']}"
            yield _wrong(what, "ps aux --sort=-rss | head, and end what is large")


def _facts(seconds_to_join: float) -> dict[str, Any]:
    import jax

    clock, found = time.time(), describe()  # all are asked at the same time
    names = ("Python", "jax", "jaxlib", "distjax", "host", "devices")
    return {name: found[name] for name in names} | {
        "who": f"process {jax.process_index()} on {found['host']}",
        "clock": clock,
        "available_gib": memory()[0],
        "seconds_to_join": round(seconds_to_join, 3),
    }


def _time_all_reduces() -> list[dict[str, Any]]:
    """Returns the time of an all-reduce over all devices, by size."""
    import numpy as np

    import distjax as dj

    strategy = dj.MultiWorkerMirroredStrategy()
    count, rows = strategy.num_replicas_in_sync, list[dict[str, Any]]()
    total = lambda x: dj.get_replica_context().all_reduce("sum", x)
    for size in _SIZES:
        ones = np.ones(size // 4, np.float32)
        x = strategy.distribute_values_from_function(lambda _, ones=ones: ones)
        seconds: list[float] = []
        for _ in range(_NUM_TRIES):  # the first one compiles
            began = time.perf_counter()
            strategy.run(total, args=(x,)).block_until_ready()
            seconds.append(time.perf_counter() - began)
        best = min(seconds)  # a ring sends 2 (n - 1) / n of the bytes over each link
        sent = 2 * (count - 1) / count * size
        rows.append({"bytes": size, "seconds": best, "bytes_per_second": sent / best})
    return rows


def _card_speed() -> float | None:
    """Returns what the fastest network card says it can do, in bytes a second; None: unknown."""
    speeds: list[float] = []
    for path in glob.glob("/sys/class/net/*/speed"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            speeds.append(int(file.read()) * 1e6 / 8)
    return max(speeds, default=None)


def _loopback_speed() -> float | None:
    """Returns what goes from one socket of this machine to another, as gloo sends it."""
    import jax

    if jax.default_backend() != "cpu":
        return None  # accelerators of one machine have links of their own
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sending,
        server.accept()[0] as theirs,
    ):
        sender = threading.Thread(target=sending.sendall, args=(bytes(_LINK_BYTES),))
        began = time.perf_counter()
        sender.start()
        theirs.recv(_LINK_BYTES, socket.MSG_WAITALL)
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
