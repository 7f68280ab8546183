"""A parameter server: its contract, and the one that holds values in this process.

A server applies each push exactly once, whoever comes again with it. Engines whose servers are
elsewhere keep a `Server` there, and call it by the names of the contract.
"""

# One lock. It is held while a push is dispatched, not while it runs: JAX arrays are futures, so
# the order in which pushes are dispatched is the order of the versions.
#
# Nobody else ever holds an array of a server: what is read is copied. So a push always runs in the
# memory of the values that it replaces, which are donated.

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from distjax._src import jax_compat
from distjax._src.placement import Topology, copied, transfer, transfer_each
from distjax._src.servers.plan import (
    Executable,
    OnceEach,
    Push,
    as_view,
    place,
    raises_for_values,
    struct_of,
)
from distjax._src.typing import ArrayLike
from distjax.errors import ServerLostError, message


class ServerSnapshot(NamedTuple):
    """The state of one server at some time.

    Attributes:
      version: its version.
      values: copies of the values, by key.
    """

    version: int
    values: Mapping[str, jax.Array]


class Report(NamedTuple):
    """What a server says of itself.

    Attributes:
      version: how many writes it has applied.
      nbytes: the bytes of all values.
      num_kept: how many closures it keeps records of.
      staleness: how many writing pushes had each staleness.
      bytes_pulled: bytes of the values that workers have read, and of the answers to pushes.
      bytes_pushed: bytes that workers have sent.
    """

    version: int = 0
    nbytes: int = 0
    num_kept: int = 0
    staleness: Mapping[int, int] = {}
    bytes_pulled: int = 0
    bytes_pushed: int = 0


class ParameterServer(Protocol):
    """One parameter server, as the coordinator sees it; `Server` is an implementation.

    Operations raise a ServerLostError if it is lost; the others go on.

    Attributes:
      number: its number in the strategy.
      pid: the pid of its process.
      is_lost: whether it has lost its values and has not been restored since.
    """

    number: int
    pid: int
    is_lost: bool

    def report(self) -> Report:
        """Returns what it says of itself, or last said before it was lost."""
        ...

    @property
    def version(self) -> int:
        """How many writes it has applied."""
        return self.report().version

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Drops values of dead variables, at the next request.

        Takes no lock: a finalizer calls it, interrupting whatever its thread is doing.
        """
        ...

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        """Returns the version, and copies of the values at that version."""
        ...

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        """Replaces values together, outside closures; returns the resulting version."""
        ...

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        """Adds to values together, outside closures; returns the resulting version."""
        ...

    def mark_done(self, closure: int) -> None:
        """Drops a closure that is over, now or later, and rejects its further pushes."""
        ...

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all values."""
        ...

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot; variables created since keep their values, if any.

        Args:
          snapshot: of this server.
          num_closures: all closures with lower numbers are over, whether or not the
            snapshot contains them: their further pushes are rejected.
        """
        ...


def lost_error(number: int, got: str = "a server that is lost") -> ServerLostError:
    """Returns the error for a server that has lost its values."""
    return ServerLostError(
        message(
            f"server {number} needs to have what a closure pulls and pushes",
            got=got,
            why="its values, and all that was applied since the last snapshot, went with it",
            fix="num_closures = coordinator.restore(), and go on from there; "
            "coordinator.snapshot() takes snapshots",
        )
    )


# -- exactly once -------------------------------------------------------------


class Answer(NamedTuple):
    """What a push gives: the version after it, its answers, a token if they may not be ready."""

    version: int
    arrays: tuple[jax.Array, ...]
    token: jax.Array | None = None


#: The numbers of a closure and of its stage.
PushKey = tuple[int, int]


class RefusedPush(Exception):
    """The push of an abandoned attempt: its closure is done."""


class Applied:
    """Which closures are done, and the answers of those that are not.

    An open closure keeps the answers of its pushes; a done one is only a number, and below the
    watermark not even that. So the records are bounded by the number of closures open at a time.

    Not thread-safe: every call holds its server's lock.

    Attributes:
      watermark: all closures with lower numbers are done.
    """

    def __init__(self) -> None:
        self.watermark = 0
        self._done: set[int] = set()  # from the watermark on
        self._open: dict[int, dict[int, Answer]] = {}  # by closure and stage

    @property
    def num_kept(self) -> int:
        """How many closures it keeps records of."""
        return len(self._open) + len(self._done)

    def find(self, closure: int, stage: int) -> Answer | None:
        """Returns the push's earlier answer, or None; a RefusedPush if the closure is done."""
        if closure < self.watermark or closure in self._done:
            raise RefusedPush(f"closure {closure} is done")
        return self._open.setdefault(closure, {}).get(stage)

    def add(self, closure: int, stage: int, answer: Answer) -> None:
        """Records that a push unknown to `find` was applied."""
        self._open[closure][stage] = answer

    def num_pushes_since(self, closure: int, version: int) -> int:
        """Returns how many versions after `version` an open closure has itself created."""
        return sum(own.version > version for own in self._open[closure].values())

    def mark_done(self, closure: int) -> None:
        """Drops the answers of a closure that is over; later pushes are rejected."""
        self._open.pop(closure, None)
        if closure >= self.watermark:
            self._done.add(closure)
        while self.watermark in self._done:
            self._done.remove(self.watermark)
            self.watermark += 1

    def restart(self, watermark: int) -> None:
        """Drops all answers; closures with numbers below `watermark` are done, too."""
        done, self._done = self._done, set()  # some may have been cancelled since the restore began
        self.watermark = max(self.watermark, watermark)
        self._open.clear()
        for closure in done:
            self.mark_done(closure)


# -- values in this process ---------------------------------------------------


class ServerDied(Exception):
    """Raised by an engine's fault function: the server loses all its values."""


class Server(ParameterServer):
    """One parameter server: values by key, and a version incremented by each write.

    Args:
      number: its number in the strategy.
      device: where the values live, and pushes run.
    """

    def __init__(self, number: int, device: jax.Device):
        self.number = number
        self.device, self._here = device, SingleDeviceSharding(device)
        self.pid = os.getpid()
        self._version = 0
        self.is_lost = False
        self.staleness: collections.Counter[int] = collections.Counter()
        self._bytes_pulled = self._bytes_pushed = 0
        self._lock = threading.Lock()
        self._values: dict[str, jax.Array] = {}
        self._applied = Applied()
        self._programs = OnceEach[Executable]()
        self._copy = jax.jit(_copies)  # one call for all values of a pull
        # JAX compiles twice what two threads ask for at once, and one would not find it later.
        self._compiling = threading.Lock()
        self._removed: collections.deque[str] = collections.deque()  # keys still to be dropped

    @property
    def version(self) -> int:
        return self._version

    def report(self) -> Report:
        with self._lock:
            self._forget_removed()
            return Report(
                self._version,
                sum(value.nbytes for value in self._values.values()),
                self._applied.num_kept,
                self.staleness.copy(),
                self._bytes_pulled,
                self._bytes_pushed,
            )

    # -- values ---------------------------------------------------------------

    def create(self, key: str, value: ArrayLike) -> None:
        value = self._own(value)
        with self._lock:
            self._forget_removed()
            self._values[key] = value

    def remove(self, keys: Iterable[str]) -> None:
        self._removed.extend(keys)

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        with self._lock:
            return self._version, _copies(*self._require(keys))

    def pull(self, keys: Sequence[str], home: Topology | None) -> tuple[int, Sequence[Any]]:
        """Returns the version, and the values at that version, for a worker.

        Args:
          keys: the variables' keys.
          home: the worker's devices; None: it is in another process, and what is returned is sent
            there before the next operation.
        """
        with self._lock:  # so that a copy begins before a push reuses the memory
            values = self._require(keys)
            self._bytes_pulled += sum(value.nbytes for value in values)
            if home is None:
                jax.block_until_ready(values)
                return self._version, [as_view(value) for value in values]
            if values and self.device in home.devices:
                # Not by a program where JAX looks for NaNs: an old value may have some.
                each = raises_for_values()
                values = list(map(copied, values)) if each else self._copy(*values)
            if home.devices != (self.device,):
                values = transfer_each(values, home.mirrored)
            return self._version, values

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        own = {key: self._own(value) for key, value in values.items()}
        with self._lock:
            self._require(own)
            self._values.update(own)
            self._version += 1
            return self._version

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        own = {key: self._own(amount) for key, amount in amounts.items()}
        with self._lock:
            sums = [old + x for old, x in zip(self._require(own), own.values(), strict=True)]
            self._values.update(zip(own, sums, strict=True))
            self._version += 1
            return self._version

    # -- closures -------------------------------------------------------------

    def compile(self, push: Push) -> Executable:
        """Returns the program of a push; one that compiles in a push would hold up all others."""
        replaced = tuple(i for i, key in enumerate(push.takes) if key in push.writes)
        donated = () if raises_for_values() else replaced  # raised afterwards: they must be there
        ins = [self._here] * len(push.program.avals)
        outs = [self._here] * (len(push.writes) + len(push.answers) + 1)
        make = lambda: Executable(push.program, ins, outs, donated)
        return self._programs.get(push.program, donated, make)

    def compile_pull(self, keys: Sequence[str], home: Topology) -> None:
        """Compiles what `pull` runs."""
        if not keys or self.device not in home.devices:
            return
        with self._lock:
            avals = map(jax_compat.aval_of, self._require(keys))
            held = [struct_of(aval, self._here) for aval in avals]
        with self._compiling:
            self._copy.trace(*held).lower().compile()

    def push(
        self,
        key: PushKey,
        push: Push,
        arrays: Sequence[jax.Array],
        *,
        pulled: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> Answer:
        """Applies a push: all of its writes, or none if it raises.

        A repeated push of the same closure and stage gets the first one's answer.

        Args:
          key: closure and stage.
          push: what it reads and writes here, and its program.
          arrays: the worker's operands.
          pulled: the version that the worker pulled from this server, or None.
          before: called just before the push is applied; may raise ServerDied.

        Raises:
          RefusedPush: the closure is done.
          ServerLostError: the server is lost.
        """
        closure, stage = key
        arrays = [place(x, self._here) for x in arrays]
        with self._lock:
            values = self._require(push.takes)
            earlier = self._applied.find(closure, stage)
            if earlier is not None:
                return earlier
            if before is not None:
                self._call(before)
            results, token = self.compile(push).run([*values, *arrays])
            num_writes = len(push.writes)
            new_values, answers = results[:num_writes], results[num_writes:]
            self._bytes_pushed += sum(x.nbytes for x in arrays)
            self._bytes_pulled += sum(x.nbytes for x in answers)
            if not num_writes:
                return Answer(self._version, answers, token)
            self._values.update(zip(push.writes, new_values, strict=True))
            if pulled is not None:
                own = self._applied.num_pushes_since(closure, pulled)
                self.staleness[self._version - pulled - own] += 1
            self._version += 1
            answer = Answer(self._version, answers, token)
            self._applied.add(closure, stage, answer)
            return answer

    def mark_done(self, closure: int) -> None:
        with self._lock:
            self._applied.mark_done(closure)

    # -- snapshots and loss ---------------------------------------------------

    def snapshot(self) -> ServerSnapshot:
        with self._lock:
            copies = _copies(*self._require(self._values))
            return ServerSnapshot(self._version, dict(zip(self._values, copies, strict=True)))

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        values = dict(zip(snapshot.values, _copies(*snapshot.values.values()), strict=True))
        with self._lock:
            self._forget_removed()
            self._values.update(values)
            self._version = snapshot.version
            self._applied.restart(num_closures)
            self.is_lost = False

    # -- inside, under the lock -----------------------------------------------

    def _call(self, before: Callable[[], None]) -> None:
        try:
            before()
        except ServerDied as death:
            self.is_lost = True
            self._values.clear()
            raise lost_error(self.number) from death

    def _forget_removed(self) -> None:
        while self._removed:
            self._values.pop(self._removed.popleft(), None)

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
        """Returns a copy with no other owner: pushes reuse its memory."""
        return transfer(jnp.array(value, copy=True), self._here)


def _copies(*values: jax.Array) -> list[jax.Array]:
    return [jnp.array(value, copy=True) for value in values]
