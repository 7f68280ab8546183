"""PerReplica: a value that differs per replica, as one stacked array."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from distjax import jax_compat
from distjax.errors import LocalityError, message
from distjax.placement.topology import Topology, unplaced_topology
from distjax.typing import PyTree


def _refuse(self: PerReplica, *_: object) -> NoReturn:
    raise TypeError(
        message(
            "an operator needs one value, not one value per replica",
            got=f"a PerReplica of {self.num_replicas} values of shape {self.shape}",
            why="in cross-replica context nothing says how the values combine",
            fix="reduce it: strategy.reduce('sum', x); or use it inside "
            "strategy.run(fn, args=(x,))",
        )
    )


class PerReplica:
    """One value per replica, held as one global array of shape [R, ...].

    A PerReplica has no arithmetic and no silent conversion: reduce it, or use
    it as an argument of `run`. As a pytree node it is transparent to
    `jax.tree.map`, which sees the stacked array; distjax's own functions treat
    it as a leaf; `map` applies a function to each replica's value.

    What `pickle`, `copy.copy` and `copy.deepcopy` make of it is a numpy array [R, ...]
    on no devices: the first strategy with R replicas that uses it places it.

    Attributes:
      stacked: array of shape [R, ...]; slice r belongs to replica r.
      topology: where the replicas live.

    Locality: T (per replica), sharded over the replica axis.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> x = strategy.distribute_values_from_function(
      ...     lambda ctx: np.float32(ctx.replica_id_in_sync_group))
      >>> strategy.local_results(x.map(lambda v: v + 1))
      (Array(1., dtype=float32), Array(2., dtype=float32))
      >>> jax.tree.map(lambda stacked: stacked.shape, x).stacked  # sees [R, ...]
      (2,)

    Source: tf.distribute.StrategyExtended, "Wrapped values" (TF 1.13); PerReplica.
    """

    __slots__ = ("stacked", "topology")

    def __init__(self, stacked: PyTree, topology: Topology):
        self.stacked = stacked
        self.topology = topology

    @property
    def num_replicas(self) -> int:
        """R, the number of values."""
        return self.topology.num_replicas

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each replica's value, without the replica axis."""
        return tuple(self.stacked.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.stacked.dtype

    def map(self, fn: Callable[[Any], Any]) -> PerReplica:
        """Returns the PerReplica of ``fn(value)`` for each replica's value."""
        out = jax.vmap(fn)(self.stacked)
        return jax.tree.map(lambda leaf: PerReplica(leaf, self.topology), out)

    def __repr__(self) -> str:
        if isinstance(self.stacked, jax_compat.Tracer) or not hasattr(self.stacked, "shape"):
            return f"PerReplica(R={self.num_replicas}, {self.stacked})"
        return "PerReplica({\n" + "".join(f"  {row}\n" for row in self._rows()) + "})"

    def _rows(self) -> list[str]:
        values = self._host_values()
        with np.printoptions(threshold=20, edgeitems=3, precision=4):
            return [f"{r} on {self._place(r)}: {v}" for r, v in enumerate(values)]

    def _host_values(self) -> list[Any]:
        if jax_compat.is_key_dtype(self.dtype):
            return list(self.stacked)
        if getattr(self.stacked, "is_fully_addressable", True):
            return list(np.asarray(self.stacked))
        return ["<in another process>"] * self.num_replicas

    def __reduce__(self) -> Any:
        if jax_compat.is_key_dtype(getattr(self.stacked, "dtype", None)):
            data = np.asarray(jax.random.key_data(self.stacked))
            return _from_host, (data, self.num_replicas, jax_compat.key_impl(self.dtype))
        host = np.asarray(self.stacked) if hasattr(self.stacked, "dtype") else self.stacked
        return _from_host, (host, self.num_replicas, None)

    def _place(self, replica: int) -> str:
        if not self.topology.is_placed:
            return "no device yet"
        return ", ".join(str(d) for d in self.topology.replica_devices(replica))

    def _repr_html_(self) -> str:
        head = f"PerReplica &middot; {html.escape(str(self.dtype))}{list(self.shape)}"
        if isinstance(self.stacked, jax_compat.Tracer):
            return f"<code>{html.escape(repr(self))}</code>"
        with np.printoptions(threshold=20, edgeitems=3, precision=4):
            body = "".join(
                f"<tr><td>{r}</td><td>{html.escape(self._place(r))}</td>"
                f"<td><pre style='margin:0'>{html.escape(str(v))}</pre></td></tr>"
                for r, v in enumerate(self._host_values())
            )
        return (
            f"<table><caption>{head}</caption><thead><tr><th>replica</th><th>device</th>"
            f"<th>value</th></tr></thead><tbody>{body}</tbody></table>"
        )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse(self)

    def __getitem__(self, key: object) -> NoReturn:
        _refuse(self)

    def __format__(self, spec: str) -> str:
        return _refuse(self) if spec else str(self)

    __iter__ = __len__ = __bool__ = __float__ = __int__ = __index__ = __complex__ = _refuse
    __contains__ = __setitem__ = _refuse
    __hash__ = object.__hash__


_OPERATORS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
for _name in _OPERATORS:
    setattr(PerReplica, f"__{_name}__", _refuse)
    setattr(PerReplica, f"__r{_name}__", _refuse)
for _name in "neg pos abs invert round lt le gt ge eq ne".split():
    setattr(PerReplica, f"__{_name}__", _refuse)

jax.tree_util.register_pytree_node(
    PerReplica,
    lambda x: ((x.stacked,), x.topology),
    lambda topology, children: PerReplica(children[0], topology),
)


def _from_host(host: PyTree, num_replicas: int, key_impl: str | None) -> PerReplica:
    """Returns a PerReplica that was pickled, or copied."""
    stacked = host if key_impl is None else jax.random.wrap_key_data(host, impl=key_impl)
    return PerReplica(stacked, unplaced_topology(num_replicas))


def is_per_replica(value: object) -> bool:
    """Returns whether `value` is a PerReplica (for ``is_leaf=``)."""
    return isinstance(value, PerReplica)


def require_same_topology(value: PerReplica, topology: Topology, where: str) -> None:
    """Raises a LocalityError if `value` belongs to other replicas.

    A value on no devices yet, of as many replicas, is placed.

    Args:
      value: the PerReplica that came.
      topology: the replicas that are needed.
      where: the user's name of the argument, e.g. "argument args[0]['x'] of f".
    """
    if value.topology == topology:
        return
    if not value.topology.is_placed and value.num_replicas == topology.num_replicas:
        if not isinstance(value.stacked, jax_compat.Tracer):
            with jax_compat.outside_traces():
                value.stacked = jax.device_put(value.stacked, topology.per_replica)
        value.topology = topology
        return
    raise LocalityError(
        message(
            f"{where} needs a PerReplica over {topology.num_replicas} replicas ({topology})",
            got=f"a PerReplica over {value.num_replicas} replicas ({value.topology})",
            why="each replica takes its own value, so both must have the same replicas",
            fix="make the value with the strategy that uses it, or move it: "
            "strategy.distribute_values_from_function(lambda ctx: value of that replica)",
        )
    )


def require_local(value: object, method: str) -> None:
    """Raises a LocalityError if a replica function passes a PerReplica to `method`."""
    if not isinstance(value, PerReplica):
        return
    raise LocalityError(
        message(
            f"{method} needs this replica's value",
            got=f"a PerReplica of {value.num_replicas} values",
            why="a replica sees its own value of an argument of run, but a PerReplica that the "
            "function closes over keeps all of them",
            fix="pass it: strategy.run(fn, args=(x,))",
        )
    )
