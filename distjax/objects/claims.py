"""Claims: one thread at a time uses an object with state.

A thread holds the claims of all objects that it gives to a program, from reading their
state until the new state is written back, so that two threads which step one module take
turns. Objects that are first claimed together (a module with all that it holds) share one
claim: a call takes few, however many variables it has. Claims are taken in the order of
their numbers, all at once, and are all that is held while a user's function runs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence

_numbers = itertools.count()
#: By the id of an object. Written without a lock, which a signal could leave taken: an entry is
#: never exchanged.
_claims: dict[int, Claim] = {}
_Lock = type(threading.RLock())


class Claim:
    """The right to use some objects, which one thread has at a time.

    Attributes:
      number: its place in the order in which claims are taken.
      lock: held by the thread that has it.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.lock = threading.RLock()
        self._watched: dict[int, weakref.ref[object]] = {}
        self._unwatched: set[int] = set()

    def cover(self, value: object) -> None:
        """Makes this the claim of `value`, for as long as it lives, unless it has one by now."""
        key = id(value)
        try:
            self._watched[key] = weakref.ref(value, lambda _: self._forget(key))
        except TypeError:  # a variable of NNX: forgotten with the modules around it
            self._unwatched.add(key)
        _claims.setdefault(key, self)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        for gone in {key} if self._watched else {key, *self._unwatched}:
            if _claims.get(gone) is self:
                _claims.pop(gone, None)


def known_claims(values: Iterable[object]) -> tuple[Claim, ...]:
    """Returns the claims that cover any of `values`, in order."""
    found = {claim for claim in (_claims.get(id(value)) for value in values) if claim is not None}
    return tuple(sorted(found, key=lambda claim: claim.number))


def claims_of(modules: Sequence[object], variables: Sequence[object]) -> tuple[Claim, ...]:
    """Returns the claims of objects, in order; those without one get one together.

    Threads that meet here agree: an object has the claim that covered it first.

    Args:
      modules: objects that hold others; weakly referable.
      variables: what they hold; new ones come under a claim of the modules.
    """
    known = known_claims((*modules, *variables))
    new = [value for value in modules if id(value) not in _claims]
    bare = [value for value in variables if id(value) not in _claims]
    if new or bare:
        claim = Claim() if new or not known else known[0]
        for value in (*new, *bare):
            claim.cover(value)
        known = known_claims((*modules, *variables))
    return known


class HeldClaims:
    """The claims that one call holds.

    A signal may raise between any two lines of Python. So locks are taken and released in
    one call into C each, which records what it has done: `release` can be run again.

    Attributes:
      claims: what `take` was asked for last.
    """

    def __init__(self) -> None:
        self.claims: tuple[Claim, ...] = ()
        self._taken: list[bool] = []
        self._released: list[None] = []

    def take(self, claims: tuple[Claim, ...]) -> None:
        """Waits until this thread has `claims`, in the order given; first releases others."""
        self.release()
        self._taken, self._released = [], []
        self.claims = claims
        self._taken.extend(map(_Lock.acquire, [claim.lock for claim in claims]))

    def release(self) -> None:
        """Lets other threads have the claims."""
        locks = [claim.lock for claim in self.claims[: len(self._taken)]]
        self._released.extend(
            map(_Lock.release, itertools.islice(locks, len(self._released), None))
        )
