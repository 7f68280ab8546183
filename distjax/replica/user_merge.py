"""The merge of a user's function: from `ctx.merge_call` to an equation.

`merge_call` traces the function, and binds an equation whose operands and results are the arrays
and variables found. The emitter evaluates the trace, or calls the function again if the arguments
have other localities than was known when it was traced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax import inner_traces, jax_compat, user_lines, user_mesh
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.errors import MergeError, message
from distjax.jax_compat import ShapedArray
from distjax.placement.per_replica import PerReplica, require_local, require_same_topology
from distjax.placement.topology import Topology
from distjax.replica.analysis import Analysis
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
from distjax.replica.merge_trace import MergeTrace
from distjax.replica.partitioned_tree import PartitionedTree, is_array
from distjax.replica.tracer_localities import TracerLocalities
from distjax.replica.user_names import function_name
from distjax.typing import PyTree
from distjax.variables.state import CreationLog, MergeState, ShapeState, TraceState
from distjax.variables.variable import Variable


class UserMerge:
    """A merge function with its arguments and the variables that it uses.

    Operands: the array arguments, then a value for each variable in `read`.
    Results: the array results, then a value for each variable in `written`.

    Attributes:
      trace: the function's trace, for its shapes and variables.
      jaxpr: array arguments -> array results, for facts about replicas' values; None if a trace
        does not tell.
      out_varying: which results differ; None if that is not known while it is bound.
    """

    trace: MergeTrace
    jaxpr: jax_compat.Jaxpr | None = None
    out_varying: Sequence[bool] | None = None

    def __init__(self, strategy: StrategyLike, fn: Callable[..., Any], args: PartitionedTree):
        self.strategy, self.fn, self.args = strategy, fn, args
        self.closure = ClosureValues(fn)

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

    def trace_for(self, varying: Sequence[bool] | None) -> None:
        """Traces the function abstractly, for its shapes and variables.

        Args:
          varying: which array arguments differ; None if that is not known yet.
        """
        if self.topology.num_replicas == 1:
            varying = [False] * len(self.args.leaves)
        if varying is None or not self._trace_known(tuple(varying)):
            self._trace_unknown()

    def _trace_known(self, varying: tuple[bool, ...]) -> bool:
        """Traces the function as the program will call it; returns whether that worked."""
        try:
            with inner_traces.without_user_axes():
                self.trace = self._trace(varying)
        except MergeError:
            raise
        except Exception:  # raised again where it is traced for its shapes, or emitted
            return False
        written = (v.layout.local_form.varying for v in self.trace.written)
        self.out_varying = [*self.trace.out_varying, *written]
        if self.trace.only_reduces:
            self.jaxpr = self.trace.jaxpr
            return True
        with contextlib.suppress(Exception):  # then there are no facts
            self.jaxpr = self._trace((False,) * len(varying), self.trace.created).jaxpr
        return True

    def _trace_unknown(self) -> None:
        """Traces the function for its shapes alone.

        Every array is first passed as mirrored, which makes any operation legal and gives the
        same replica shapes and dtypes. If that raises, every array is passed per replica.
        """
        num_args = len(self.args.leaves)
        try:
            self.trace = self._trace((False,) * num_args)
            self.jaxpr = self.trace.jaxpr
        except MergeError:  # no locality would fix this
            raise
        except Exception:
            if not num_args or self.topology.num_replicas == 1:
                raise
            try:
                self.trace = self._trace((True,) * num_args)
                return
            except Exception:  # report the first error
                pass
            raise

    @property
    def topology(self) -> Topology:
        """The replicas that merge."""
        return self.strategy.extended.topology

    def _trace(self, varying: tuple[bool, ...], made: Sequence[Variable] = ()) -> MergeTrace:
        """Traces the function, with the variables that a former trace of it made."""
        topology, found = self.topology, dict[str, Any]()
        avals = []
        for leaf, differs in zip(self.args.leaves, varying, strict=True):
            aval = jax_compat.aval_of(leaf)
            shape = (topology.num_replicas, *aval.shape) if differs else aval.shape
            avals.append(ShapedArray(shape, aval.dtype, weak_type=aval.weak_type))

        def traced(*arrays: jax.Array) -> list[Any]:
            creation = CreationLog(list(made), makes_at_once=True)
            state = ShapeState(local_view=False, creations=creation)
            pairs = zip(arrays, varying, strict=True)
            values = [PerReplica(a, topology) if differs else a for a, differs in pairs]
            result = self._call(values, state)
            outs = self._as_global_values(result.take_leaves())
            written = list(state.written)
            found.update(read=state.read_order, written=written, created=creation.remembered)
            found.update(result=result, out_varying=[o.varying for o in outs])
            found["is_pure"] = state.is_pure
            found["out_avals"] = [replica_aval(o) for o in outs]
            found["out_avals"] += [ShapedArray(v.local_shape, v.dtype) for v in written]
            return [*(o.array for o in outs), *map(state.read, written)]

        # The replica function's mesh (its model axes) does not apply to cross-replica code.
        with user_mesh.outside_manual_axes(), frames.without_observer():
            jaxpr, consts = inner_traces.trace_jaxpr(traced, avals)
        self._require_no_bare_collective(jaxpr)
        return MergeTrace(jaxpr, consts, varying, **found)

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
        """Emits the function in the global view, with proved localities."""
        num_args, trace = len(self.args.leaves), self.trace
        args = [as_user_value(v, topology) for v in values[:num_args]]
        pairs = zip(trace.read, values[num_args:], strict=True)
        variables = [to_variable(v, value, self.topology) for v, value in pairs]
        is_known = self.out_varying is not None
        outs = trace.call(list(map(from_user_value, args)), variables) if is_known else None
        if outs is None:
            results, written = self._call_again(args, variables)
        else:
            results = list(map(GlobalValue, outs, trace.out_varying))
            written = outs[len(results) :]
        pairs = zip(trace.written, written, strict=True)
        return results + [from_variable(v, x) for v, x in pairs]

    def _call_again(
        self, args: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[GlobalValue], list[Any]]:
        """Returns the results and the new values of the variables in `trace.written`."""
        creation = CreationLog(made=self.trace.created, makes_at_once=True)
        state = MergeState(local_view=False, creations=creation)
        for variable, value in zip(self.trace.read, variables, strict=True):
            state.bind(variable, value)
        result = self._call(args, state)
        outs = self._as_global_values(result.leaves)
        is_other = len(outs) != len(self.trace.result.leaves)
        if is_other or set(state.written) != set(self.trace.written):
            raise MergeError(
                message(
                    f"merge function {function_name(self.fn)} needs to do the same on every call",
                    got="other results or other variables than at its first trace",
                    why="a merge function may be traced more than once and must be pure except "
                    "through variables",
                    fix="a result, or v.assign(x) of a dj.Variable, in place of Python state",
                )
            )
        return outs, list(map(state.read, self.trace.written))

    def _require_no_bare_collective(self, jaxpr: jax_compat.Jaxpr) -> None:
        axis_name = self.topology.axis_name
        found = next(Analysis(axis_name).collectives(jaxpr), None)
        if found is None:
            return
        raise MergeError(
            message(
                f"merge function {function_name(self.fn)} needs strategy.reduce to combine values "
                "of replicas",
                got=f"a bare {found.primitive.name} over axis {axis_name!r}, at "
                f"{user_lines.source_line(found)}",
                why="a merge function runs once, in cross-replica context, where there is no "
                "replica axis",
                fix="strategy.reduce('sum', x), or strategy.gather(x, axis=0)",
            )
        )


class WeakMerge:
    """A user's merge as an equation parameter.

    The reference is weak because JAX's cache of abstract evaluations keeps parameters alive,
    and a merge keeps its arguments alive, such as all variables of a model.

    Attributes:
      num_results: how many outputs are results; they come first.
    """

    def __init__(self, merge: UserMerge):
        self._reference, self.out_avals = weakref.ref(merge), merge.trace.out_avals
        self.reduces, self.out_varying = merge.reduces, merge.out_varying
        self.num_results = len(merge.trace.out_varying)

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
    localities: TracerLocalities,
    keep: Callable[[UserMerge], None],
) -> Any:
    """Binds a merge equation in the current trace and returns each replica's result.

    The equation references the merge weakly, so ``keep`` must keep it alive.
    """
    merge = UserMerge(strategy, fn, PartitionedTree((args, kwargs), is_array))
    for leaf in merge.args.leaves:
        require_local(leaf, "merge_call")
    merge.trace_for(localities.of(merge.args.leaves))
    trace = merge.trace
    for variable in trace.written:
        state.require_writable(variable)
    operands = [*merge.args.take_leaves(), *map(state.read, trace.read)]
    keep(merge)
    localities.has_merges = True
    outs = merge_p.bind(*operands, merge=WeakMerge(merge))
    num_results = len(trace.result.leaves)
    for variable, value in zip(trace.written, outs[num_results:], strict=True):
        state.write(variable, value)
    return trace.result.combine(outs[:num_results])
