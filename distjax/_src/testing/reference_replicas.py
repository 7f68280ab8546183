"""Replicas as threads that pause where they meet, as TF 1.13 documents, and their values.

A meeting is where replicas wait for each other: a merge_call, a collective, an aggregated
write, the creation of a variable. The replicas run one after another, each up to its next
meeting. When all have arrived, the caller's thread holds the meeting in cross-replica
context and distributes the answers.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.collectives.ops import as_reduce_op, require_gather_axis, require_sums, sum_dtype
from distjax._src.context import Frame, StrategyLike, frames
from distjax._src.objects.stateful import has_objects
from distjax._src.placement import (
    PerReplica,
    Topology,
    is_per_replica,
    require_local,
    require_same_topology,
)
from distjax._src.replica.arguments import is_array, require_call
from distjax._src.typing import AxisLike, PositionalArgs, PyTree, ReduceOp, ReduceOpLike
from distjax._src.variables.conversion import is_number
from distjax._src.variables.variable import Variable
from distjax.errors import (
    ContextError,
    LocalityError,
    MergeError,
    UnsupportedError,
    describe_value,
    message,
)


class Meeting(NamedTuple):
    """One replica's contribution to a meeting.

    `what` describes the call, and must be the same on all replicas; ``hold(values of all)`` returns
    the answers, one per replica.
    """

    what: str
    value: Any
    hold: Callable[[list[Any]], Sequence[Any]]


class _Aborted(BaseException):
    """Unwinds a replica after a failure elsewhere in the run."""


class ReplicaThread(threading.Thread):
    """One replica: runs ``body`` on demand, up to its next meeting; None when it is done."""

    def __init__(self, number: int, body: Callable[[ReplicaThread], Any]):
        super().__init__(name=f"replica {number}", daemon=True)
        self.number = number
        self.meeting: Meeting | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._body = body
        self._answer: Any = None
        self._is_aborted = False
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        """Runs the body, starting at the first turn."""
        self._turn.acquire()
        try:
            if not self._is_aborted:
                self.result = self._body(self)
        except _Aborted:
            pass
        except BaseException as error:
            self.error = error
        self.meeting = None
        self._pause.release()

    def meet(self, meeting: Meeting) -> Any:
        """Returns this replica's answer; called in its own thread."""
        if not self._is_aborted:
            self.meeting = meeting
            self._pause.release()
            self._turn.acquire()
        if self._is_aborted:
            raise _Aborted
        return self._answer

    def resume(self, answer: PyTree) -> None:
        """Lets the replica run up to its next meeting; re-raises its exceptions."""
        self._answer = answer
        self._turn.release()
        self._pause.acquire()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Unwinds the replica if it still waits."""
        self._is_aborted = True
        self._turn.release()
        self.join()


def run_replicas(strategy: StrategyLike, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of the calls, each run as one replica of `strategy`."""
    around = frames.stack()

    def replica(call: Callable[[], Any]) -> Callable[[ReplicaThread], Any]:
        def body(thread: ReplicaThread) -> Any:
            frame = Frame(strategy, ReferenceReplicaContext(strategy, thread))
            # Inner jit, scan, while_loop and cond run step by step on concrete values.
            with frames.with_stack((*around, frame)), jax.disable_jit():
                return call()

        return body

    threads = [ReplicaThread(i, replica(call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    try:
        answers: Sequence[Any] = [None] * len(threads)
        while True:
            for thread, answer in zip(threads, answers, strict=True):
                thread.resume(answer)
            if all(thread.meeting is None for thread in threads):
                return [thread.result for thread in threads]
            answers = _hold_meeting(strategy, [thread.meeting for thread in threads])
    finally:
        for thread in threads:
            thread.abort()


def _hold_meeting(strategy: StrategyLike, meetings: Sequence[Meeting | None]) -> Sequence[Any]:
    places = ["the end of the function" if m is None else m.what for m in meetings]
    if len(set(places)) > 1:
        arrived = ", ".join(f"replica {i} at {place}" for i, place in enumerate(places))
        raise MergeError(
            "all replicas need to make the same merge_call and collective calls, in the same "
            "order. Some replicas made a different number of merge_call calls",
            got=arrived,
            why="each call waits for all replicas",
            fix="call it on every replica; choose by replica with jnp.where instead",
        )
    present = [m for m in meetings if m is not None]
    with frames.with_frame(Frame(strategy)), jax.disable_jit():
        return present[0].hold([m.value for m in present])


# -- all_reduce, with its derivative ------------------------------------------

_reduce_p = jax_compat.Primitive("distjax_reference_all_reduce")
_reduce_p.def_abstract_eval(lambda x, *, context, op: jax_compat.ShapedArray(x.shape, x.dtype))


@_reduce_p.def_impl
def _reduce_now(x: PyTree, *, context: ReferenceReplicaContext, op: ReduceOp) -> Any:
    hold = lambda values: [combine(op, values)] * len(values)
    return context.meet(f"all_reduce({op.name})", x, hold)


def _reduce_jvp(primals: PyTree, tangents: PyTree, **params: PyTree) -> Any:
    out, (tangent,) = _reduce_p.bind(*primals, **params), tangents
    is_zero = isinstance(tangent, jax_compat.Zero) or tangent.dtype == jax.dtypes.float0
    zero = jax_compat.Zero(jax_compat.aval_of(out).to_tangent_aval())
    return out, zero if is_zero else _reduce_p.bind(tangent, **params)


jax_compat.primitive_jvps[_reduce_p] = _reduce_jvp
jax_compat.primitive_transposes[_reduce_p] = lambda ct, x, **params: [
    ct if isinstance(ct, jax_compat.Zero) else _reduce_p.bind(ct, **params)
]
jax_compat.primitive_batchers[_reduce_p] = lambda xs, dims, **params: (
    _reduce_p.bind(*xs, **params),
    dims[0],
)


class ReferenceReplicaContext:
    """The result of `dj.get_replica_context()` in a replica of the reference."""

    def __init__(self, strategy: StrategyLike, thread: ReplicaThread):
        self.strategy, self._thread = strategy, thread
        self.number = thread.number
        self.num_replicas_in_sync = strategy.num_replicas_in_sync
        self.devices = strategy.extended.worker_devices

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, a concrete int32 scalar."""
        self._require_current("replica_id_in_sync_group")
        return jnp.int32(self.number)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Returns ``merge_fn(strategy, *args, **kwargs)``, called once for all replicas."""
        args, kwargs = require_call(merge_fn, args, kwargs, "merge_call")
        topology = self.strategy.extended.topology

        def hold(values: list[Any]) -> list[Any]:
            args, kwargs = regroup(values, topology, "merge_call")
            result = merge_fn(self.strategy, *args, **kwargs)
            return [select(result, i, topology, "a merge result") for i in range(len(values))]

        return self.meet("merge_call", (args, kwargs), hold)

    def all_reduce(self, op: ReduceOpLike, value: PyTree) -> Any:
        """Returns the sum or mean of each leaf over the replicas."""
        op = as_reduce_op(op)
        self._require_current("all_reduce")

        def leaf(x: PyTree) -> Any:
            return _reduce_p.bind(summable(op, _own(x, "all_reduce")), context=self, op=op)

        return jax.tree.map(leaf, value, is_leaf=is_per_replica)

    def all_gather(self, value: PyTree, axis: int) -> Any:
        """Returns the replicas' values of each leaf, concatenated."""

        def leaf(x: PyTree) -> Any:
            hold = lambda values: [concatenate(values, axis, "all_gather")] * len(values)
            return self.meet("all_gather", _own(x, "all_gather"), hold)

        return jax.tree.map(leaf, value, is_leaf=is_per_replica)

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Returns `key` folded with this replica's number."""
        self._require_current("fold_in")
        return jax.random.fold_in(key, self.number)

    def meet(self, what: str, value: PyTree, hold: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits for the other replicas; returns this replica's answer, as given by ``hold``."""
        self._require_current(what)
        if any(isinstance(x, jax_compat.Tracer) for x in jax.tree.leaves(value)):
            raise MergeError(
                f"{what} in the reference interpreter needs concrete values",
                got="values of a JAX trace (grad, vmap, jvp, remat)",
                why="replicas meet as threads; of all meetings only all_reduce has derivatives "
                "and batching here",
                fix=f"move {what} out of the transformed function, or use VirtualStrategy",
            )
        return self._thread.meet(Meeting(what, value, hold))

    def _require_current(self, what: str) -> None:
        frame = frames.current()
        if frame.replica_context is self:
            return
        is_merge = frame.strategy is self.strategy and frame.replica_context is None
        raise (MergeError if is_merge else ContextError)(
            message(
                f"{what} needs its own replica context. Need to be inside "
                "`call_for_each_replica()`",
                got=frame.name,
                why="a replica context is valid only while its replica runs",
                fix="dj.get_replica_context() where it is used; strategy.reduce(op, x) in a merge "
                "function",
            )
        )


def _own(value: PyTree, method: str) -> Any:
    require_local(value, method)
    return value.value if isinstance(value, Variable) else value


def require_no_objects(
    strategy: StrategyLike, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises an UnsupportedError if a call takes or captures NNX objects."""
    if not has_objects(fn, args, kwargs):
        return
    raise UnsupportedError(
        f"run of {strategy!r} needs a function without NNX objects",
        got="a module, an optimizer, a metric, Rngs or a variable of Flax, passed or captured",
        why="each replica would change the same object, or a copy that is lost",
        fix="graphdef, state = nnx.split(model) and nnx.merge in the function, with the new "
        "state as a result; or dj.VirtualStrategy(2), which takes objects",
    )


# -- values of R replicas: split, regrouped, reduced -----------------------------


def select(tree: PyTree, replica: int, topology: Topology, where: str) -> Any:
    """Returns one replica's view of a cross-replica tree."""

    def leaf(x: PyTree) -> Any:
        if isinstance(x, PerReplica):
            require_same_topology(x, topology, where)
            return x.stacked[replica]
        return jnp.asarray(x) if is_array(x) else x

    return jax.tree.map(leaf, tree, is_leaf=is_per_replica)


def regroup(trees: Sequence[Any], topology: Topology, where: str) -> Any:
    """Merges the trees of all replicas: equal leaves become one, others a PerReplica."""
    flat = [jax.tree.flatten(tree, is_leaf=is_per_replica) for tree in trees]
    treedef = flat[0][1]
    for _, other in flat:
        if other != treedef:
            raise LocalityError(_differing_text(where, f"a tree {treedef} and a tree {other}"))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(treedef, [_regroup_column(c, topology, where) for c in columns])


def _regroup_column(column: Sequence[Any], topology: Topology, where: str) -> Any:
    first = column[0]
    if any(isinstance(x, PerReplica) for x in column):
        raise LocalityError(_differing_text(where, "a PerReplica that a replica closes over"))
    if not is_array(first) and all(x is first for x in column):
        return first
    if all(is_number(x) and type(x) is type(first) and x == first for x in column):
        return first
    if not all(is_array(x) or is_number(x) for x in column):
        if all(type(x) is type(first) and x == first for x in column):
            return first
        raise LocalityError(_differing_text(where, ", ".join(map(describe_value, column))))
    arrays = [jnp.asarray(x) for x in column]
    if any((a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype) for a in arrays):
        raise LocalityError(_differing_text(where, ", ".join(map(describe_value, arrays))))
    if all_equal(arrays):
        return arrays[0]
    return PerReplica(jnp.stack(arrays), topology)


def require_mean(op: ReduceOp, value: object, num_replicas: int) -> None:
    """Raises if a value that is not one per replica is to be summed over them."""
    if op is ReduceOp.MEAN or num_replicas == 1:
        return
    raise ValueError(
        message(
            "A non-DistributedValues value cannot be reduced with the given reduce op ReduceOp.SUM",
            got=describe_value(value),
            why="it is unclear whether it stands for one value or for R of them",
            fix="return it from strategy.run",
        )
    )


def all_equal(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether the arrays are equal bit for bit."""
    return all(_content(a) == _content(arrays[0]) for a in arrays)


def _content(array: jax.Array) -> bytes:
    if jax_compat.is_key_dtype(array.dtype):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _differing_text(where: str, got: str) -> str:
    return message(
        f"{where} needs the same tree, shapes, dtypes and Python objects from all replicas",
        got=got,
        why="only the numbers in arrays may differ per replica: a compiled program is traced once "
        "for all of them",
        fix="make the difference an array, or let it not depend on the replica",
    )


def components(value: PyTree, num_replicas: int) -> list[Any] | None:
    """Returns the replicas' values, or None for a value not on the replicas."""
    if isinstance(value, PerReplica):
        return [value.stacked[i] for i in range(num_replicas)]
    return [value] * num_replicas if isinstance(value, jax.Array) else None


def summable(op: ReduceOp, value: PyTree) -> jax.Array:
    """Returns `value` in the dtype in which `op` adds: floating-point for a mean."""
    array = jnp.asarray(value)
    require_sums(array.dtype, f"a {op.name.lower()} over the replicas")
    if op is ReduceOp.MEAN and not jnp.issubdtype(array.dtype, jnp.inexact):
        return array.astype(jnp.result_type(float))
    # The dtype is explicit because a sum, like a psum, is never weakly typed.
    return array.astype(jnp.int32 if array.dtype == jnp.bool_ else array.dtype)


def combine(op: ReduceOp, values: Sequence[Any]) -> jax.Array:
    """Returns the sum or mean of the replicas' values, added in replica order."""
    total = functools.reduce(operator.add, [summable(op, v) for v in values])
    return total / len(values) if op is ReduceOp.MEAN else total


def combine_within(op: ReduceOp, values: Sequence[Any], axis: AxisLike, mask: PyTree) -> jax.Array:
    """Returns the masked sum or mean over replicas and over `axis`."""
    axes = axis if axis is None or isinstance(axis, int) else tuple(axis)
    add: Callable[[Any], Any] = lambda x: x if axes is None else jnp.sum(x, axes, dtype=x.dtype)
    arrays = [summable(op, v) for v in values]
    dtype = arrays[0].dtype
    if op is ReduceOp.MEAN:
        arrays = [a.astype(sum_dtype(dtype)) for a in arrays]
    masks = mask or [jnp.ones((), bool)] * len(values)
    wide = [
        jnp.broadcast_to(m.reshape(m.shape + (1,) * (a.ndim - m.ndim)), a.shape)
        for m, a in zip(masks, arrays, strict=True)
    ]
    kept = [jnp.where(m, a, jnp.zeros_like(a)) for m, a in zip(wide, arrays, strict=True)]
    total = functools.reduce(operator.add, [add(x) for x in kept])
    if op is ReduceOp.SUM:
        return total
    counts = [add(m.astype(a.dtype)) for m, a in zip(wide, arrays, strict=True)]
    return (total / functools.reduce(operator.add, counts)).astype(dtype)


def concatenate(values: Sequence[Any], axis: int, method: str) -> jax.Array:
    """Returns the replicas' values concatenated along `axis`."""
    require_gather_axis(jnp.ndim(values[0]), axis, method)
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)
