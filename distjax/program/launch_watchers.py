"""What watches launches: the limit on programs in flight, and the ledger of a job.

Importing this module registers them with `launch`.
"""

from __future__ import annotations

from typing import Any

import jax

from distjax import jax_compat
from distjax.cluster.job import job
from distjax.cluster.ledger import Launch, ledger
from distjax.cluster.phases import lone_programs
from distjax.collectives.eager import awaiting, count_launch, is_throttled, record_completion
from distjax.program.agreement import agree_on_program
from distjax.program.discovery import signature_of
from distjax.program.host_arguments import LeafPath, checksum, find_host_leaves
from distjax.program.launch import Build, Watcher, watcher_makers
from distjax.program.output_spec import completion_of
from distjax.typing import PyTree


def _throttle(build: Build) -> Watcher | None:
    """Awaits older programs when too many are in flight: see `collectives.throttle`."""
    if not is_throttled() or not (build.spans_devices or build.spans_processes):
        return None
    records_all = job() is not None

    def after(returned: tuple[Any, ...]) -> None:
        number = count_launch()
        if number == 0 or awaiting or records_all:
            end = completion_of(returned)
            if end is not None and not isinstance(end, jax_compat.Tracer):
                record_completion(end, number)

    return Watcher(after=after)


class _Recorder:
    """Agrees on a program before its first launch, and records each launch in the ledger."""

    def __init__(self) -> None:
        self._agreed: dict[Any, tuple[int, tuple[LeafPath, ...]]] = {}
        self._launch: Launch | None = None

    def compiled(
        self, build: Build, lowered: jax.stages.Lowered, args: PyTree, kwargs: PyTree
    ) -> None:
        """Waits until every process is about to run this program with these arguments."""
        agreed = agree_on_program(build, lowered, build.step.argument_names, args, kwargs)
        paths = find_host_leaves(args, kwargs)
        self._agreed[signature_of((args, kwargs))] = agreed, paths

    def begin(self, build: Build, args: PyTree, kwargs: PyTree) -> None:
        """Records that the program is about to run."""
        if not jax_compat.tracing():
            agreed, paths = self._agreed.get(signature_of((args, kwargs)), (0, ()))
            arguments = checksum(paths, args, kwargs) if paths else 0
            self._launch = ledger.begin_launch(Launch(build.name, agreed, arguments))

    def end(self, returned: tuple[Any, ...] | None) -> None:
        """Records that it runs, and what is ready when it completes."""
        launch, self._launch = self._launch, None
        if launch is None:
            return
        if returned is None:
            ledger.abandon_launch(launch)
        else:
            ledger.end_launch(launch, completion_of(returned))


def _record(build: Build) -> Watcher | None:
    """Lets the ledger of a job know of each launch."""
    if job() is None:
        return None
    if not build.spans_processes:
        return Watcher(begin=lambda build, *_: lone_programs.record(build.name, ledger.count))
    recorder = _Recorder()
    return Watcher(recorder.compiled, recorder.begin, recorder.end)


watcher_makers.extend((_record, _throttle))
