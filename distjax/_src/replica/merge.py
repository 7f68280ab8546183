"""merge_call: one function of the global view in the middle of a replica function.

A merge is an equation of the replica's jaxpr that holds a function of the global view; its operands
and results are in the replica view. `merge_call` traces the user's function, to learn what it
returns and which variables it uses, and binds the equation. The emitter calls the function again,
between two segments: only then is it known which arguments differ.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from distjax._src import jax_compat, traces, user_lines, user_mesh
from distjax._src.context import Frame, ProgramModes, StrategyLike, frames
from distjax._src.jax_compat import JaxprEqn, ShapedArray, Zero
from distjax._src.placement import (
    PerReplica,
    Topology,
    require_held,
    require_local,
    require_same_topology,
)
from distjax._src.replica.analysis import MERGE_NAME, Analysis
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    partition_result,
)
from distjax._src.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    replica_aval,
    replica_mean,
    replica_sum,
    stack_replicas,
    to_variable,
)
from distjax._src.typing import PyTree
from distjax._src.variables.state import CreationLog, MergeState, ShapeState, TraceState
from distjax._src.variables.variable import Variable
from distjax.errors import MergeError


class Merge(Protocol):
    """The content of a merge equation; `out_avals` are those of its results in the replica view."""

    out_avals: Sequence[ShapedArray]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Evaluates the merge in the global view."""
        ...


merge_p = jax_compat.Primitive(MERGE_NAME)
merge_p.multiple_results = True


@merge_p.def_abstract_eval
def _merge_abstract_eval(*_: ShapedArray, merge: Merge) -> list[ShapedArray]:
    return list(merge.out_avals)


def _is_differentiable(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _plain(aval: ShapedArray) -> ShapedArray:
    return ShapedArray(aval.shape, aval.dtype)


# -- forward mode -------------------------------------------------------------


class TangentMerge:
    """The merge that is linear in the tangents of another merge's operands.

    Operands: all operands of `base`, then one tangent for each index in `live`.
    Results: one tangent for each differentiable result of `base`.
    """

    def __init__(self, base: Merge, num_operands: int, live: tuple[int, ...]):
        self.base, self.num_operands, self.live = base, num_operands, live
        self.out_avals: Sequence[ShapedArray] = [
            _plain(a) for a in base.out_avals if _is_differentiable(a)
        ]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Returns the tangents, each with the locality of its result."""
        operands, tangents = values[: self.num_operands], values[self.num_operands :]
        fn = _Flat(self.base, operands, self.live, topology)
        aligned = [
            _align_tangent(t, operands[i].varying, topology)
            for i, t in zip(self.live, tangents, strict=True)
        ]
        _, outs = jax.jvp(fn, fn.primals, aligned)
        return [GlobalValue(o, f) for o, f in zip(outs, fn.out_varying, strict=True)]


def _align_tangent(tangent: GlobalValue, operand_varying: bool, topology: Topology) -> jax.Array:
    # An equal operand stands for R equal copies, of which the function sees only one, so
    # differing tangents enter as their mean: the transpose of the 1/R in CotangentMerge.
    if operand_varying:
        return stack_replicas(tangent, topology)
    return replica_mean(tangent, topology)


class _Flat:
    """A merge as a function of its live operands to its differentiable results."""

    def __init__(
        self, base: Merge, operands: Sequence[GlobalValue], live: Sequence[int], topology: Topology
    ):
        self._base, self._operands, self._live = base, list(operands), live
        self._topology = topology
        self.primals = [jnp.asarray(operands[i].array) for i in live]
        self.out_varying: list[bool] = []

    def __call__(self, *live: jax.Array) -> list[Any]:
        values = list(self._operands)
        for i, array in zip(self._live, live, strict=True):
            values[i] = GlobalValue(array, values[i].varying)
        outs = [
            o
            for o, aval in zip(
                self._base.emit(values, self._topology), self._base.out_avals, strict=True
            )
            if _is_differentiable(aval)
        ]
        self.out_varying = [o.varying for o in outs]
        return [jnp.asarray(o.array) for o in outs]


def _merge_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, merge: Merge
) -> tuple[list[Any], list[Any]]:
    outs = merge_p.bind(*primals, merge=merge)
    live = tuple(
        i
        for i, t in enumerate(tangents)
        if not isinstance(t, Zero) and t.dtype != jax.dtypes.float0
    )
    zeros = [Zero(jax_compat.aval_of(o).to_tangent_aval()) for o in outs]
    if not live:
        return outs, zeros
    tangent_merge = TangentMerge(merge, len(primals), live)
    found = iter(merge_p.bind(*primals, *(tangents[i] for i in live), merge=tangent_merge))
    return outs, [
        next(found) if _is_differentiable(a) else z
        for a, z in zip(merge.out_avals, zeros, strict=True)
    ]


jax_compat.primitive_jvps[merge_p] = _merge_jvp


# -- reverse mode -------------------------------------------------------------


class CotangentMerge:
    """The transpose of a TangentMerge.

    Operands: all operands of the base merge, then one cotangent for each index in `given` of
    the tangent results. Results: one cotangent for each live operand.

    A result that is equal on all replicas receives the sum of the cotangents they send back. An
    equal operand stands for R copies, so each replica's share of its cotangent is 1/R.
    """

    def __init__(self, tangent: TangentMerge, given: tuple[int, ...], avals: Sequence[Any]):
        self.tangent, self.given = tangent, given
        self.out_avals = [_plain(a) for a in avals]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Returns the cotangents, each with the locality of its operand."""
        tangent = self.tangent
        operands, sent = values[: tangent.num_operands], values[tangent.num_operands :]
        fn = _Flat(tangent.base, operands, tangent.live, topology)
        outs, pull_back = jax.vjp(fn, *fn.primals)
        cotangents = [jnp.zeros_like(o) for o in outs]
        for i, value in zip(self.given, sent, strict=True):
            combine = stack_replicas if fn.out_varying[i] else replica_sum
            cotangents[i] = combine(value, topology).astype(outs[i].dtype)
        returned = pull_back(cotangents)
        varying = [operands[i].varying for i in tangent.live]
        return [
            GlobalValue(r if d else r / topology.num_replicas, d)
            for r, d in zip(returned, varying, strict=True)
        ]


def _merge_transpose(cotangents: Sequence[Any], *operands: PyTree, merge: Merge) -> list[Any]:
    if not isinstance(merge, TangentMerge):
        raise MergeError(
            "jax.linear_transpose needs a function without a merge_call",
            got="a merge_call in the function to transpose",
            why="nothing says that a merge function is linear; its derivatives are",
            fix="_, transpose = jax.vjp(fn, x), in place of jax.linear_transpose(fn, x)",
        )
    linear = operands[merge.num_operands :]
    given = tuple(i for i, ct in enumerate(cotangents) if not isinstance(ct, Zero))
    avals = [t.aval if jax_compat.is_undefined_primal(t) else jax_compat.aval_of(t) for t in linear]
    transposed = CotangentMerge(merge, given, avals)
    sent = [jax.numpy.asarray(cotangents[i]) for i in given]
    outs = merge_p.bind(*operands[: merge.num_operands], *sent, merge=transposed)
    return [None] * merge.num_operands + [
        o if jax_compat.is_undefined_primal(t) else None for o, t in zip(outs, linear, strict=True)
    ]


jax_compat.primitive_transposes[merge_p] = _merge_transpose


# -- batching -----------------------------------------------------------------


class BatchedMerge:
    """A merge mapped over an extra axis of its operands, leading in its results."""

    def __init__(self, base: Merge, dims: Sequence[int | None], size: int):
        self.base, self.dims, self.size = base, tuple(dims), size
        self.out_avals = [ShapedArray((size, *a.shape), a.dtype) for a in base.out_avals]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Maps the global-view function over the extra axis, after any replica axis."""
        out_varying: list[bool] = []

        def one(*arrays: jax.Array) -> list[Any]:
            global_values = [GlobalValue(a, v.varying) for a, v in zip(arrays, values, strict=True)]
            outs = self.base.emit(global_values, topology)
            out_varying[:] = [o.varying for o in outs]
            return [jnp.asarray(o.array) for o in outs]

        axes = tuple(
            None if d is None else d + int(v.varying)
            for d, v in zip(self.dims, values, strict=True)
        )
        outs = jax.vmap(one, in_axes=axes, out_axes=0, axis_size=self.size)(
            *(v.array for v in values)
        )
        return [
            GlobalValue(jnp.moveaxis(o, 0, 1) if f else o, f)
            for o, f in zip(outs, out_varying, strict=True)
        ]


def _merge_batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, merge: Merge
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    outs = merge_p.bind(*operands, merge=BatchedMerge(merge, dims, size))
    return outs, [0] * len(outs)


jax_compat.primitive_batchers[merge_p] = _merge_batch

# -- the user's function ------------------------------------------------------


class UserMerge:
    """A merge function with its arguments and the variables that it uses.

    Operands: the array arguments, then a value for each variable in `read`. Results: the array
    results, then a value for each variable in `written`. Variables are in the order in which the
    function meets them. `jaxpr` is that of arguments that are equal on all replicas; None if the
    function takes only arguments that differ.
    """

    read: list[Variable]
    written: list[Variable]
    created: list[Variable]
    result: PartitionedTree
    out_avals: Sequence[ShapedArray]
    jaxpr: jax_compat.Jaxpr | None

    def __init__(self, strategy: StrategyLike, fn: Callable[..., Any], args: PartitionedTree):
        self.strategy, self.fn, self.args = strategy, fn, args
        self._fn_of_now = with_own_cells(fn, {})
        self._modes = ProgramModes.of_this_thread()

    @property
    def topology(self) -> Topology:
        """The replicas that merge."""
        return self.strategy.extended.topology

    @property
    def reduces(self) -> tuple[str, int, int] | None:
        """For distjax's own merges, the op name and operand range that they reduce."""
        owner: Any = getattr(self.fn, "__self__", self.fn)
        number = getattr(owner, "reduced_argument", None)
        if not isinstance(number, int):
            return None
        prefix = f"[0][{number}]"
        where = [i for i, path in enumerate(self.args.paths) if path.startswith(prefix)]
        return (owner.reduce_op.name, where[0], where[-1] + 1) if where else None

    @property
    def asked_at(self) -> str | None:
        """Of such a merge, the user's line that made what says how it reduces; None: not known."""
        return getattr(getattr(self.fn, "__self__", None), "made_at", None)

    def trace_for_shapes(self, *, varying: bool) -> None:
        """Traces the function for its shapes and variables, with arrays per replica or of all."""
        topology, found = self.topology, dict[str, Any]()
        axes = (topology.num_replicas,) if varying else ()
        given = map(jax_compat.aval_of, self.args.leaves)
        avals = [ShapedArray((*axes, *a.shape), a.dtype, weak_type=a.weak_type) for a in given]

        def traced(*arrays: jax.Array) -> list[Any]:
            creation = CreationLog([], makes_at_once=True)
            state = ShapeState(local_view=False, creations=creation)
            values = [PerReplica(a, topology) if varying else a for a in arrays]
            args, kwargs = self.args.combine(values)
            with frames.with_frame(Frame(self.strategy, state=state)):
                result = self._partition(self.fn(self.strategy, *args, **kwargs))
            outs = self._as_global_values(result.take_leaves())
            written = list(state.written)
            found.update(read=state.read_order, written=written, created=creation.remembered)
            out_avals = [ShapedArray(v.local_shape, v.dtype) for v in written]
            found.update(result=result, out_avals=[*map(replica_aval, outs), *out_avals])
            return [*(o.array for o in outs), *map(state.read, written)]

        # The replica function's mesh (its model axes) does not apply to cross-replica code.
        with user_mesh.outside_manual_axes():
            jaxpr, _ = traces.trace_jaxpr(traced, avals, only_shapes=True)
        self._require_no_bare_collective(jaxpr)
        self.__dict__.update(found, jaxpr=None if varying else jaxpr)

    def _partition(self, result: PyTree) -> PartitionedTree:
        return partition_result(result, f"merge function {function_name(self.fn)}")

    def _as_global_values(self, results: Sequence[Any]) -> list[GlobalValue]:
        for result in results:
            if isinstance(result, PerReplica):
                where = f"a result of merge function {function_name(self.fn)}"
                require_same_topology(result, self.topology, where)
        return [from_user_value(result) for result in results]

    def bind(self, state: TraceState) -> Any:
        """Binds a merge equation in the current trace and returns each replica's result.

        The equation references the merge weakly, so the trace has to keep it alive.
        """
        for variable in self.written:
            state.require_writable(variable)
        operands = [*self.args.take_leaves(), *map(state.read, self.read)]
        outs = merge_p.bind(*operands, merge=WeakMerge(self))
        num_results = len(self.result.leaves)
        for variable, value in zip(self.written, outs[num_results:], strict=True):
            state.write(variable, value)
        return self.result.combine(outs[:num_results])

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Emits the function in the global view, with proved localities."""
        num_args = len(self.args.leaves)
        args = [as_user_value(v, self.topology) for v in values[:num_args]]
        creation = CreationLog(made=self.created, makes_at_once=True)
        state = MergeState(local_view=False, creations=creation)
        for variable, value in zip(self.read, values[num_args:], strict=True):
            state.bind(variable, to_variable(variable, value, self.topology))
        args, kwargs = self.args.combine(args)
        with self._modes(), frames.with_frame(Frame(self.strategy, state=state)):
            result = self._partition(self._fn_of_now(self.strategy, *args, **kwargs))
        outs = self._as_global_values(result.leaves)
        is_other = len(outs) != len(self.result.leaves)
        if is_other or set(state.written) != set(self.written):
            raise MergeError(
                f"merge function {function_name(self.fn)} needs to do the same on every call",
                got="other results or other variables than at its first trace",
                why="a merge function is traced more than once, first with arrays in place of "
                "values per replica, and must be pure except through variables",
                fix="a result, or v.assign(x) of a dj.Variable, in place of Python state",
            )
        return outs + [from_variable(v, state.read(v)) for v in self.written]

    def _require_no_bare_collective(self, jaxpr: jax_compat.Jaxpr) -> None:
        axis_name = self.topology.axis_name
        found = next(Analysis(axis_name).collectives(jaxpr), None)
        if found is None:
            return
        raise MergeError(
            f"merge function {function_name(self.fn)} needs strategy.reduce to combine values "
            "of replicas",
            got=f"a bare {found.primitive.name} over axis {axis_name!r}, at "
            f"{user_lines.source_line(found)}",
            why="a merge function runs once, in cross-replica context, where there is no "
            "replica axis",
            fix="strategy.reduce('sum', x), or strategy.gather(x, axis=0)",
        )


class WeakMerge:
    """A user's merge as an equation parameter; its first `num_results` outputs are results.

    The reference is weak because JAX's cache of abstract evaluations keeps parameters alive, and a
    merge keeps its arguments alive, such as all variables of a model.
    """

    def __init__(self, merge: UserMerge):
        self._reference, self.out_avals = weakref.ref(merge), merge.out_avals
        self.reduces, self.num_results = merge.reduces, len(merge.result.leaves)
        self.asked_at = merge.asked_at

    @property
    def user_merge(self) -> UserMerge | None:
        """The merge; None once the trace of the replica function is gone."""
        return self._reference()

    @property
    def jaxpr(self) -> jax_compat.Jaxpr | None:
        """The function's jaxpr, as far as it was traced."""
        merge = self._reference()
        return None if merge is None else merge.jaxpr

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Emits the merge, kept alive by the trace of the replica function."""
        merge = self._reference()
        assert merge is not None
        return merge.emit(values, topology)


def trace_merge(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> UserMerge:
    """Returns a user's merge with these arguments, traced for its shapes.

    Every array is first passed as one value, which makes any operation legal and gives the same
    shapes and dtypes for a replica. If that raises, every array is passed per replica.
    """
    partitioned = PartitionedTree((args, kwargs), is_array)
    for leaf in partitioned.leaves:
        require_local(leaf, "merge_call")
        require_held(leaf, "merge_call")
    merge = UserMerge(strategy, fn, partitioned)
    try:
        merge.trace_for_shapes(varying=False)
    except MergeError:  # no locality would fix this
        raise
    except Exception:
        if not partitioned.leaves or merge.topology.num_replicas == 1:
            raise
        with contextlib.suppress(Exception):  # the first error is reported
            merge.trace_for_shapes(varying=True)
            return merge
        raise
    return merge


# -- reductions inside of it --------------------------------------------------

_REDUCTION = "distjax_reduce_"


def call_as_reduction(
    name: str, reduce: Callable[..., list[Any]], arrays: Sequence[Any], *static: object
) -> list[Any]:
    """Returns ``reduce(arrays, *static)``; one equation where a merge is traced for its shapes.

    So what reads such a trace sees what is reduced, and how: "SUM", "MEAN", "GATHER" or another
    name.
    """
    if not isinstance(frames.current().state, ShapeState):
        return reduce(arrays, *static)

    def call(arrays: Sequence[Any]) -> list[Any]:
        return reduce(arrays, *static)

    call.__name__ = f"{_REDUCTION}{name}"
    return jax.jit(call)(list(arrays))


def reduction_of(eqn: JaxprEqn) -> str | None:
    """Returns the name of the reduction that an equation of `call_as_reduction` is, or None."""
    name = str(eqn.params.get("name"))
    return name.removeprefix(_REDUCTION) if name.startswith(_REDUCTION) else None


# -- what it closes over ------------------------------------------------------


def with_own_cells(fn: PyTree, cells: dict[int, types.CellType]) -> Any:
    """Returns a function as it is now: what it and functions in it close over is not rebound.

    A merge function is called where it is bound, and again where the program is emitted. In between
    the replica function goes on, and may rebind names that the merge function closes over, such as
    the `v` in ``for v in variables``. The second call must see what the first one saw.

    Args:
      fn: a function, or anything else, which is returned as it is.
      cells: by `id`, the copies of cells, which functions share as they shared the cells.
    """
    if isinstance(fn, functools.partial):
        own = with_own_cells(fn.func, cells)
        return fn if own is fn.func else functools.partial(own, *fn.args, **fn.keywords)
    if isinstance(fn, types.MethodType):
        own = with_own_cells(fn.__func__, cells)
        return fn if own is fn.__func__ else types.MethodType(own, fn.__self__)
    if not inspect.isfunction(fn) or not fn.__closure__:
        return fn
    for cell in fn.__closure__:
        if id(cell) not in cells:
            cells[id(cell)] = types.CellType()  # before what it holds: a function may hold itself
            with contextlib.suppress(ValueError):  # a name without a value
                cells[id(cell)].cell_contents = with_own_cells(cell.cell_contents, cells)
    own = types.FunctionType(
        fn.__code__,
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        tuple(cells[id(cell)] for cell in fn.__closure__),
    )
    own.__kwdefaults__ = fn.__kwdefaults__
    return functools.update_wrapper(own, fn)
