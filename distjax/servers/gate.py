"""Gate: bounds the pushes by others between a pull and its push."""

# Staleness is a deadline. With a bound of s, a closure that pulled at time p must push by
# time p + s, and each push by anyone advances time by one. If the due pushes are sorted by
# deadline, d[0] <= d[1] <= ..., and d[i] >= now + i for all i, all can be in time: earliest
# first. A pull or a push that would break that waits. The closure with the earliest deadline
# never has to, so some closure can always proceed; and a closure whose worker is lost is
# removed. A closure of several stages has a deadline for each, one later than the previous:
# its own pushes do not make it stale.

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterable

from distjax.servers.plan import Stage, writes


class Deadlines:
    """The deadlines of closures that have pulled: the rule, without any waiting.

    Args:
      max_staleness: s, the number of pushes by others that may come between.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.now = 0  # the number of pushes so far
        self._due: dict[int, list[int]] = {}  # by closure: the deadlines of its remaining pushes

    def may_pull(self, num_pushes: int) -> bool:
        """Returns whether a closure of `num_pushes` may pull now."""
        due = itertools.chain(*self._due.values(), self._deadlines_of(num_pushes))
        return self._can_keep(due, self.now)

    def pull(self, closure: int, num_pushes: int) -> None:
        """Records that a closure has pulled."""
        self._due[closure] = self._deadlines_of(num_pushes)

    def may_push(self, closure: int) -> bool:
        """Returns whether all others can still be in time if a closure pushes now."""
        left = {**self._due, closure: self._due[closure][1:]}
        return self._can_keep(itertools.chain(*left.values()), self.now + 1)

    def push(self, closure: int) -> None:
        """Records that a closure has pushed."""
        self.now += 1
        del self._due[closure][0]
        if not self._due[closure]:
            del self._due[closure]

    def forget(self, closure: int) -> None:
        """Drops the deadlines of a closure that will not push any more."""
        self._due.pop(closure, None)

    def _deadlines_of(self, num_pushes: int) -> list[int]:
        return [self.now + self.max_staleness + i for i in range(num_pushes)]

    @staticmethod
    def _can_keep(deadlines: Iterable[int], now: int) -> bool:
        return all(due >= now + i for i, due in enumerate(sorted(deadlines)))


class Gate:
    """Makes closures wait, so that no push exceeds the staleness bound.

    Pushes pass it one after the other across all servers: the order of the gate is the order
    of every server's versions. So the bound holds at each server, whatever their number.

    Args:
      max_staleness: the bound.
    """

    def __init__(self, max_staleness: int):
        self._deadlines = Deadlines(max_staleness)
        self._is_in_turn = False
        self._changed = threading.Condition()

    def pull(self, closure: int, num_pushes: int) -> None:
        """Waits until a closure may pull, and records the pull."""
        with self._changed:
            self._changed.wait_for(lambda: self._deadlines.may_pull(num_pushes))
            self._deadlines.pull(closure, num_pushes)

    @contextlib.contextmanager
    def push(self, closure: int) -> Generator[None]:
        """Waits until a closure may push; inside, no other closure does."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_in_turn and self._deadlines.may_push(closure)
            )
            self._is_in_turn = True
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.push(closure)
                self._is_in_turn = False
                self._changed.notify_all()

    def forget(self, closure: int) -> None:
        """Drops a closure that will not push, or not again."""
        with self._changed:
            self._deadlines.forget(closure)
            self._changed.notify_all()


@contextlib.contextmanager
def admitted(gate: Gate | None, closure: int, num_pushes: int) -> Generator[None]:
    """Waits until a closure may pull; after the block, no closure waits for it."""
    if gate is None or not num_pushes:
        yield
        return
    gate.pull(closure, num_pushes)
    try:
        yield
    finally:
        gate.forget(closure)


def turn(gate: Gate | None, closure: int, stage: Stage) -> contextlib.AbstractContextManager[None]:
    """Returns a context that is entered when the pushes of a stage respect the bound."""
    if gate is None or not writes(stage):
        return contextlib.nullcontext()
    return gate.push(closure)
