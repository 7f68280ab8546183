"""Scopes, and the free functions that ask for the current context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from distjax.context import frames
from distjax.context.frames import Frame
from distjax.errors import ContextError, StrategyMismatchError, describe_value, message


@contextlib.contextmanager
def scope(strategy: Any) -> Iterator[None]:
    """Makes `strategy` active for a block."""
    frame = _scope_frame(strategy)
    frames.push(frame)
    try:
        yield
    except BaseException:
        with contextlib.suppress(ContextError):  # the error under way counts
            frames.pop(frame)
        raise
    frames.pop(frame)


def _scope_frame(strategy: Any) -> Frame:
    now = frames.current()
    if strategy.extended.is_default:
        _require_nothing_to_nest(now)
        if not frames.stack():
            return now
        return Frame(strategy, now.replica_context, state=now.state, is_default=True)
    frames.require_enterable(strategy, "scope()")
    return Frame(strategy, state=now.state, in_update=now.in_update)


def _require_nothing_to_nest(now: Frame) -> None:
    if not has_strategy():
        return
    raise StrategyMismatchError(
        message(
            "Must not nest tf.distribute.Strategy scopes: the default strategy's scope needs no "
            "other strategy to be active",
            got=now.name,
            why="inside it the default strategy would have to be active, and it is not",
            fix="leave the scope first",
        )
    )


def get_strategy() -> Any:
    """Returns the active strategy; the default strategy if there is none."""
    return frames.current().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is active."""
    return not frames.current().strategy.extended.is_default


def get_replica_context() -> Any:
    """Returns the ReplicaContext, or None in cross-replica context.

    With no active strategy: the context of the default strategy's one replica.
    """
    return frames.current().replica_context


def in_cross_replica_context() -> bool:
    """Returns whether code runs once for all replicas."""
    return not frames.in_replica_context()


def set_strategy(strategy: Any) -> None:
    """Makes `strategy` active from here on, in place of the one set before.

    Args:
      strategy: the strategy; None deactivates the one set before.

    Raises:
      TypeError: no strategy.
      ContextError: inside a `with strategy.scope():` block.
    """
    require_strategy(strategy, "set_strategy")
    stack = frames.stack()
    if len(stack) > 1 or (stack and not stack[0].from_set_strategy):
        raise ContextError(
            message(
                "set_strategy Must not be called inside a `tf.distribute.Strategy` scope",
                got=frames.current().name,
                why="the block would end under another strategy than it began",
                fix="leave the block first, or use `with strategy.scope():` alone",
            )
        )
    if stack:
        frames.pop(stack[0])
    if strategy is not None and not strategy.extended.is_default:
        frames.push(Frame(strategy, from_set_strategy=True))


def require_strategy(strategy: Any, method: str) -> None:
    """Raises a TypeError for anything but a strategy of distjax, or None."""
    extended = getattr(strategy, "extended", None)
    if strategy is None or getattr(extended, "strategy", None) is strategy:
        return
    raise TypeError(
        message(
            f"{method} needs a distjax strategy, or None",
            got=describe_value(strategy),
            why="programs and variables belong to the strategy itself",
            fix="strategy = dj.MirroredStrategy(); for an adapter of dj.compat its `.wrapped`",
        )
    )
