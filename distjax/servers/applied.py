"""Applied: which pushes a server has applied, so that each is applied once."""

# A closure that is open has the answers of its pushes; one that is done is a number, and below the
# watermark not even that. So what is kept is bounded by the closures that are open at a time.

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax


class Answer(NamedTuple):
    """What a push came to.

    Attributes:
      version: the server's, after it.
      arrays: the answers of its program.
      token: ready when the push has run.
    """

    version: int
    arrays: tuple[jax.Array, ...]
    token: jax.Array


class RefusedPush(Exception):
    """The push of a worker that was given up: its closure is done, or has a later attempt."""


@dataclasses.dataclass
class _Open:
    attempt: int = 0  # the latest that pushed
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict[int, Answer])  # by stage


class Applied:
    """Which closures are done, and what those that are not were answered.

    Not thread-safe: its server's lock is held around every call.

    Args:
      watermark: all closures of lower numbers are done.
    """

    def __init__(self, watermark: int = 0):
        self.watermark = watermark
        self._done: set[int] = set()  # from the watermark on
        self._open: dict[int, _Open] = {}

    @property
    def num_kept(self) -> int:
        """The number of records that are kept."""
        return len(self._open) + len(self._done)

    def find(self, closure: int, stage: int, attempt: int) -> Answer | None:
        """Returns what the push was answered already; None: it is to be applied.

        Raises:
          RefusedPush: it comes from an attempt that was given up.
        """
        if closure < self.watermark or closure in self._done:
            raise RefusedPush(f"closure {closure} is done")
        record = self._open.setdefault(closure, _Open())
        if attempt < record.attempt:
            raise RefusedPush(f"closure {closure} has been tried again since attempt {attempt}")
        record.attempt = attempt
        return record.answers.get(stage)

    def add(self, closure: int, stage: int, answer: Answer) -> None:
        """Notes that a push, which `find` did not know, was applied."""
        self._open[closure].answers[stage] = answer

    def num_pushes_since(self, closure: int, version: int) -> int:
        """Returns how many versions after `version` an open closure has made itself."""
        return sum(own.version > version for own in self._open[closure].answers.values())

    def mark_done(self, closure: int) -> None:
        """Forgets the answers; what pushes for the closure from here on is refused."""
        self._open.pop(closure, None)
        if closure >= self.watermark:
            self._done.add(closure)
        while self.watermark in self._done:
            self._done.remove(self.watermark)
            self.watermark += 1
