"""Variables at servers: where each lives, in which parts, and how it is read and written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from distjax._src import hooks, jax_compat
from distjax._src.interrupts import interrupts
from distjax._src.placement.transfer import transfer
from distjax._src.program.discovery import OutputSpec, spec_of
from distjax._src.program.launch import Build, Finish
from distjax._src.servers.server import ParameterServer
from distjax._src.typing import DTypeLike, PyTree, VariableModes
from distjax._src.variables.conversion import Array
from distjax._src.variables.layouts import WHOLE, Declared, LaidOut
from distjax._src.variables.partitioners import Partitioner, count_shards
from distjax._src.variables.policy import (
    PLAIN,
    Combine,
    Policy,
    policy_for,
    require_synchronization,
)
from distjax._src.variables.storage import StoredArray, VariableLock
from distjax._src.variables.variable import Variable
from distjax.errors import require


def num_bytes(value: PyTree) -> int:
    """Returns the bytes of what has a shape and a dtype; each PRNG key counts as 8."""
    itemsize = 8 if jax_compat.is_key_dtype(value.dtype) else np.dtype(value.dtype).itemsize
    return math.prod(value.shape) * itemsize


# -- where a variable lives ---------------------------------------------------


OWNER = "ParameterServerStrategy"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some rows of a variable: the number of their server, and how many they are."""

    server: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class ServerLayout:
    """One value at a server, or in shards at several.

    Attributes:
      server: its number; None: a copy at every server, each counting its own pushes, as
        optimizers do for their steps.
      device: where values fetched from it are placed.
      shards: the rows of a partitioned variable, in order; the first are at `server`.
    """

    server: int | None
    device: jax.Device
    shards: tuple[Shard, ...] = ()
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    @property
    def kind(self) -> str:
        """Names the server, so that a variable and its slots have equal localities."""
        if self.shards:
            return f"in shards at servers {', '.join(str(s.server) for s in self.shards)}"
        return "at every server" if self.server is None else f"at server {self.server}"

    def __str__(self) -> str:
        return self.kind

    @property
    def sharding(self) -> Sharding:
        """The device of fetched values."""
        return SingleDeviceSharding(self.device)

    def to_stored(self, value: jax.Array) -> Any:
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`: only a server's programs give such a variable a value."""
        return jnp.asarray(stored)

    def unencoded(self, shape: tuple[int, ...]) -> ServerLayout:
        return self

    def beside(self, shape: tuple[int, ...]) -> ServerLayout:
        """Returns a colocated variable's layout: in the same shards if it has as many rows."""
        num_rows = sum(shard.num_rows for shard in self.shards)
        return self if shape[:1] == (num_rows,) else dataclasses.replace(self, shards=())


@dataclasses.dataclass(frozen=True)
class AtEveryServer:
    """The colocation target of variables without an owner: they live at every server."""

    layout: ServerLayout
    shape: tuple[int, ...] = ()
    dtype: Any = jnp.float32


class ServerPlacement:
    """Puts each variable on the server with the fewest bytes, and shards on servers in turn.

    It does not synchronize: a server has one value, however many replicas a worker has.
    """

    synchronizes = False

    def __init__(self, num_servers: int, device: jax.Device, partitioner: Partitioner | None):
        self._num_servers = num_servers
        self.at_every_server = AtEveryServer(ServerLayout(None, device))
        self._device, self._partitioner = device, partitioner
        self._lock = threading.Lock()
        self._variables = weakref.WeakSet[ServerStorage]()

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: object = None,
    ) -> ServerLayout:
        """Returns the layout of a new variable."""
        own = getattr(colocate_with, "layout", None)
        if isinstance(own, ServerLayout):
            return own.beside(tuple(shape))
        return self._place(self._rows(tuple(shape), dtype))

    @property
    def loads(self) -> list[int]:
        """The bytes of the variables at each server."""
        loads = [0] * self._num_servers
        with self._lock:
            for variable in self._variables:
                for server, part in variable.homes:
                    loads[server] += num_bytes(part)
        return loads

    def add(self, variable: ServerStorage) -> None:
        """Counts a new variable, as long as it is alive."""
        with self._lock:
            self._variables.add(variable)

    def _rows(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[int]:
        """Returns how many rows each shard has, more in the first ones; [1] if it is whole."""
        if self._partitioner is None or not shape or jax_compat.is_key_dtype(dtype):
            return [1]
        counts = count_shards(OWNER, self._partitioner, shape, dtype)
        require(
            all(count == 1 for count in counts[1:]),
            f"{OWNER}: partitioner needs to split the first axis only",
            got=f"{list(counts)} shards for shape {shape}",
            why="a server has some rows of a variable, from one to another",
            fix="partitioner=dj.parts.FixedShards(2), or a function that returns [2, 1, ...]",
        )
        n = min(counts[0], shape[0])
        return [shape[0] // n + (i < shape[0] % n) for i in range(n)] if n > 1 else [1]

    def _place(self, rows: Sequence[int]) -> ServerLayout:
        """Returns the layout of shards at the servers in turn, the least loaded first."""
        turns = sorted(range(self._num_servers), key=self.loads.__getitem__)
        shards = tuple(Shard(turns[i % len(turns)], n) for i, n in enumerate(rows))
        return ServerLayout(turns[0], self._device, shards if len(shards) > 1 else ())

    def reduction_layout(self, variable: LaidOut) -> Any:
        """Returns the variable's own layout."""
        return variable.layout


# -- its array ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable's part at one server: all of it, or a shard of its rows.

    Attributes:
      variable: the name of the variable.
      name: the same, or `name/part_i` for a shard.
      key: its key at the servers.
      server: the number of its server; None: it is at every server.
      shape: the shape of the part.
      dtype: the dtype of the variable.
      start: the number of a shard's first row.
    """

    variable: str
    name: str
    key: str
    server: int | None
    shape: tuple[int, ...]
    dtype: Any
    start: int = 0

    @property
    def is_shard(self) -> bool:
        """Whether it is only part of the variable."""
        return self.name != self.variable

    @property
    def lives(self) -> str:
        """Where it is, in words."""
        return "at every server" if self.server is None else f"at server {self.server}"


def make_parts(variable: Variable, number: int) -> tuple[Part, ...]:
    """Returns the parts of a new variable; `number` makes their keys unique."""
    layout, name, shape = variable.layout, variable.name, variable.shape
    assert isinstance(layout, ServerLayout), "as its placement says"
    if not layout.shards:
        return (Part(name, name, f"{name}#{number}", layout.server, shape, variable.dtype),)
    parts, start = [], 0
    for i, shard in enumerate(layout.shards):
        own, rows = f"{name}/part_{i}", (shard.num_rows, *shape[1:])
        parts.append(Part(name, own, f"{own}#{number}", shard.server, rows, variable.dtype, start))
        start += shard.num_rows
    return tuple(parts)


class ServerStorage(StoredArray):
    """The array of a variable at servers, each part under a key.

    Plans hold it, so that the values exist as long as a plan may run.
    """

    def __init__(
        self,
        variable: Declared,
        lock: VariableLock,
        parts: tuple[Part, ...],
        servers: Sequence[ParameterServer],
        placement: ServerPlacement,
        device: jax.Device,
    ):
        super().__init__(variable, lock)
        self.parts = parts
        everywhere = range(len(servers))
        #: Its parts, each with the number of its server.
        self.homes = [
            (n, part)
            for part in parts
            for n in (everywhere if part.server is None else (part.server,))
        ]
        placement.add(self)
        if launch_at_servers not in hooks.launchers:  # only a program that has servers asks
            hooks.launchers.append(launch_at_servers)
        weakref.finalize(self, _remove, servers, self.homes).atexit = False
        self._servers, self._device = servers, device
        self._read_at = _by_server((part.server or 0, part) for part in parts)
        self._written_at = _by_server(self.homes)
        self._is_made = False

    def read(self) -> jax.Array | None:
        """Returns the servers' current value; None before they have one."""
        if not self._is_made:
            return None
        here, values = SingleDeviceSharding(self._device), dict[str, jax.Array]()
        with jax_compat.outside_traces():
            for number, parts in self._read_at.items():  # of one version of each server
                keys = [part.key for part in parts]
                values.update(zip(keys, self._servers[number].read(keys)[1], strict=True))
            each = [transfer(values[part.key], here) for part in self.parts]
            return each[0] if len(each) == 1 else jnp.concatenate(each)

    def take_copy(self) -> Any:
        """Returns the value, which is fetched, so nobody else has it."""
        return self.require()

    def add(self, amount: Array, *, negated: bool = False) -> None:
        """Adds to the value, at each server in one operation."""
        self.require_made()
        amount = jnp.asarray(self.on_own_devices(amount))
        amount = -amount if negated else amount
        with jax_compat.outside_traces():
            for number, parts in self._written_at.items():
                self._servers[number].add({part.key: _slice(amount, part) for part in parts})

    def require_made(self) -> None:
        """Raises a ContextError if there is no value, without fetching it."""
        if not self._is_made:
            self.require()

    def traced_type(self) -> jax_compat.ShapedArray:
        """Returns the type that the value has in a trace, without fetching it."""
        return self.traced_type_of(None)

    def put(self, array: jax.Array | None) -> None:
        """Sends a value to the servers."""
        if isinstance(array, jax.Array):
            with jax_compat.outside_traces():
                self._send(array)
        self._is_made = isinstance(array, jax.Array)

    def _send(self, array: jax.Array) -> None:
        for number, parts in self._written_at.items():
            server, values = self._servers[number], {p.key: _slice(array, p) for p in parts}
            if self._is_made:
                server.write(values)
                continue
            for key, value in values.items():
                server.create(key, value)


def _slice(array: jax.Array, part: Part) -> jax.Array:
    """Returns a part of the array of a variable."""
    whole = part.shape == array.shape
    return array if whole else array[part.start : part.start + part.shape[0]]


def _by_server(homes: Iterable[tuple[int, Part]]) -> Mapping[int, Sequence[Part]]:
    """Returns the parts at each server: what one operation there reads or writes."""
    found: dict[int, list[Part]] = {}
    for number, part in homes:
        found.setdefault(number, []).append(part)
    return found


def _remove(servers: Sequence[ParameterServer], homes: Iterable[tuple[int, Part]]) -> None:
    """Drops a variable from servers; lock-free, since a finalizer may interrupt any code."""
    for number, part in homes:
        servers[number].remove([part.key])


def parts_of(variable: Variable) -> tuple[Part, ...]:
    """Returns a variable's parts at the servers."""
    assert isinstance(variable.stored, ServerStorage), f"{variable.name!r} is at no server"
    return variable.stored.parts


def sizes_of(variable: Variable) -> tuple[int, ...]:
    """Returns the number of rows of each shard of a variable; () if it is whole."""
    parts = parts_of(variable)
    return tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()


#: One value on a server, which other workers write concurrently: a write is a `merge_call`.
AT_SERVER = dataclasses.replace(PLAIN, merges=True)


def policy_at_servers(
    modes: VariableModes, dtype: DTypeLike, name: str, num_replicas: int
) -> Policy:
    """Returns the policy of a server's variable, for workers of `num_replicas` each.

    The server has a single total for a sync-on-read variable, so what the replicas write is
    summed.
    """
    require_synchronization(modes[0], name)
    if num_replicas == 1:
        return AT_SERVER
    policy = policy_for(modes, dtype, name)
    rule = Combine.SUM if policy.stacked else policy.replica_write
    return dataclasses.replace(AT_SERVER, replica_write=rule)


# -- programs that read or write variables at servers ----------------------------


def launch_at_servers(build: Build) -> Callable[..., Any] | None:
    """Launches a program with variables at servers; if it writes some, while no one else does.

    Their values are fetched, and the new ones sent after the program has run: if it fails,
    nothing has been sent.
    """
    if not any(isinstance(v.stored, ServerStorage) for v in build.variables):
        return None

    def launch(
        args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
    ) -> tuple[Any, OutputSpec]:
        with contextlib.ExitStack() as stack:
            for extended in dict.fromkeys(v.strategy.extended for v in build.writes):
                stack.enter_context(extended.pause_writers())
            stack.enter_context(build.lock)
            stored = [v.stored for v in build.writes]
            before = [s.take_copy() for s in stored]
            read = [v.stored.require() for v in build.reads]
            returned = build.jitted(before, read, kwargs, *args)
            jax.block_until_ready(returned[0])
            spec = spec_of(returned)
            with interrupts.held():
                for each, array in zip(stored, returned[0], strict=True):
                    each.swap(array)
                result = returned[2] if finish is None else finish(spec.results(returned[2]))
        return result, spec

    return launch
