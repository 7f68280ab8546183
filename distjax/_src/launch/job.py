"""`Job`: a training loop that resumes where it was, saves, and stops with all others when told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distjax._src.cluster.ending import listening, watch_the_end
from distjax._src.cluster.job import current_attempt, job, set_step
from distjax._src.cluster.meeting import hear_first
from distjax._src.typing import PyTree
from distjax.errors import PreemptedError, describe_value, message, require, require_int

if TYPE_CHECKING:
    from distjax._src.checkpoint.checkpointer import Checkpointer

#: The most steps between two looks at the clock.
_MAX_PAUSE = 1000


class Job:
    """A training loop that resumes after the latest checkpoint, and saves when told to stop.

    In a job of several processes each of them makes the same calls. SIGTERM, to any of them, makes
    all save at the same step and raise `PreemptedError`, which, uncaught, ends them with exit
    code 75. From the `with` on, SIGTERM ends a process in no other way; a loop of another kind
    polls ``jax.experimental.multihost_utils.reached_preemption_sync_point(step)``.

    A step number is that of `range`: checkpoint `n` is saved after n steps, and step `n` is the
    next. The position in the data is an iterator in `state`.

    Args:
      checkpointer: writes and reads `state`; every process has made it.
      state: what `Checkpointer.save` takes.
      save_every: save after each multiple of so many steps.
      save_seconds: save when so many seconds have passed since the last save.

    Attributes:
      state: the tree, with what was restored. Assign to it where arrays in it are replaced.
      step: the number of steps done; in the body of the loop, the step being done.
      restored_step: the checkpoint that the loop has resumed from, or None.
      attempt: how many times the launcher has started the job before.

    Raises:
      ValueError: `save_every` or `save_seconds` is not positive.

    Example:
      >>> import tempfile
      >>> total = dj.Variable(0)
      >>> def train(num_steps):
      ...     with dj.checkpoint.Checkpointer(directory) as checkpointer:
      ...         with dj.launch.Job(checkpointer, {"total": total}, save_every=2) as job:
      ...             for step in job.steps(num_steps):
      ...                 _ = total.assign_add(step)
      ...         return job.restored_step, int(total.value)
      >>> directory = tempfile.mkdtemp()
      >>> train(3)
      (None, 3)
      >>> _ = total.assign(100)  # lost with the process, say
      >>> train(5)
      (3, 10)
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: PyTree,
        *,
        save_every: int | None = None,
        save_seconds: float | None = None,
    ):
        if save_every is not None:
            why = "the state is saved after each multiple of it"
            require_int("Job: save_every", save_every, 1, why=why, fix="save_every=100")
        is_positive = isinstance(save_seconds, (int, float)) and save_seconds > 0
        require(
            save_seconds is None or is_positive,
            "Job: save_seconds needs to be a positive number",
            got=describe_value(save_seconds),
            why="the state is saved when so many seconds have passed",
            fix="save_seconds=600",
        )
        self._checkpointer, self.state = checkpointer, state
        self._save_every, self._save_seconds = save_every, save_seconds
        self.step, self.restored_step = 0, None
        self.attempt = current_attempt()
        self._is_restored, self._saved = False, 0  # up to which step
        self._saved_at, self._next_look = time.monotonic(), 0
        self._stack = contextlib.ExitStack()
        self._is_told = None

    def __enter__(self) -> Job:
        watch_the_end()  # a PreemptedError ends also a program of one process with 75
        self._is_told = self._stack.enter_context(listening())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_told = None
        with self._stack:
            if kind is None:
                self._checkpointer.wait()

    def steps(self, num_steps: int) -> Iterator[int]:
        """Returns the numbers of the steps not yet done, up to `num_steps` - 1.

        The first call restores the latest checkpoint. After the last step the state is saved.

        Args:
          num_steps: how many there are in all, those done before included.

        Raises:
          PreemptedError: the job was told to stop; the state is saved, for all steps done.
          CheckpointError: the state cannot be restored or saved.
          RuntimeError: outside of the ``with``.
          ValueError: `num_steps` is not a number of steps.
        """
        why = "it counts all steps of the training, those of former runs included"
        require_int("steps: num_steps", num_steps, 0, why=why, fix="job.steps(1000)")
        require(
            self._is_told is not None,
            "Job.steps needs to be called in the `with` of its job",
            got="a call outside of it",
            why="there SIGTERM is a notice, and at its end the last save is complete",
            fix="with dj.launch.Job(checkpointer, state) as job: for step in job.steps(1000): ...",
            error=RuntimeError,
        )
        if not self._is_restored:
            self._restore()
        return self._steps(num_steps)

    def _restore(self) -> None:
        latest = self._checkpointer.latest_step()
        if latest is not None:
            self.state = self._checkpointer.restore(self.state, latest)
            self.restored_step = self.step = self._saved = latest
        self._is_restored, self._saved_at = True, time.monotonic()

    def _steps(self, num_steps: int) -> Iterator[int]:
        while self.step < num_steps:
            set_step(self.step)
            if self._is_told is not None and self._is_told(self.step):
                self._stop()
            yield self.step
            self.step += 1
            if self._is_due():
                self.save()
        self.save()

    def save(self) -> None:
        """Saves the state now, for the steps done, unless it is saved.

        In the body of the loop, `step` is not done yet: save after the loop, or let `steps` do it.
        """
        if self._saved < self.step:
            self._checkpointer.save(self.step, self.state)
            self._saved, self._saved_at = self.step, time.monotonic()

    def _is_due(self) -> bool:
        """Returns whether to save now, which all processes do or none: process 0 has the clock."""
        if self._save_every is not None and self.step % self._save_every == 0:
            return True
        if self._save_seconds is None or self.step < self._next_look:
            return False
        since = time.monotonic() - self._saved_at
        rest = self._save_seconds - since
        half = int((self.step - self._saved) / max(since, 1e-6) * rest / 2)  # steps in half of it
        look = lambda: (rest <= 0, max(1, min(half, _MAX_PAUSE)))
        is_due, pause = hear_first(job(), "a look at the clock", look)
        self._next_look = self.step + pause
        return is_due

    def _stop(self) -> None:
        """Saves, and raises a PreemptedError."""
        self.save()
        self._checkpointer.wait()
        raise PreemptedError(
            message(
                "a job needs to be left alone up to its last step",
                got=f"SIGTERM, to this or another process, before step {self.step}",
                why=f"the system takes its machines; all is saved in {self._checkpointer!r}",
                fix="start it again: it goes on there. A launcher, or a scheduler that restarts "
                "after exit code 75, does so by itself",
            )
        )
