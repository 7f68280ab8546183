"""PerReplica: a value that differs per replica, as one stacked array."""

from __future__ import annotations

import copy
import html
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from distjax._src import jax_compat
from distjax._src.placement.rows import MIXED, axis_of_layout, is_in_front, note_rows, replica_axis
from distjax._src.placement.topology import Topology
from distjax._src.placement.transfer import is_elsewhere, local_rows, transfer
from distjax._src.tables import Table, as_html
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax.errors import LocalityError, describe_value, message

#: The static part of a PerReplica, kept in its treedef: the topology and the shape [R, ...]. Both
#: take part in equality, since JAX looks up compiled programs by treedef.
AuxData = tuple[Topology, tuple[int, ...]]

_ARRAYS = (jax.Array, np.ndarray)


#: How many numbers of a matrix are shown.
_MOST_SHOWN = 64
_LENGTH = "len(x)"
_UNPACKING = "a loop or unpacking"
#: What needs one value, and the methods by which Python asks a PerReplica for it.
_REFUSED = {
    "an operator": (
        *"add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split(),
        *"radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul".split(),
        *"rand ror rxor rlshift rrshift neg pos abs invert lt le gt ge eq ne".split(),
    ),
    "float(x)": ("float",),
    "int(x)": ("int",),
    "complex(x)": ("complex",),
    "round(x)": ("round",),
    _LENGTH: ("len",),
    "a length or an index": ("index",),
    "a condition": ("bool",),
    _UNPACKING: ("iter",),
    "`in`": ("contains",),
    "x[...]": ("getitem", "setitem"),
}
_WHY_REFUSED = (
    "it holds a value for each replica, and nothing says which is meant or how to combine them"
)
_REDUCE = "strategy.reduce('mean', x) for a loss ('sum' for counts)"


#: What in JAX 0.10 to 0.12 asks whether an argument of `jnp` is an array; no library is answered.
_ASKS_FOR_ARRAY = "_arraylike"
_FOR_JAX = (
    "strategy.run(fn, args=(x,)), where fn sees the value of its replica; x.map(jnp.exp) for the "
    "value of each; strategy.reduce('mean', x) for one value; x.stacked for all, [R, ...]"
)


class PerReplica:
    """One value per replica, held as one global array of shape [R, ...].

    A PerReplica has no arithmetic and no implicit conversions: reduce it, or pass it to
    `run`. distjax's own functions treat it as a leaf; `map` applies a function to each
    replica's value.

    As a pytree node it has one leaf, the stacked array, which is what `jax.tree.map` sees.
    Its treedef remembers ``stacked.shape``. Unflattening with an array of exactly this shape,
    of any dtype, or one that surely has the replica axis in front (``a[:, k]``), gives a
    PerReplica. Any other array (a row, a mean) or a float takes the PerReplica's place in the
    tree as it is; `run` and its like refuse it if it holds the values of all replicas still.
    Anything that is not a value (a sharding, a spec, an axis, None) stays wrapped.

    A copy (`copy.copy`, `copy.deepcopy`) has the same replicas. It cannot be pickled, since they
    belong to this process.

    Attributes:
      stacked: array of shape [R, ...]; slice r belongs to replica r.
      aux: (topology, shape of `stacked`): its aux data as a pytree.

    Locality: T (per replica), sharded over the replica axis.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> x = strategy.distribute_values_from_function(
      ...     lambda ctx: np.float32(ctx.replica_id_in_sync_group))
      >>> strategy.local_results(x.map(lambda v: v + 1))
      (Array(1., dtype=float32), Array(2., dtype=float32))
      >>> type(jax.tree.map(lambda stacked: 2 * stacked, x)).__name__  # sees [R, ...]
      'PerReplica'
      >>> jax.tree.map(lambda stacked: stacked[0], x), jax.tree.map(jnp.mean, x)
      (Array(0., dtype=float32), Array(0.5, dtype=float32))

    Source: tf.distribute.StrategyExtended, "Wrapped values" (TF 1.13); PerReplica.
    """

    __slots__ = ("aux", "stacked")

    def __init__(self, stacked: PyTree, topology: Topology):
        self.stacked = stacked
        self.aux: AuxData = topology, tuple(stacked.shape)
        if topology.mesh is None or isinstance(stacked, jax_compat.Tracer):
            note_rows(stacked, topology)

    @property
    def topology(self) -> Topology:
        """Where the replicas live."""
        return self.aux[0]

    @property
    def num_replicas(self) -> int:
        """R, the number of values."""
        return self.topology.num_replicas

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each replica's value, without the replica axis."""
        return self.aux[1][1:]

    @property
    def dtype(self) -> Any:
        """The dtype of each replica's value."""
        return self.stacked.dtype

    def map(self, fn: Callable[[Any], Any]) -> PerReplica:
        """Returns the PerReplica of ``fn(value)`` over each replica's value."""
        out = jax.vmap(fn)(self.stacked)
        return jax.tree.map(lambda leaf: PerReplica(leaf, self.topology), out)

    def __repr__(self) -> str:
        if not isinstance(self.stacked, _ARRAYS) or isinstance(self.stacked, jax_compat.Tracer):
            return f"PerReplica(R={self.num_replicas}, {self.stacked})"
        rows = "".join(f"  {r} on {place}: {value}\n" for r, place, value in self._rows())
        return f"PerReplica({{\n{rows}}})"

    def _rows(self) -> tuple[tuple[str, str, str], ...]:
        """Returns each replica's number, device and value (of a large one the type), as text."""
        if len(self.shape) > 1 and math.prod(self.shape) > _MOST_SHOWN:
            kind = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
            return tuple((str(r), self._place(r), kind) for r in range(self.num_replicas))
        values = enumerate(self._host_values())
        with np.printoptions(threshold=20, edgeitems=3, precision=4):
            return tuple((str(r), self._place(r), str(v)) for r, v in values)

    def _host_values(self) -> list[Any]:
        as_host = (lambda x: x) if jax_compat.is_key_dtype(self.dtype) else np.asarray
        if _is_wholly_here(self.stacked):
            return list(as_host(self.stacked))
        here = local_rows(self.stacked, self.topology)
        return [
            as_host(here[r]) if r in here else f"<in {self._processes(r)}>"
            for r in range(self.num_replicas)
        ]

    def _processes(self, replica: int) -> str:
        processes = sorted({d.process_index for d in self.topology.replica_devices(replica)})
        return " and ".join(f"process {p}" for p in processes)

    def __copy__(self) -> PerReplica:
        return with_aux(self.stacked, self.aux)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerReplica:
        return with_aux(copy.deepcopy(self.stacked, memo), self.aux)

    def __reduce__(self) -> NoReturn:
        raise LocalityError(_pickle_text(self))

    def _place(self, replica: int) -> str:
        return ", ".join(str(d) for d in self.topology.replica_devices(replica))

    def _repr_html_(self) -> str:
        if not isinstance(self.stacked, _ARRAYS) or isinstance(self.stacked, jax_compat.Tracer):
            return f"<code>{html.escape(repr(self))}</code>"
        caption = f"PerReplica {self.dtype}{list(self.shape)}"
        return as_html([Table(caption, ("replica", "device", "value"), self._rows())])

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(_no_conversion_text(self))

    def __array_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        # These two would swallow the error of a failed conversion and return False.
        if function in (np.array_equal, np.array_equiv):
            raise TypeError(_no_conversion_text(self))
        return inspect.unwrap(function)(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return _refuse(self, "a number format") if spec else str(self)

    if not TYPE_CHECKING:  # a type checker reports unknown attributes by itself

        def __getattr__(self, name: str) -> NoReturn:
            if name == "__jax_array__" and sys._getframe(1).f_code.co_name == _ASKS_FOR_ARRAY:
                raise TypeError(_no_conversion_text(self, "a function of JAX", _FOR_JAX))
            # Libraries ask for underscored names, and `copy` for slots that are not set yet.
            is_of_arrays = name[:1] != "_" and name not in PerReplica.__slots__
            if not is_of_arrays or not hasattr(type(self.stacked), name):
                raise AttributeError(f"'PerReplica' object has no attribute {name!r}", name=name)
            raise AttributeError(
                message(
                    f"'PerReplica' object has no attribute {name!r}: it is one value per replica",
                    got=f"a PerReplica of {self.num_replicas} values of shape {self.shape}",
                    why=_WHY_REFUSED,
                    fix=f"{_REDUCE}; x.stacked, the array [R, ...] of all of them, has {name!r}"
                    if _is_wholly_here(self.stacked)
                    else f"{_REDUCE}; {_how_to_read(self)}, have {name!r}",
                ),
                name=name,
            )

    __hash__ = object.__hash__


def _refuse(value: PerReplica, what: str) -> NoReturn:
    if not isinstance(value.stacked, _ARRAYS):
        raise TypeError(_no_array_text(what, value))
    if what == _LENGTH and value.shape:
        raise TypeError(_length_text(value))
    batches = "; [(x, y)] is a dataset of one batch, (x, y) of two" if what == _UNPACKING else ""
    raise TypeError(
        message(
            f"{what} needs one value, not one value per replica",
            got=f"a PerReplica of {value.num_replicas} values of shape {value.shape}",
            why=_WHY_REFUSED,
            fix=f"{_REDUCE}; strategy.local_results(x) for each of them; or use it inside "
            f"strategy.run(fn, args=(x,)){batches}",
        )
    )


def _length_text(value: PerReplica) -> str:
    return message(
        "len(x) needs one value, not one value per replica",
        got=f"a PerReplica of {value.num_replicas} values of shape {value.shape}",
        why="it may mean the rows of a replica, the rows of the global batch, or the replicas",
        fix="x.shape[0], the rows of each replica; x.num_replicas * x.shape[0], those of the "
        "global batch; x.num_replicas, the replicas",
    )


def _refusing(what: str) -> Callable[..., NoReturn]:
    return lambda self, *_: _refuse(self, what)


for _what, _names in _REFUSED.items():
    for _name in _names:
        setattr(PerReplica, f"__{_name}__", _refusing(_what))


def with_aux(stacked: PyTree, aux: AuxData) -> PerReplica:
    """Returns a PerReplica of an array [R, ...] known to have this aux data."""
    value = _new(PerReplica)
    value.stacked, value.aux = stacked, aux
    if aux[0].mesh is None or isinstance(stacked, jax_compat.Tracer):
        note_rows(stacked, aux[0])
    return value


def _unflatten(aux: AuxData, children: tuple[Any, ...]) -> Any:
    # `jax.tree.map` calls this for every leaf, so the common path makes few calls.
    (child,) = children
    try:
        is_other = child.shape != aux[1] and isinstance(child.shape, tuple)
    except AttributeError:
        return child if isinstance(child, (float, complex)) else with_aux(child, aux)
    if not is_other:
        return with_aux(child, aux)
    return with_aux(child, (aux[0], child.shape)) if is_in_front(child, *aux) else child


_new = object.__new__
jax.tree_util.register_pytree_node(PerReplica, lambda x: ((x.stacked,), x.aux), _unflatten)


def is_per_replica(value: object) -> bool:
    """Returns whether `value` is a PerReplica; use it as ``is_leaf=``.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> tree = {"x": strategy.per_replica(np.ones((2, 3)))}
      >>> jax.tree.map(lambda x: x.shape, tree, is_leaf=dj.is_per_replica)
      {'x': (3,)}
    """
    return isinstance(value, PerReplica)


def require_same_topology(value: PerReplica, topology: Topology, where: str) -> None:
    """Raises a LocalityError if `value`, named `where` by the user, belongs to other replicas."""
    if not isinstance(value.stacked, _ARRAYS):
        raise LocalityError(_no_array_text(where, value))
    require_in_front(value, topology, where)
    if value.topology == topology:
        return_to_replicas(value)
        return
    raise LocalityError(
        f"{where} needs a PerReplica over {topology.num_replicas} replicas ({topology})",
        got=f"a PerReplica over {value.num_replicas} replicas ({value.topology})",
        why="each replica takes its own value, so both must have the same replicas",
        fix="make the value with the strategy that uses it, or move it: "
        "strategy.distribute_values_from_function(lambda ctx: value of that replica)",
    )


def require_in_front(value: PerReplica, topology: Topology, where: str) -> None:
    """Raises a LocalityError if tree code has put the replica axis elsewhere, as a transpose."""
    stacked = value.stacked
    if isinstance(stacked, jax_compat.Tracer):
        axis = replica_axis(stacked, topology)
    elif not isinstance(stacked, jax.Array) or stacked.sharding == topology.per_replica:
        return
    else:
        axis = axis_of_layout(stacked, topology)
    if axis not in (None, 0, MIXED):
        raise LocalityError(_turned_text(where, value))


def return_to_replicas(value: PerReplica) -> None:
    """Moves the array back, in place, if `jax.device_put` took it off the replicas' devices."""
    if is_elsewhere(value.stacked, set(value.topology.devices)):
        with jax_compat.outside_traces():
            value.stacked = transfer(value.stacked, value.topology.per_replica)


def _no_conversion_text(value: PerReplica, what: str = "numpy", fix: str = "") -> str:
    if not isinstance(value.stacked, _ARRAYS):
        return _no_array_text(what, value)
    return message(
        f"{what} needs one value, not one value per replica",
        got=f"a PerReplica of {value.num_replicas} values of shape {value.shape}",
        why="the values may be rows of one batch, or may have to be combined",
        fix=fix
        or f"{_how_to_read(value)}; strategy.gather(x, axis=0) for the rows of a batch; "
        "strategy.reduce('mean', x)",
    )


def _pickle_text(value: PerReplica) -> str:
    return message(
        "a PerReplica needs to stay in its process",
        got=f"pickle of {value.num_replicas} values of shape {value.shape}",
        why="its replicas are on the devices of a strategy, which belong to this process",
        fix="pickle strategy.local_results(x), the values of this process, and stack them there: "
        "strategy.per_replica(np.stack(values)); or dj.checkpoint.Checkpointer(directory)",
    )


def _is_wholly_here(array: PyTree) -> bool:
    """Returns whether this process has all of an array; tracers do not tell."""
    is_traced = isinstance(array, jax_compat.Tracer)
    return is_traced or getattr(array, "is_fully_addressable", True)


def _how_to_read(value: PerReplica) -> str:
    """Returns the code by which the host gets at the values, of this process if not of all."""
    if _is_wholly_here(value.stacked):
        return "x.stacked, which has the replica axis in front"
    return "strategy.local_results(x), the values of this process"


def _turned_text(where: str, value: PerReplica) -> str:
    return message(
        f"{where} needs the replica axis in front of a PerReplica",
        got=f"a PerReplica of {value.num_replicas} values of shape {value.shape}, whose axes were "
        "put in another order",
        why="jax.tree.map sees the array [R, ...], and row r of it is the value of replica r",
        fix="x.map(jnp.transpose), which sees the value of each replica",
    )


def _no_array_text(where: str, value: PerReplica) -> str:
    return message(
        f"{where} needs one array [R, ...] of a value per replica",
        got=f"a PerReplica that holds no array: {describe_value(value.stacked)}",
        why="jax.tree.map leaves in its place what a function gives for the array of a PerReplica, "
        "if it is neither an array nor a float",
        fix="take it out: jax.tree.leaves(x)[0]",
    )


def require_local(value: object, method: str) -> None:
    """Raises a LocalityError if a replica function passes a PerReplica to `method`."""
    if not isinstance(value, PerReplica):
        return
    raise LocalityError(
        f"{method} needs this replica's value",
        got=f"a PerReplica of {value.num_replicas} values",
        why="a replica sees its own value of an argument of run, but a PerReplica that the "
        "function closes over keeps all of them",
        fix="pass it: strategy.run(fn, args=(x,))",
    )


def off_their_devices(tree: PyTree) -> Any:
    """Returns uncommitted arguments, which the program may move to its devices."""

    def uncommitted(leaf: PyTree) -> Any:
        if is_struct(leaf):
            return leaf.update(sharding=None)
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
        return jax_compat.as_uncommitted(leaf) if is_array else leaf

    return jax.tree.map(uncommitted, tree, is_leaf=is_per_replica)
