"""Scopes, and the free functions that query the current context."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from distjax._src.context import frames
from distjax._src.context.contracts import StrategyLike
from distjax._src.context.frames import Frame
from distjax.errors import ContextError, StrategyMismatchError, describe_value, message


class Scope(contextlib.ContextDecorator):
    """What `strategy.scope()` returns: the strategy is active while it is entered.

    It is reentrant and can be entered in several threads: each entry pushes a new frame on
    its thread's stack.
    """

    def __init__(self, strategy: StrategyLike):
        self._strategy = strategy
        self._entered: list[Frame] = []

    def __enter__(self) -> Any:
        frame = _scope_frame(self._strategy)
        try:
            self._entered.append(frame)
            frames.push(frame)
            return self._strategy
        except BaseException:  # a signal: `with` does not exit what it has not entered
            frames.take_out(frame)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        innermost = frames.current()
        frame = next((f for f in reversed(frames.stack()) if f in self._entered), None)
        if frame is not None:
            self._leave(frame)
        if frame is not innermost and kind is None:  # never mask an exception in flight
            raise ContextError(_order_text(self._strategy, None if frame is None else innermost))

    def _leave(self, frame: Frame) -> None:
        try:
            frames.take_out(frame)
        finally:
            frames.take_out(frame)  # a signal may have cut the first attempt short
            self._entered.remove(frame)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nobody can exit it any more: it was entered by hand, or a signal came first. (A signal
        # in `__init__` leaves no list.)
        if is_finalizing():  # Python has taken this module apart
            return
        for frame in vars(self).get("_entered", ()):
            frames.take_out(frame)


def _order_text(strategy: StrategyLike, innermost: Frame | None) -> str:
    return message(
        f"scopes need to be left in the order opposite to entering, here the scope of {strategy!r}",
        got="a scope that was left before, or entered in another thread"
        if innermost is None
        else f"innermost is {innermost.name}",
        why="each thread has one stack of contexts (scope nesting error)",
        fix="with strategy.scope(): ...",
    )


def _scope_frame(strategy: StrategyLike) -> Frame:
    now = frames.current()
    if strategy.extended.is_default:
        _require_nothing_to_nest(now)
        return Frame(strategy, now.replica_context, state=now.state, allows_both=True)
    frames.require_enterable(strategy, "scope()")
    colocate_with = now.colocate_with if now.strategy is strategy else None
    return Frame(strategy, state=now.state, in_update=now.in_update, colocate_with=colocate_with)


def _require_nothing_to_nest(now: Frame) -> None:
    if not now.has_strategy:
        return
    raise StrategyMismatchError(
        message(
            "Must not nest tf.distribute.Strategy scopes: the default strategy's scope needs no "
            "other strategy to be active",
            got=now.name,
            why="inside it the default strategy would have to be active, and it is not",
            fix="`with default.scope():` outside of `with strategy.scope():`",
        )
    )


def get_strategy() -> Any:
    """Returns the active strategy; the default strategy if there is none."""
    return frames.current().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is active."""
    return frames.current().has_strategy


def get_replica_context() -> Any:
    """Returns the ReplicaContext, or None in cross-replica context.

    If no strategy is active, the context of the default strategy's single replica.
    """
    return frames.current().replica_context


def in_cross_replica_context() -> bool:
    """Returns whether code runs once on behalf of all replicas."""
    return not frames.in_replica_context()


def set_strategy(strategy: StrategyLike | None) -> None:
    """Makes `strategy` active from now on, replacing one set earlier.

    Args:
      strategy: the strategy; None deactivates the one set earlier.

    Raises:
      TypeError: not a strategy.
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
        frames.take_out(stack[0])
    if strategy is not None and not strategy.extended.is_default:
        frames.push(Frame(strategy, from_set_strategy=True))


def require_strategy(strategy: object, method: str) -> None:
    """Raises a TypeError unless `strategy` is a distjax strategy or None."""
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
