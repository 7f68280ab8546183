"""The ReplicaContext of the default strategy: one replica, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from distjax.collectives import ops
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame, mixing_text, other_call_text
from distjax.context.reporting import Finding, report
from distjax.errors import (
    ContextError,
    MergeError,
    StrategyMismatchError,
    message,
)
from distjax.replica.call_checks import add_merge_note, require_call
from distjax.typing import PositionalArgs, PyTree, ReduceOpLike
from distjax.user_lines import calling_line


class DefaultReplicaContext:
    """A single replica: reductions return their input, merges are plain calls."""

    def __init__(self, strategy: StrategyLike):
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The default strategy."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1."""
        return 1

    @property
    def replica_id_in_sync_group(self) -> int:
        """The Python int 0."""
        return 0

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """JAX's default device."""
        return self._strategy.extended.topology.devices

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context."""
        args, kwargs = require_call(merge_fn, args, kwargs, "merge_call")
        self._require_current("merge_call")
        _warn_if_mapped("merge_call")
        frame = Frame(self._strategy, state=frames.current().state)
        with frames.with_frame(frame):
            try:
                return merge_fn(self._strategy, *args, **kwargs)
            except TypeError as error:
                add_merge_note(error, merge_fn, args, kwargs)
                raise

    def all_reduce(self, op: ReduceOpLike, value: PyTree) -> Any:
        """Returns `value`."""
        ops.as_reduce_op(op)
        self._require_current("all_reduce")
        _warn_if_mapped("all_reduce")
        return value

    def all_gather(self, value: PyTree, axis: int) -> Any:
        """Returns `value`."""
        self._require_current("all_gather")
        _warn_if_mapped("all_gather")
        return value

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Returns `key` folded with 0, as replica 0 of any strategy does."""
        return jax.random.fold_in(key, 0)

    def _require_current(self, what: str) -> None:
        frame = frames.current()
        if frame.replica_context is self:
            return
        if frame.strategy is not self._strategy:
            raise StrategyMismatchError(
                mixing_text(self._strategy, frame, f"{what} of the default replica context")
            )
        if frame.replica_context is not None:
            raise ContextError(other_call_text(what))
        raise MergeError(
            message(
                f"{what} needs replica context. Need to be inside `call_for_each_replica()`",
                got=frame.name,
                why="a merge function runs in cross-replica context",
                fix="call it in the replica function, or use strategy.reduce(op, x)",
            )
        )


def _warn_if_mapped(what: str) -> None:
    """Warns in the body of a `jax.pmap` or `shard_map` of the user, whose devices it ignores.

    A body that leaves some mesh axes to JAX may have no replicas: it is a model's own. Nor are
    replica ids and `fold_in` reported, as every device may have a key of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.manual_axes or set(mesh.manual_axes) != set(mesh.axis_names):
        return
    text = message(
        f"{what} in a jax.pmap or jax.shard_map needs the strategy whose replicas it combines",
        got=f"no strategy, and {mesh.size} devices that each keep their own value",
        why="the default strategy has one replica, and knows no axis of jax.pmap or shard_map",
        fix="dj.pmap in place of jax.pmap, or strategy.run(fn, args); or, where it is meant: "
        "with dj.expect(reason)",
    )
    report(Finding("warning", "a reduction without replicas", text, calling_line()))
