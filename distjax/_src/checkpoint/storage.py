"""Storage: the steps in a directory, written in the background by orbax.

A save has a writer of orbax of its own, which is gone when the step is complete. It is asked
nothing: the steps are the folders with a number for a name, and a step's description is a JSON
file, so a look takes neither a writer nor the other processes; which steps are kept is decided
here. (Orbax's CheckpointManager does that, too, and polls for SIGTERM at each save, from which on a
program that looks for no notice would not end.) Ctrl-C, which orbax would take for a failure of its
own, waits until orbax returns; where that may take long, in a thread of its own, it ends only the
wait.

The processes of a job do the same, and hear how it went (`hear_all`): orbax's save and restore run
programs over all devices, in which the others would wait for a process that has raised. So each
process first tries to write, reads its own part without the others, and process 0 alone looks at
the directory and removes steps.

- A step is complete or absent: it is written under another name and then renamed, and one to be
  removed is renamed first. So a kill leaves only whole steps. The next process that saves removes
  what a killed one left behind: a directory has one writing process (or job).
- A background failure is raised by the next call.
- Values are as of the call. Orbax copies from an accelerator before its `save` returns. On a CPU it
  reads the buffer itself, and JAX does not donate a buffer while numpy views it: it copies.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Sharding

from distjax._src.checkpoint.leaves import Leaf, encode_array
from distjax._src.cluster.job import Job, job, record
from distjax._src.cluster.ledger import ledger, phase
from distjax._src.cluster.meeting import (
    ComparedFact,
    agree,
    come_and_hear,
    failure_of,
    hear_all,
    hear_first,
    require_no_failure,
    who_sees,
)
from distjax._src.context import settings_of_this_thread
from distjax._src.interrupts import interrupts
from distjax._src.placement import require_wholly_here
from distjax.errors import (
    CheckpointError,
    ClusterError,
    describe_error,
    describe_value,
    message,
    require,
)

if TYPE_CHECKING:
    from etils import epath  # orbax's paths

_VALUES, _DESCRIPTION = "values", "description"  # subdirectories of a step
_JSON_FILE = "metadata"  # in the latter
#: Steps are moved here by a rename before their files are removed, so that a process killed
#: meanwhile leaves no step with half of its files.
_REMOVED = ".removed"
#: The suffix of directories that orbax has not completed.
_UNFINISHED = ".orbax-checkpoint-tmp"
#: More than orbax writes before the processes have begun to write their parts.
_ATTEMPT_BYTES = 1 << 14
_DAY = 86400  # in seconds

#: What a checkpoint needs to be where something is done with it; why it may not be; the fix.
_NEEDS = {
    "writing": (
        "written to the disk",
        "the disk may be full, the directory closed to this user, or another checkpointer writing "
        "to it; the step is not complete, those before it are as they were",
        "make room, or give another directory, and call checkpointer.save(step, tree) again",
    ),
    "reading": (
        "one that distjax wrote, with all its files",
        "it was written by another program, or files in it are damaged or gone, as those of a step "
        "that max_to_keep has removed. Nothing has been changed",
        "restore another step: checkpointer.restore(tree, step=...); checkpointer.all_steps() "
        "lists them",
    ),
    "removing": (
        "removed from the disk",
        "the directory may be closed to this user, or the disk read-only",
        "open it for writing, and call checkpointer.delete(step) again",
    ),
}
T = TypeVar("T")

#: Storages that write, kept here even if nothing else references them.
saves_under_way: set[Storage] = set()
# The threads that write are not in a forked process, which would wait for them forever.
os.register_at_fork(after_in_child=saves_under_way.clear)


def wait_for_all() -> None:
    """Waits for every save; raises the first error of those that fail."""
    errors: list[Exception] = []
    for storage in list(saves_under_way):
        try:
            storage.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


# A program may end with a save. `atexit` functions run after Python has shut down the thread
# pools, without which orbax cannot complete a step.
_register: Any = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(wait_for_all)


class Storage:
    """The checkpoints in one directory, of a job whose processes all take part, or of this process.

    Orbax writes a step to a directory of another name and renames it when complete, so that a
    killed process leaves only complete steps.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        best_metric: str | None,
        best_mode: str,
        local: bool,
    ):
        self.job = None if local else job()
        self._is_local = local
        occasion = "the construction of a Checkpointer"  # the path may be spelled differently
        hear_first(self.job, occasion, lambda: _require_checkpoint_directory(directory))
        self.directory = os.path.abspath(os.fspath(directory))
        if self.job is not None:
            _require_shared(self.job, occasion, self.directory)
        self._max_to_keep = max_to_keep
        self._best_metric = best_metric
        self._quality: Callable[[Mapping[str, float]], float] | None = None
        if best_metric is not None:
            self._quality = functools.partial(_quality, best_metric, best_mode)
        #: The step that is being written, its writer, and where the processes wait for each other.
        self._under_way: tuple[int, ocp.AsyncCheckpointer, _WriteBarrier | None] | None = None
        self._has_saved = False

    def describe_step(self, step: int) -> str:
        """Returns the name of the checkpoint of `step` in error texts."""
        return f"the checkpoint of step {step} in {self.directory!r}"

    def agree(
        self,
        occasion: str,
        step: int | None,
        leaves: Iterable[Leaf] = (),
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Waits until every process of the job is about to do the same with the same step.

        Values are not compared: numbers and host arrays are saved as process 0 has them. `options`
        are other arguments that decide what happens, by name.
        """
        if self.job is None:
            return
        known = "the latest" if step is None else str(step)
        facts = [ComparedFact(f"the step of {occasion}", known)]
        facts += [ComparedFact(f"{x.key!r} in {occasion}", str(x.spec.to_json())) for x in leaves]
        named = (options or {}).items()
        facts += [ComparedFact(f"{name} of {occasion}", str(x)) for name, x in named]
        agree(occasion, facts)

    def _call(self, fn: Callable[[], T], *, is_long: bool = False) -> T:
        """Returns ``fn()``, which calls orbax: a signal's exception never comes from inside.

        If it `is_long`, Ctrl-C ends the wait for it, and it goes on by itself.
        """
        if self.job is not None:
            ledger.wait()  # orbax syncs devices: see `begin_launch`
        if is_long:
            return _call_apart(fn)
        with interrupts.held():
            return fn()

    # -- writing --------------------------------------------------------------

    def write(
        self,
        step: int,
        arrays: Mapping[str, Any],
        description: Mapping[str, Any],
        cuts: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Starts writing a step, after completing the one in progress.

        `cuts` are the shapes of the values of arrays that are padded, by key.
        """
        self._require_origin()
        self.wait()
        if self._is_alone_in_a_job:  # orbax rejects single-process arrays there
            for key, array in arrays.items():
                require_wholly_here(array, repr(key))
            arrays = {key: np.array(array) for key, array in arrays.items()}
            arrays |= {key: arrays[key][tuple(map(slice, shape))] for key, shape in cuts.items()}
            cuts = {}
            if jax.process_index() != 0:  # orbax writes no single-process arrays here at all
                values = {key: encode_array(array) for key, array in arrays.items()}
                description = {**description, "values": {**description["values"], **values}}
                arrays = {}
        items: dict[str, Any] = {_DESCRIPTION: ocp.args.JsonSave(description)}
        if arrays:
            items[_VALUES] = ocp.args.PyTreeSave(dict(arrays))
        with self._guard("writing", step):
            # Where one process cannot write, orbax leaves the others waiting for it.
            hear_all(self.job, "the start of a save", self._try_to_begin)
            barrier = None if self.job is None else _WriteBarrier(self.job)
            writer = self._make_writer(barrier, cuts)

            def begin() -> None:
                self._under_way = step, writer, barrier
                saves_under_way.add(self)
                writer.save(self._path(step), args=ocp.args.Composite(**items))

            self._call(begin)

    def _try_to_begin(self) -> None:
        """Writes a file, and removes it and what a killed process left of its saves.

        An OSError: the directory is closed to this process, read-only or full, or what was left
        belongs to another user.
        """
        os.makedirs(self.directory, exist_ok=True)
        # Named by the process, so that the next attempt removes what a killed one left.
        own = jax.process_index()
        path = Path(self.directory, f".distjax-{own}")
        try:
            path.write_bytes(bytes(_ATTEMPT_BYTES))
        finally:
            path.unlink(missing_ok=True)
        if self._is_first_process and not self._has_saved:
            for name in os.listdir(self.directory):
                if name.endswith(_UNFINISHED):
                    shutil.rmtree(os.path.join(self.directory, name))
        self._has_saved = True

    def wait(self) -> None:
        """Blocks until the save in progress is complete; raises a CheckpointError if it failed.

        Then the steps that are not to be kept are removed.
        """
        if self._under_way is None:
            return
        step, writer, _ = self._under_way
        with self._guard("writing", step):
            self._call(writer.wait_until_finished, is_long=True)
            self._call(writer.close)
        self._set_complete()
        self._record("committed", step)
        if self._is_first_process and self._max_to_keep is not None:
            # What cannot be looked at, or removed, is left to the next save.
            with contextlib.suppress(OSError, CheckpointError):
                for old in self._find_superfluous(self._max_to_keep):
                    self._remove(old)
            self._clear_removed()

    def _find_superfluous(self, max_to_keep: int) -> set[int]:
        """Returns the steps to remove: all but the latest, or but the best and the latest one.

        Where the best are kept, steps without the metric are, too.
        """
        steps = self._list_steps()
        if self._quality is None:
            return {*steps[:-max_to_keep]}
        measured = [step for _, step in sorted(self._measure(steps))]
        return {*measured[:-max_to_keep]} - {*steps[-1:]}

    @property
    def _is_first_process(self) -> bool:
        return self.job is None or self.job.process_id == 0

    def _record(self, event: str, step: int) -> None:
        """Tells the launcher that a step is complete, or restored: that there was progress."""
        if self._is_first_process and not self._is_alone_in_a_job:
            record(event, step=step)

    def _set_complete(self) -> None:
        self._under_way = None
        saves_under_way.discard(self)

    def delete(self, step: int) -> None:
        """Removes a step; in a job, process 0 does, and all hear whether it could."""

        def remove() -> None:
            self._require_origin()
            self._clear_removed()  # of a killed process
            with self._guard("removing", step, OSError):
                self._remove(step)
            self._clear_removed()

        hear_first(self.job, "the removal of a checkpoint", remove)

    def _remove(self, step: int) -> None:
        """Takes a step away by a rename; `_clear_removed` removes its files."""
        removed = os.path.join(self.directory, _REMOVED)
        os.makedirs(removed, exist_ok=True)
        os.rename(self._path(step), os.path.join(removed, str(step)))

    def _clear_removed(self) -> None:
        shutil.rmtree(os.path.join(self.directory, _REMOVED), ignore_errors=True)

    @contextlib.contextmanager
    def _guard(
        self, doing: str, step: int, failures: type[Exception] = Exception
    ) -> Generator[None]:
        """Turns failures while a step is written, read or removed into a CheckpointError."""
        try:
            with phase(f"{doing} {self.describe_step(step)}"):
                yield
        except ClusterError:  # a process is lost, or does something else
            raise
        except failures as error:
            if doing == "writing":
                if self._under_way is not None and (barrier := self._under_way[2]) is not None:
                    barrier.fail(error)
                self._set_complete()
            needs, why, fix = _NEEDS[doing]
            needs = f"{self.describe_step(step)} needs to be {needs}"
            text = message(needs, got=describe_error(error), why=why, fix=fix)
            raise CheckpointError(text) from error

    # -- reading --------------------------------------------------------------

    def steps(self) -> list[int]:
        """Returns the complete steps, in order."""
        return self._ask("a look at the steps", self._list_steps)

    def _list_steps(self) -> list[int]:
        if not os.path.isdir(self.directory):
            return []
        with os.scandir(self.directory) as entries:
            return sorted(int(x.name) for x in entries if x.name.isdecimal() and x.is_dir())

    def best_step(self) -> int | None:
        """Returns the best step by the metric, or None if no step has it."""
        if self._quality is None:
            return None

        def look() -> int | None:
            found = self._measure(self._list_steps())
            return max(found)[1] if found else None

        return self._ask("a look at the best step", look)

    def _measure(self, steps: Iterable[int]) -> list[tuple[float, int]]:
        """Returns (how good it is, step) of those that have the metric."""
        assert self._quality is not None
        found: list[tuple[float, int]] = []
        for step in steps:
            # One without a description was removed meanwhile, or is of another program.
            with self._guard("reading", step), contextlib.suppress(FileNotFoundError):
                metrics = self._read_description(step).get("metrics", {})
                if self._best_metric in metrics:
                    found.append((self._quality(metrics), step))
        return found

    def description(self, step: int) -> dict[str, Any]:
        """Returns the step's description, if distjax wrote it and it is not damaged."""

        def look() -> Any:
            with self._guard("reading", step):
                found = self._read_description(step)
                if not {"format", "keys", "values"} <= set(found):
                    raise ValueError("a description that lacks its format, keys or values")
                return found

        return self._ask("a look at the description of a step", look)

    def _read_description(self, step: int) -> dict[str, Any]:
        with open(os.path.join(self._path(step), _DESCRIPTION, _JSON_FILE), "rb") as file:
            return json.load(file)

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, str(step))

    def _ask(self, occasion: str, look: Callable[[], T]) -> T:
        """Returns process 0's ``look()`` on every process; raises if it cannot look there."""

        def answer() -> T:
            self._require_origin()
            try:
                return look()
            except OSError as error:
                raise CheckpointError(
                    f"{occasion} needs a directory that can be read, {self.directory!r}",
                    got=describe_error(error),
                    why="the steps are folders in it; in a job, process 0 looks for all",
                    fix="open it to this user: `chmod`, or another mount",
                ) from error

        return hear_first(self.job, occasion, answer)

    def arrays(self, step: int, places: Mapping[str, Place]) -> dict[str, Any]:
        """Returns the arrays of some keys, where they are to be.

        Each process of a job reads its own parts, without the others: orbax's restore ends in a
        program over all of them, for which they would wait where one cannot read. All hear if one
        cannot.
        """
        if not places:
            return {}
        if self._is_alone_in_a_job:
            places = dict.fromkeys(places, Place())
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(places, 0),
            restore_args={key: _restore_args(place) for key, place in places.items()},
            partial_restore=True,
        )
        found: dict[str, Any] = {}

        def read() -> None:
            alone = _processes(is_alone=True)
            handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
            with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
                values = reader.restore(os.path.join(self._path(step), _VALUES), args=args)
                found.update(jax.block_until_ready(values))

        self._require_origin()
        with self._guard("reading", step):
            do = functools.partial(self._call, read, is_long=True)
            hear_all(self.job, "the reading of a checkpoint", do)
        self._record("restored", step)
        return found

    @property
    def _is_alone_in_a_job(self) -> bool:
        return self.job is None and job() is not None

    # -- who may use it ---------------------------------------------------------

    def _require_origin(self) -> None:
        """Raises unless it is used in the job that it was made in."""
        now = job()
        require(
            self._is_local or now is self.job or now is None,
            "Checkpointer needs to be constructed after the process has joined its job",
            got="one made before dj.initialize, in what is now "
            + ("a job" if now is None else now.name_process(now.process_id)),
            why="each process would save by itself, all into one directory",
            fix="dj.initialize() at the start of the program; for what one process alone "
            "keeps: dj.checkpoint.Checkpointer(directory, local=True)",
            error=CheckpointError,
        )

    # -- orbax ----------------------------------------------------------------

    def _make_writer(
        self, barrier: _WriteBarrier | None, cuts: Mapping[str, tuple[int, ...]]
    ) -> ocp.AsyncCheckpointer:
        processes = _processes(is_alone=self.job is None)
        seconds = _DAY if self.job is None else math.ceil(self.job.timeouts.phase_timeout)
        options = ocp.AsyncOptions(
            # Processes wait for a directory by the number of the save, which differs between them
            # once one has saved alone: they would not wait.
            create_directories_asynchronously=job() is None,
            barrier_sync_fn=barrier,
            timeout_secs=seconds,
        )
        handler = ocp.CompositeCheckpointHandler(  # orbax's default ones belong to process 0
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=processes, async_options=options
            ),
            description=ocp.JsonCheckpointHandler(_JSON_FILE, multiprocessing_options=processes),
            values=ocp.PyTreeCheckpointHandler(
                handler_impl=_CuttingHandler(cuts, processes) if cuts else None,
                multiprocessing_options=processes,
            ),
        )
        return ocp.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=processes
        )


class _CuttingHandler(ocp.BasePyTreeCheckpointHandler):
    """Writes arrays; where all are on the disk, cuts padded ones to the shapes of their values.

    JAX has no uneven arrays, files do: so each device writes what it holds, and nobody reads it
    to leave out the zeros at its end.
    """

    def __init__(
        self, cuts: Mapping[str, tuple[int, ...]], processes: ocp.options.MultiprocessingOptions
    ):
        super().__init__(multiprocessing_options=processes)
        self._cuts = cuts

    def finalize(self, directory: epath.Path) -> None:
        """Completes the files, on the first process; the step still has its other name."""
        super().finalize(directory)
        folder = {"driver": "file", "path": f"{directory}/"}
        for key, shape in self._cuts.items():
            files = {"driver": "ocdbt", "base": folder, "path": f"{key}/"}
            spec = {"driver": "zarr", "kvstore": files}
            tensorstore.open(spec, open=True).result().resize(exclusive_max=shape).result()
        shardings = Path(directory, "_sharding")
        if self._cuts and shardings.exists():
            _make_whole(shardings, self._cuts)


def _make_whole(path: Path, keys: Iterable[str]) -> None:
    """Says of arrays in orbax's file of shardings that each device has all of them.

    A restore by orbax alone, which is told no sharding, looks there, and fails where the number of
    devices does not divide an axis.
    """
    shardings = json.loads(path.read_text())
    for key in keys:
        name = base64.urlsafe_b64encode(key.encode()).decode()
        shardings[name] = json.dumps({**json.loads(shardings[name]), "partition_spec": []})
    path.write_text(json.dumps(shardings))


def _processes(*, is_alone: bool) -> ocp.options.MultiprocessingOptions:
    """Returns who takes part: the whole job, or this process alone."""
    if job() is None or not is_alone:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


def _quality(metric: str, mode: str, metrics: Mapping[str, float]) -> float:
    """Returns how good a step is, from its metrics: greater is better; NaN is the worst."""
    value = float(metrics.get(metric, math.nan))
    if math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a saved array is to be.

    Attributes:
      sharding: how it is laid out on devices; None: in host memory.
      shape: the shape that it is padded to there; None: as it was saved.
    """

    sharding: Sharding | None = None
    shape: tuple[int, ...] | None = None


def _restore_args(place: Place) -> ocp.RestoreArgs:
    if place.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=place.sharding, global_shape=place.shape, strict=place.shape is None
    )


def _call_apart(fn: Callable[[], T]) -> T:
    """Returns ``fn()``, called in a thread of its own, with the settings of this one.

    Ctrl-C ends the wait for it, but not the call.
    """
    settings, ended = settings_of_this_thread(), list[tuple[Any, BaseException | None]]()

    def call() -> None:
        try:
            with settings():
                ended.append((fn(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=call, name="distjax-checkpoint", daemon=True)
    thread.start()
    thread.join()
    value, error = ended.pop()
    if error is not None:
        raise error
    return value


# -- what a directory may hold, and who sees it -------------------------------------


def _require_checkpoint_directory(directory: object) -> None:
    """Raises unless `directory` is a path to checkpoints, or to nothing yet."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            message(
                "Checkpointer needs the path of a directory",
                got=describe_value(directory),
                why="a folder is made in it for each step",
                fix="dj.checkpoint.Checkpointer('runs/first')",
            )
        )
    text = os.fspath(directory)
    path = Path(text)
    fix = "dj.checkpoint.Checkpointer('runs/first')"
    if "://" in text:
        got, fix = "a URL", "mount the bucket, and pass the path where it is mounted"
    elif path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
        if not names or any(name.isdigit() or name.endswith(_UNFINISHED) for name in names):
            return
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        got = f"a directory of something else ({some})"
        fix = f"dj.checkpoint.Checkpointer({str(path / 'checkpoints')!r})"
    elif path.exists():
        got = "a file"
    else:
        return
    raise CheckpointError(
        f"Checkpointer needs a directory for checkpoints, or a new or empty one: {text!r}",
        got=got,
        why="a folder is made in it for each step, and old ones are removed",
        fix=fix,
    )


def _require_shared(joined: Job, occasion: str, directory: str) -> None:
    """Creates the directory, and raises on every process unless all see the same one.

    Where process 0 cannot write, nothing will be saved, and what the others see is not compared.
    """
    said = who_sees(joined, occasion, directory)
    if said is None or all(said):
        return
    paths = hear_all(joined, occasion, lambda: directory)
    differ = [i for i, sees in enumerate(said) if not sees]
    own, other = paths[0], paths[differ[0]]
    found = f"looked in {other!r}" if other != own else "found something else"
    raise CheckpointError(
        "Checkpointer needs a directory that all processes of the job share",
        got=f"{own!r} on process 0, where {', '.join(map(joined.name_process, differ))} {found}",
        why="each process writes its part of a step, and process 0 completes it",
        fix="a path on a shared file system, the same on every process; for what one process "
        "alone keeps: dj.checkpoint.Checkpointer(directory, local=True)",
    )


# -- how the processes of a job write ------------------------------------------------

_barrier_numbers = itertools.count()


class _WriteBarrier:
    """Where the processes wait for each other while they write a step; called by orbax.

    Orbax's own barriers do not know of failures: the others would wait for a process that cannot
    write until they time out. Here it says so, where they wait for it. The processes make as many
    writers, in the same order; one writer's barriers come one at a time, in the same order
    everywhere.
    """

    def __init__(self, joined: Job):
        self._job, self._place = joined, f"distjax/writing/{next(_barrier_numbers)}"
        self._count = 0

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here; raises what one of them has failed with.

        It waits for `timeout_ms`, and longer for one that is at slow work. Orbax's name for the
        barrier is not used.
        """
        del key
        self._count += 1
        place = f"{self._place}/{self._count}"
        said = come_and_hear(self._job, place, "null", timeout_ms / 1000)
        if self._job.process_id == 0:  # all are here, so all have left the last one
            self._job.client.key_value_delete(f"{self._place}/{self._count - 1}")
        require_no_failure(self._job, list(map(json.loads, said)))

    def fail(self, error: Exception) -> None:
        """Tells the others, at the next barrier, that this process has failed."""
        client, own = self._job.client, self._job.process_id
        place, text = f"{self._place}/{self._count + 1}", json.dumps(failure_of(error))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{place}/came/{own}", text, allow_overwrite=True)
            if own == 0:  # which forwards what all have said
                all_said = [text, *["null"] * (self._job.num_processes - 1)]
                client.key_value_set(f"{place}/said", json.dumps(all_said))
