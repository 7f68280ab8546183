"""The merge of a user's function: from `ctx.merge_call` to an equation.

`merge_call` traces the function for its shapes and variables alone, and binds an equation whose
operands and results are the arrays and variables found. The emitter calls the function again, with
all replicas' values and their proved localities.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax import inner_traces, jax_compat, user_mesh
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.errors import MergeError, message
from distjax.jax_compat import ShapedArray
from distjax.placement.per_replica import PerReplica, require_local, require_same_topology
from distjax.placement.topology import Topology
from distjax.replica.analysis import Analysis
from distjax.replica.arguments import PartitionedTree, function_name, is_array
from distjax.replica.closures import ClosureValues
from distjax.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    replica_aval,
    to_variable,
)
from distjax.replica.merge import merge_p
from distjax.typing import PyTree
from distjax.variables.creation_log import CreationLog
from distjax.variables.state import MergeState, ShapeState, TraceState


class UserMerge:
    """A merge function with its arguments and the variables that it uses.

    Operands: the array arguments, then a value for each variable in `read`.
    Results: the array results, then a value for each variable in `written`.

    Attributes:
      jaxpr: array arguments -> array results, as if all were mirrored; None if the function
        cannot be called that way.
    """

    def __init__(self, strategy: StrategyLike, fn: Callable[..., Any], args: PartitionedTree):
        self.strategy, self.fn, self.args = strategy, fn, args
        self.closure = ClosureValues(fn)
        self.read: list[Any] = []
        self.written: list[Any] = []
        self.created: list[Any] = []
        self.result: Any = None
        self.out_avals: list[ShapedArray] = []
        self.jaxpr: jax_compat.Jaxpr | None = None

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

    def find_shapes(self) -> None:
        """Traces the function abstractly, to find its shapes and variables.

        Every array is first passed as mirrored, which makes any operation legal and gives the
        same replica shapes and dtypes. If that raises, every array is passed per replica.
        """
        try:
            self._find_shapes(as_per_replica=False)
        except MergeError:  # no locality would fix this
            raise
        except Exception:
            if not self.args.leaves or self.topology.num_replicas == 1:
                raise
            try:
                self._find_shapes(as_per_replica=True)
                return
            except Exception:  # report the first error
                pass
            raise

    @property
    def topology(self) -> Topology:
        """The replicas that merge."""
        return self.strategy.extended.topology

    def _find_shapes(self, *, as_per_replica: bool) -> None:
        topology = self.topology
        lead = (topology.num_replicas,) if as_per_replica else ()
        avals = []
        for leaf in self.args.leaves:
            aval = jax_compat.aval_of(leaf)
            shape = (*lead, *aval.shape)
            avals.append(ShapedArray(shape, aval.dtype, weak_type=aval.weak_type))

        def traced(*arrays: jax.Array) -> list[Any]:
            creation = CreationLog(makes_at_once=True)
            state = ShapeState(local_view=False, creations=creation)
            values = [PerReplica(a, topology) if as_per_replica else a for a in arrays]
            result = self._call(values, state)
            outs = self._as_global_values(result.take_leaves())
            self.read, self.written = state.read_order, list(state.written)
            self.created = creation.remembered
            self.result = result
            self.out_avals = [replica_aval(o) for o in outs]
            self.out_avals += [ShapedArray(v.local_shape, v.dtype) for v in self.written]
            return [o.array for o in outs]

        # The replica function's mesh (its model axes) does not apply to cross-replica code.
        with user_mesh.outside_manual_axes(), frames.without_observer():
            jaxpr, _ = inner_traces.trace_jaxpr(traced, avals)
        self._require_no_bare_collective(jaxpr)
        self.jaxpr = None if as_per_replica else jaxpr

    def _call(self, values: Sequence[Any], state: TraceState) -> PartitionedTree:
        args, kwargs = self.args.combine(values)
        with frames.with_frame(Frame(self.strategy, state=state)), self.closure.restore():
            return PartitionedTree(self.fn(self.strategy, *args, **kwargs), is_array)

    def _as_global_values(self, results: Sequence[Any]) -> list[GlobalValue]:
        for result in results:
            if isinstance(result, PerReplica):
                where = f"a result of merge function {function_name(self.fn)}"
                require_same_topology(result, self.topology, where)
        return [from_user_value(result) for result in results]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Calls the function in the global view, with proved localities."""
        num_args = len(self.args.leaves)
        creation = CreationLog(made=self.created, makes_at_once=True)
        state = MergeState(local_view=False, creations=creation)
        for variable, value in zip(self.read, values[num_args:], strict=True):
            state.bind(variable, to_variable(variable, value, self.topology))
        values = [as_user_value(v, self.topology) for v in values[:num_args]]
        result = self._call(values, state)
        outs = self._as_global_values(result.leaves)
        if len(outs) != len(self.result.leaves) or set(state.written) != set(self.written):
            raise MergeError(
                message(
                    f"merge function {function_name(self.fn)} needs to do the same on every call",
                    got="other results or other variables than at its first trace",
                    why="a merge function may be traced more than once and must be pure except "
                    "through variables",
                    fix="keep Python state out of it",
                )
            )
        written = [(v, state.read(v)) for v in self.written]
        return outs + [from_variable(v, x) for v, x in written]

    def _require_no_bare_collective(self, jaxpr: jax_compat.Jaxpr) -> None:
        axis_name = frames.replica_axis(self.topology)
        found = next(Analysis(axis_name).collectives(jaxpr), None)
        if found is None:
            return
        raise MergeError(
            message(
                f"merge function {function_name(self.fn)} needs strategy.reduce to combine values "
                "of replicas",
                got=f"a bare {found.primitive.name} over axis {axis_name!r}, at "
                f"{jax_compat.source_line(found)}",
                why="a merge function runs once, in cross-replica context, where there is no "
                "replica axis",
                fix="strategy.reduce('sum', x), or strategy.gather(x, axis=0)",
            )
        )


class WeakMerge:
    """A user's merge as an equation parameter.

    The reference is weak because JAX's cache of abstract evaluations keeps parameters alive,
    and a merge keeps its arguments alive, such as all variables of a model.
    """

    def __init__(self, merge: UserMerge):
        self._reference, self.out_avals = weakref.ref(merge), merge.out_avals
        self.reduces = merge.reduces

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


def bind_merge(
    strategy: StrategyLike,
    state: TraceState,
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    keep: Callable[[UserMerge], None],
) -> Any:
    """Binds a merge equation in the current trace and returns each replica's result.

    The equation references the merge weakly, so ``keep`` must keep it alive.
    """
    merge = UserMerge(strategy, fn, PartitionedTree((args, kwargs), is_array))
    for leaf in merge.args.leaves:
        require_local(leaf, "merge_call")
    merge.find_shapes()
    for variable in merge.written:
        state.require_writable(variable)
    operands = [*merge.args.take_leaves(), *(state.read(v) for v in merge.read)]
    keep(merge)
    outs = merge_p.bind(*operands, merge=WeakMerge(merge))
    num_results = len(merge.result.leaves)
    for variable, value in zip(merge.written, outs[num_results:], strict=True):
        state.write(variable, value)
    return merge.result.combine(outs[:num_results])
