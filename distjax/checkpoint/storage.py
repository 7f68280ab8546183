"""Storage: the steps in a directory, written in the background by orbax.

One `CheckpointManager` writes, from the first save on. It is asked nothing: the steps are the
folders with a number for a name, and a step's description is a JSON file, so a look takes neither a
manager nor the other processes. Orbax is called on a thread that receives no signals, which it
would take for failures of its own.

- A step is complete or absent: it is written under another name and then renamed, and one to be
  removed is renamed first. So a kill leaves only whole steps. The next process that saves removes
  what a killed one left behind: a directory has one writing process (or job).
- A background failure is raised by the next call, and the next save starts with a new manager,
  since orbax's counts a failed step as present.
- Values are as of the call. Orbax copies from an accelerator before its `save` returns. On a CPU it
  reads the buffer itself, and JAX does not donate a buffer while numpy views it: it copies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from distjax.checkpoint.directory import (
    remove_unfinished,
    require_checkpoint_directory,
    require_shared_directory,
    try_to_write,
)
from distjax.checkpoint.leaves import encode_array
from distjax.checkpoint.together import WriteBarrier, hear_all, hear_first
from distjax.cluster.job import job
from distjax.cluster.ledger import ledger, phase
from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import CheckpointError, ClusterError, ContextError, describe_error, message
from distjax.placement.transfer import require_wholly_here
from distjax.uninterrupted import UninterruptedCalls

_VALUES, _DESCRIPTION = "values", "description"  # subdirectories of a step
_JSON_FILE = "metadata"  # in the latter
#: Steps are moved here by a rename before their files are removed, so that a process killed
#: meanwhile leaves no step with half of its files.
_REMOVED = ".removed"
_DAY = 86400  # in seconds
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
    """The checkpoints in one directory.

    Orbax writes a step to a directory of another name and renames it when complete,
    so that a killed process leaves only complete steps.

    Attributes:
      job: the job, whose processes all take part; None: this process alone.

    Args:
      directory: the directory of the steps; created by the first `write`.
      max_to_keep: how many steps to keep; None: all.
      best_metric: the metric that selects them; the latest is kept too.
      best_mode: "max" or "min".
      local: in a job of several processes, whether they belong to this one alone.

    Raises:
      CheckpointError: `directory` is a file, or holds something else.
      TypeError: it is not a path.
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
        check = functools.partial(require_checkpoint_directory, directory)
        hear_first(self.job, "the construction of a Checkpointer", check)
        self.directory = os.path.abspath(os.fspath(directory))
        if self.job is not None:
            require_shared_directory(self.job, self.directory)
        self._max_to_keep = max_to_keep
        self._best_metric = best_metric
        self._quality: Callable[[Mapping[str, float]], float] | None = None
        if best_metric is not None:
            self._quality = functools.partial(_quality, best_metric, best_mode)
        self._writer: ocp.CheckpointManager | None = None
        self._under_way: int | None = None
        # Orbax mistakes a signal's exception for its own error, and syncs devices: see
        # `begin_launch`.
        self._calls = UninterruptedCalls(ledger.wait if self.job is not None else lambda: None)

    def describe_step(self, step: int) -> str:
        """Returns the name of the checkpoint of `step` in error texts."""
        return f"the checkpoint of step {step} in {self.directory!r}"

    # -- writing --------------------------------------------------------------

    def write(
        self,
        step: int,
        arrays: Mapping[str, Any],
        description: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Starts writing a step, after completing the one in progress.

        Raises:
          CheckpointError: this step, or the one before, cannot be written; or this process has
            joined its job later.
          ContextError: in a forked process.
        """
        self._require_origin()
        self.wait()
        if self._is_alone_in_a_job:  # orbax rejects single-process arrays there
            for key, array in arrays.items():
                require_wholly_here(array, repr(key))
            arrays = {key: np.array(array) for key, array in arrays.items()}
            if jax.process_index() != 0:  # orbax writes no single-process arrays here at all
                values = {key: encode_array(array) for key, array in arrays.items()}
                description = {**description, "values": {**description["values"], **values}}
                arrays = {}
        items: dict[str, Any] = {_DESCRIPTION: ocp.args.JsonSave(description)}
        if arrays:
            items[_VALUES] = ocp.args.PyTreeSave(dict(arrays))
        with self._guard_write(step):
            if self.job is not None:  # where one cannot, orbax leaves the others waiting for it
                attempt = functools.partial(self._try_to_begin, self.job.process_id)
                hear_all(self.job, "the start of a save", attempt)
            if self._writer is None:
                self._writer = self._calls.call(self._make_writer)
            elif self.job is None:
                self._reload(self._writer)
            self._under_way = step  # set first, so that an interrupted save is waited for, too
            saves_under_way.add(self)
            save = functools.partial(self._writer.save, args=ocp.args.Composite(**items))
            self._calls.call(functools.partial(save, step, metrics=dict(metrics), force=True))

    def _try_to_begin(self, process_id: int) -> None:
        try_to_write(self.directory, process_id)
        if process_id == 0 and self._writer is None:
            remove_unfinished(self.directory)

    @property
    def options(self) -> dict[str, str]:
        """What all processes of a job have alike, since orbax's writers wait for each other."""
        is_open = "open" if self._writer is not None else "closed"
        return {"the writer, which checkpointer.close() ends on every process or none,": is_open}

    def complete(self, change: Callable[[], T]) -> T:
        """Returns ``change()``; a signal raises before it begins or after it ends."""
        return self._calls.complete(_with_settings(change))

    def wait(self) -> None:
        """Blocks until the save in progress is complete.

        Raises:
          CheckpointError: the save failed.
        """
        if self._under_way is not None and self._writer is not None:
            self._require_own_process()
            with self._guard_write(self._under_way):
                self._calls.call(self._writer.wait_until_finished)
        self._set_complete()
        if self._writer is not None:
            self._clear_removed()

    def _set_complete(self) -> None:
        self._under_way = None
        saves_under_way.discard(self)

    def delete(self, step: int) -> None:
        """Removes a step; in a job, process 0 does, and all hear whether it could.

        Raises:
          CheckpointError: it cannot be removed.
        """

        def remove() -> None:
            self._require_origin()
            self._clear_removed()  # of a killed process
            removed = os.path.join(self.directory, _REMOVED)
            try:
                os.makedirs(removed, exist_ok=True)
                os.rename(self._path(step), os.path.join(removed, str(step)))
            except OSError as error:
                raise CheckpointError(
                    message(
                        f"{self.describe_step(step)} needs to be removed from the disk",
                        got=describe_error(error),
                        why="the directory may be closed to this user, or the disk read-only",
                        fix="open it for writing, and call checkpointer.delete(step) again",
                    )
                ) from error

        hear_first(self.job, "the removal of a checkpoint", remove)
        if self._writer is not None:
            self._reload(self._writer)
        self._clear_removed()

    def _reload(self, writer: ocp.CheckpointManager) -> None:
        """Lets the writer see what another checkpointer has removed, or this one without it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # one does so right now
            self._calls.call(writer.reload)

    def _clear_removed(self) -> None:
        shutil.rmtree(os.path.join(self.directory, _REMOVED), ignore_errors=True)

    def close(self) -> None:
        """Waits, then stops orbax's threads; does nothing in a forked process."""
        if self._calls.process not in (None, os.getpid()):
            return
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            try:
                if writer is not None:
                    self._calls.call(writer.close)
            finally:
                self._calls.close()

    @contextlib.contextmanager
    def _guard_write(self, step: int) -> Generator[None]:
        """Turns failures into a CheckpointError and discards the writer."""
        try:
            with phase(f"writing {self.describe_step(step)}"):
                yield
        except ClusterError:  # a process is lost, or does something else
            raise
        except Exception as error:
            self._set_complete()
            failed, self._writer = self._writer, None  # it would count the step as present
            if failed is not None:
                with contextlib.suppress(Exception):  # it may raise the same error again
                    failed.close()
            raise CheckpointError(
                message(
                    f"{self.describe_step(step)} needs to be written to the disk",
                    got=describe_error(error),
                    why="the disk may be full, the directory closed to this user, or another "
                    "checkpointer writing to it; the step is not complete, those before it are as "
                    "they were",
                    fix="make room, or give another directory, and call checkpointer.save(step, "
                    "tree) again",
                )
            ) from error

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
        quality = self._quality
        if quality is None:
            return None

        def look() -> int | None:
            found: list[tuple[float, int]] = []
            for step in self._list_steps():
                # One without a description was removed meanwhile, or is of another program.
                with self._guard_read(step), contextlib.suppress(FileNotFoundError):
                    metrics = self._read_description(step).get("metrics", {})
                    if self._best_metric in metrics:
                        found.append((quality(metrics), step))
            return max(found)[1] if found else None

        return self._ask("a look at the best step", look)

    def description(self, step: int) -> dict[str, Any]:
        """Returns the step's description.

        Raises:
          CheckpointError: it was not written by distjax, or is damaged.
        """

        def look() -> Any:
            with self._guard_read(step):
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
        """Returns process 0's ``look()`` on every process.

        Raises:
          CheckpointError: the directory is closed to this user, say.
        """

        def answer() -> T:
            self._require_origin()
            try:
                return look()
            except OSError as error:
                raise CheckpointError(
                    message(
                        f"{occasion} needs a directory that can be read, {self.directory!r}",
                        got=describe_error(error),
                        why="the steps are folders in it; in a job, process 0 looks for all",
                        fix="open it to this user: `chmod`, or another mount",
                    )
                ) from error

        return hear_first(self.job, occasion, answer)

    def arrays(self, step: int, shardings: Mapping[str, Sharding | None]) -> dict[str, Any]:
        """Returns the arrays of some keys, on devices or (None) in host memory.

        Each process of a job reads its own parts, without the others: orbax's restore ends in a
        program over all of them, for which they would wait where one cannot read.

        Raises:
          CheckpointError: the files are damaged; on all processes, if one cannot read its parts.
        """
        if not shardings:
            return {}
        if self._is_alone_in_a_job:
            shardings = dict.fromkeys(shardings)
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(shardings, 0),
            restore_args={key: _restore_args(s) for key, s in shardings.items()},
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
        with self._guard_read(step):
            do = functools.partial(self._calls.call, _with_settings(read))
            hear_all(self.job, "the reading of a checkpoint", do)
        return found

    @property
    def _is_alone_in_a_job(self) -> bool:
        return self.job is None and job() is not None

    @contextlib.contextmanager
    def _guard_read(self, step: int) -> Generator[None]:
        try:
            with phase(f"reading {self.describe_step(step)}"):
                yield
        except ClusterError:  # a process is lost, or does something else
            raise
        except Exception as error:
            raise CheckpointError(
                message(
                    f"{self.describe_step(step)} needs to be one that distjax wrote, with all its "
                    "files",
                    got=describe_error(error),
                    why="it was written by another program, or files in it are damaged or gone, as "
                    "those of a step that max_to_keep has removed. Nothing has been changed",
                    fix="restore another step: checkpointer.restore(tree, step=...); "
                    "checkpointer.all_steps() lists them",
                )
            ) from error

    # -- who may use it ---------------------------------------------------------

    def _require_own_process(self) -> None:
        """Raises a ContextError in a process forked from the one that reads and writes files."""
        if self._calls.process in (None, os.getpid()):
            return
        raise ContextError(
            message(
                "a Checkpointer needs to be used in the process that began to use it",
                got=f"process {os.getpid()}, forked from process {self._calls.process}",
                why="the threads that read and write files are not in it, so it would wait forever",
                fix="a new one in the new process: dj.checkpoint.Checkpointer(directory)",
            )
        )

    def _require_origin(self) -> None:
        """Raises unless it is used in the process and in the job that it was made in."""
        self._require_own_process()
        now = job()
        if self._is_local or now is self.job or now is None:
            return
        where = now.name_process(now.process_id)
        raise CheckpointError(
            message(
                "Checkpointer needs to be constructed after the process has joined its job",
                got=f"one made before dj.initialize, in what is now {where}",
                why="each process would save by itself, all into one directory",
                fix="dj.initialize() at the start of the program; for what one process alone "
                "keeps: dj.checkpoint.Checkpointer(directory, local=True)",
            )
        )

    # -- orbax ----------------------------------------------------------------

    def _make_writer(self) -> ocp.CheckpointManager:
        processes = _processes(is_alone=self.job is None)
        os.makedirs(self.directory, exist_ok=True)
        policies = ocp.checkpoint_managers
        kept: Any = policies.LatestN(self._max_to_keep)
        if self._max_to_keep is not None and self._quality is not None:
            best = policies.BestN(get_metric_fn=self._quality, n=self._max_to_keep)
            kept = policies.AnyPreservationPolicy([policies.LatestN(1), best])
        options = ocp.CheckpointManagerOptions(
            create=False,
            multiprocessing_options=processes,
            # Processes wait for a directory by the number of the save, which differs between them
            # once one has saved alone: they would not wait.
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=job() is None,
                barrier_sync_fn=None if self.job is None else WriteBarrier(self.job),
                timeout_secs=_DAY if self.job is None else math.ceil(self.job.timeouts.phase),
            ),
            cleanup_tmp_directories=True,  # what a killed process left
            todelete_subdir=_REMOVED,
            preservation_policy=kept,
            best_fn=self._quality,
            best_mode="max",
        )
        handlers = {  # orbax's default ones belong to process 0
            _DESCRIPTION: ocp.JsonCheckpointHandler(_JSON_FILE, multiprocessing_options=processes),
            _VALUES: ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
        }
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)


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


def _restore_args(sharding: Sharding | None) -> ocp.RestoreArgs:
    """Returns how to read an array: laid out on devices, or (None) to host memory."""
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _with_settings(fn: Callable[[], T]) -> Callable[[], T]:
    """Returns `fn` bound to this thread's settings, to be called on another thread."""
    settings = settings_of_this_thread()

    def call() -> T:
        with settings():
            return fn()

    return call
