"""Applied: the pushes that a server has applied, so that it applies each only once."""

# An open closure keeps the answers of its pushes; a done one is only a number, and below the
# watermark not even that. So the records are bounded by the number of closures open at a time.

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax


class Answer(NamedTuple):
    """The result of a push.

    Attributes:
      version: the server's version after it.
      arrays: the answers of its program.
      token: ready when the push has run.
    """

    version: int
    arrays: tuple[jax.Array, ...]
    token: jax.Array


class RefusedPush(Exception):
    """The push of an abandoned attempt: its closure is done, or has a later attempt."""


@dataclasses.dataclass
class _Open:
    attempt: int = 0  # the latest attempt that pushed
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict[int, Answer])  # by stage


class Applied:
    """Which closures are done, and the answers of those that are not.

    Not thread-safe: every call holds its server's lock.

    Attributes:
      watermark: all closures with lower numbers are done.
    """

    def __init__(self) -> None:
        self.watermark = 0
        self._done: set[int] = set()  # from the watermark on
        self._open: dict[int, _Open] = {}

    @property
    def num_kept(self) -> int:
        """How many closures it keeps records of."""
        return len(self._open) + len(self._done)

    def find(self, closure: int, stage: int, attempt: int) -> Answer | None:
        """Returns the push's earlier answer, or None if it is yet to be applied.

        Raises:
          RefusedPush: it comes from an abandoned attempt.
        """
        if closure < self.watermark or closure in self._done:
            raise RefusedPush(f"closure {closure} is done")
        record = self._open.setdefault(closure, _Open())
        if attempt < record.attempt:
            raise RefusedPush(f"closure {closure} has been tried again since attempt {attempt}")
        record.attempt = attempt
        return record.answers.get(stage)

    def add(self, closure: int, stage: int, answer: Answer) -> None:
        """Records that a push unknown to `find` was applied."""
        self._open[closure].answers[stage] = answer

    def num_pushes_since(self, closure: int, version: int) -> int:
        """Returns how many versions after `version` an open closure has itself created."""
        return sum(own.version > version for own in self._open[closure].answers.values())

    def mark_done(self, closure: int) -> bool:
        """Drops the answers, and returns whether there were any; later pushes are rejected."""
        record = self._open.pop(closure, None)
        if closure >= self.watermark:
            self._done.add(closure)
        while self.watermark in self._done:
            self._done.remove(self.watermark)
            self.watermark += 1
        return record is not None and bool(record.answers)

    def restart(self, watermark: int) -> None:
        """Drops all answers; closures with numbers below `watermark` are done, too."""
        done, self._done = self._done, set()  # some may have been cancelled since the restore began
        self.watermark = max(self.watermark, watermark)
        self._open.clear()
        for closure in done:
            self.mark_done(closure)
