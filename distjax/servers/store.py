"""Server: the values of variables at one server, and pushes applied to them, each once."""

# One lock. It is held while a push is dispatched, not while it runs: JAX's arrays are futures, so
# the order in which pushes are dispatched is the order of the versions.
#
# A push runs in the memory of the values that it replaces (they are donated), unless a worker on
# the server's own device has been given the arrays themselves: then it copies nothing, and the
# values of that variable are never donated from then on.

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from distjax import jax_compat
from distjax.placement.transfer import transfer, transfer_each
from distjax.servers.applied import Answer, Applied
from distjax.servers.placing import place
from distjax.servers.plan import Program
from distjax.servers.programs import Programs
from distjax.servers.server_contract import ServerSnapshot, Totals, lost_error
from distjax.typing import ArrayLike


class ServerDied(Exception):
    """Raised by the fault function of an engine: the server loses all it has."""


class Server:
    """One parameter server: values by key, and a version that each write adds one to.

    Args:
      number: which of the strategy's.
      device: where the values live, and pushes run.
    """

    def __init__(self, number: int, device: jax.Device):
        self.number = number
        self.device = device
        self.version = 0
        self.is_lost = False
        self.totals = Totals()
        self._lock = threading.Lock()
        self._values: dict[str, jax.Array] = {}
        self._applied = Applied()
        self._sizes: dict[str, int] = {}  # bytes, by key
        self._traffic: weakref.WeakKeyDictionary[Program, tuple[int, int]]
        self._traffic = weakref.WeakKeyDictionary()  # bytes in and out
        self._lent: set[str] = set()  # keys whose arrays themselves were given to workers
        self._programs = Programs()
        self._removed: collections.deque[str] = collections.deque()  # keys, not yet forgotten

    @property
    def pid(self) -> int:
        """The process that it is in."""
        return os.getpid()

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        with self._lock:
            self._forget_removed()
            return sum(self._sizes[key] for key in self._values)

    def read_totals(self) -> Totals:
        """Returns a copy of the totals: workers go on adding to them."""
        with self._lock:
            return dataclasses.replace(self.totals, staleness=self.totals.staleness.copy())

    @property
    def num_kept(self) -> int:
        """The number of closures of which something is remembered."""
        with self._lock:
            return self._applied.num_kept

    # -- values ---------------------------------------------------------------

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        value = self._own(value)
        with self._lock:
            self._forget_removed()
            self._values[key], self._sizes[key] = value, value.nbytes

    def remove(self, keys: Iterable[str]) -> None:
        """Forgets values whose variables are gone, when the server is next asked for anything.

        Takes no lock: a finalizer calls it, in the midst of whatever its thread is doing.
        """
        self._removed.extend(keys)

    def read(
        self, keys: Sequence[str], device: jax.Device | None = None
    ) -> tuple[int, list[jax.Array]]:
        """Returns the version, and the values that are there then.

        Args:
          keys: whose.
          device: where a worker needs them; None: copies, where the server is.
        """
        with self._lock:
            values = self._require(keys)
            if device is None:
                return self.version, [jnp.array(value, copy=True) for value in values]
            self.totals.bytes_pulled += sum(self._sizes[key] for key in keys)
            if device == self.device:
                self._lent.update(keys)
            else:  # under the lock, so that it begins before a push reuses the memory
                values = transfer_each(values, SingleDeviceSharding(device))
            return self.version, values

    def view(
        self, keys: Sequence[str], *, is_pull: bool
    ) -> tuple[int, list[jax.Array | np.ndarray]]:
        """Returns the version, and the values, to be sent before anything else is done here.

        Args:
          keys: whose.
          is_pull: whether a worker reads them.
        """
        with self._lock:
            values = self._require(keys)
            if is_pull:
                self.totals.bytes_pulled += sum(self._sizes[key] for key in keys)
            jax.block_until_ready(values)
            return self.version, [self._look_at(value) for value in values]

    def write(self, key: str, value: ArrayLike) -> int:
        """Replaces a value, outside of closures; returns the version that this makes."""
        value = self._own(value)
        with self._lock:
            self._require([key])
            self._values[key] = value
            self.version += 1
            return self.version

    # -- closures -------------------------------------------------------------

    def push(
        self,
        closure: int,
        stage: int,
        attempt: int,
        program: Program,
        takes: Sequence[str],
        writes: Sequence[str],
        arrays: Sequence[jax.Array],
        *,
        pulled: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> Answer:
        """Applies a push: all that it writes, or nothing if it raises.

        A second one of the same closure and stage gets the answer of the first.

        Args:
          closure: its number.
          stage: the number of the stage that pushes.
          attempt: which attempt at the closure.
          program: (*takes, *arrays) -> (*new values of writes, *answers).
          takes: keys that it reads.
          writes: those of them that it writes.
          arrays: what the worker sends.
          pulled: the version that the worker has pulled; None: nothing of this server.
          before: called when the push is about to be applied; may raise ServerDied.

        Raises:
          RefusedPush: the closure is done, or has a later attempt.
          ServerLostError: the server is lost.
        """
        arrays = place(arrays, self.device)
        with self._lock:
            values = self._require(takes)
            earlier = self._applied.find(closure, stage, attempt)
            if earlier is not None:
                return earlier
            if before is not None:
                self._call(before)
            donated = tuple(
                i for i, key in enumerate(takes) if key in writes and key not in self._lent
            )
            results, token = self._programs.run(program, [*values, *arrays], donated)
            self._count(program, arrays, results[len(writes) :])
            new_values, answers = results[: len(writes)], results[len(writes) :]
            if not writes:
                return Answer(self.version, answers, token)
            self._values.update(zip(writes, new_values, strict=True))
            if pulled is not None:
                own = self._applied.num_pushes_since(closure, pulled)
                self.totals.staleness[self.version - pulled - own] += 1
            self.version += 1
            answer = Answer(self.version, answers, token)
            self._applied.add(closure, stage, answer)
            return answer

    def mark_done(self, closure: int) -> None:
        """Forgets a closure that is done, and refuses what is still pushed for it."""
        with self._lock:
            self._applied.mark_done(closure)

    # -- snapshots and loss ---------------------------------------------------

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all there is."""
        with self._lock:
            copies = self._copy(self._require(self._values))
            return ServerSnapshot(self.version, dict(zip(self._values, copies, strict=True)))

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot; variables made since keep their values, if there are any.

        Those that are gone do not come back.

        Args:
          snapshot: of this server.
          num_closures: all closures of lower numbers are over, whether the snapshot has
            them or not: what they still push is refused.
        """
        values = dict(zip(snapshot.values, self._copy(snapshot.values.values()), strict=True))
        with self._lock:
            self._forget_removed()
            known = self._sizes or values  # a lost server still knows what there was
            self._values.update((key, values[key]) for key in list(known) if key in values)
            self._sizes.update((key, value.nbytes) for key, value in self._values.items())
            self.version = snapshot.version
            self._applied = Applied(num_closures)
            self.is_lost = False

    def lose(self) -> None:
        """Forgets all values, as a server does that dies."""
        with self._lock:
            self._lose()

    # -- inside, under the lock -----------------------------------------------

    def _count(
        self, program: Program, arrays: Sequence[jax.Array], answers: Sequence[jax.Array]
    ) -> None:
        if program not in self._traffic:  # shapes are those of the program, so once is enough
            sizes = (sum(x.nbytes for x in arrays), sum(x.nbytes for x in answers))
            self._traffic[program] = sizes
        pushed, pulled = self._traffic[program]
        self.totals.bytes_pushed += pushed
        self.totals.bytes_pulled += pulled

    def _call(self, before: Callable[[], None]) -> None:
        try:
            before()
        except ServerDied as death:
            self._lose()
            raise lost_error(self.number) from death

    def _lose(self) -> None:
        self.is_lost = True
        self._values.clear()

    def _forget_removed(self) -> None:
        while self._removed:
            key = self._removed.popleft()
            self._values.pop(key, None)
            self._sizes.pop(key, None)
            self._lent.discard(key)

    def _require(self, keys: Iterable[str]) -> list[jax.Array]:
        self._forget_removed()
        if self.is_lost:
            raise lost_error(self.number)
        try:
            return [self._values[key] for key in keys]
        except KeyError:
            raise lost_error(
                self.number, "no variable of that key: it was made after the snapshot"
            ) from None

    def _own(self, value: ArrayLike) -> jax.Array:
        """Returns a copy that nobody else holds: pushes reuse its memory."""
        return transfer(jnp.array(value, copy=True), SingleDeviceSharding(self.device))

    def _copy(self, values: Iterable[jax.Array]) -> list[jax.Array]:
        return [jnp.array(value, copy=True) for value in values]

    def _look_at(self, value: jax.Array) -> jax.Array | np.ndarray:
        """Returns the memory of a value itself, where numpy can see it.

        `np.asarray` would be kept by the value, and its memory never be donated again.
        """
        is_plain = not jax_compat.is_key_dtype(value.dtype) and value.dtype.kind in "fiuc"
        if not is_plain or self.device.platform != "cpu":
            return jnp.array(value, copy=True)
        memory: Any = value  # its type is unknown to numpy
        return np.from_dlpack(memory)
