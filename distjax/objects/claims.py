"""Claims: only one thread at a time uses a stateful object.

A thread holds the claims of all objects that it passes to a program, from reading their
state until the new state is written back, so that two threads that step the same module
take turns. Objects first claimed together (a module with everything in it) share one claim,
so a call takes few claims however many variables it has. Claims are acquired in order of
their numbers, all at once, and no other locks are held while a user's function runs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence

_numbers = itertools.count()
#: By object id. Written without a lock, since a signal could leave one locked; an entry is never
#: replaced.
_claims: dict[int, Claim] = {}
_Lock = type(threading.RLock())


class Claim:
    """A thread's exclusive right to use some objects.

    Attributes:
      number: its position in the order in which claims are acquired.
      lock: held by the owning thread.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.lock = threading.RLock()
        self._watched: dict[int, weakref.ref[object]] = {}
        self._unwatched: set[int] = set()

    def cover(self, value: object) -> None:
        """Makes this the claim of `value` for its lifetime, unless it already has one."""
        key = id(value)
        try:
            self._watched[key] = weakref.ref(value, lambda _: self._forget(key))
        except TypeError:  # an NNX variable: forgotten together with the modules around it
            self._unwatched.add(key)
        _claims.setdefault(key, self)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        for gone in {key} if self._watched else {key, *self._unwatched}:
            if _claims.get(gone) is self:
                _claims.pop(gone, None)


def known_claims(values: Iterable[object]) -> tuple[Claim, ...]:
    """Returns the claims that cover any of `values`, in claim order."""
    found = {claim for claim in (_claims.get(id(value)) for value in values) if claim is not None}
    return tuple(sorted(found, key=lambda claim: claim.number))


def claims_of(modules: Sequence[object], variables: Sequence[object]) -> tuple[Claim, ...]:
    """Returns the objects' claims in order; objects without one share a new one.

    If threads race, all agree: an object belongs to the claim that covered it first.

    Args:
      modules: objects that contain others; weakly referenceable.
      variables: their contents; new ones join a claim of the modules.
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
    """The claims held by one call.

    A signal may raise between any two lines of Python. So all locks are acquired, or released,
    in a single C call that records its progress, which makes `release` safe to run again.

    Attributes:
      claims: the argument of the last `take`.
    """

    def __init__(self) -> None:
        self.claims: tuple[Claim, ...] = ()
        self._taken: list[bool] = []
        self._released: list[None] = []

    def take(self, claims: tuple[Claim, ...]) -> None:
        """Releases held claims, then waits until this thread has `claims`, in order."""
        self.release()
        self._taken, self._released = [], []
        self.claims = claims
        self._taken.extend(map(_Lock.acquire, [claim.lock for claim in claims]))

    def release(self) -> None:
        """Releases the claims to other threads."""
        locks = [claim.lock for claim in self.claims[: len(self._taken)]]
        self._released.extend(
            map(_Lock.release, itertools.islice(locks, len(self._released), None))
        )
