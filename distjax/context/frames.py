"""The one stack of frames: who is asking, and where variables' values live.

A frame is pushed by `scope` (cross-replica), by `run` (replica), by a merge
function (cross-replica again) and by `update`. An empty stack is the default
context: the default strategy with one replica. The stack belongs to a thread; a
new thread starts in the default context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from distjax import jax_compat
from distjax.context.observer import Observer
from distjax.errors import ContextError, StrategyMismatchError, message


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """One level of the context.

    Attributes:
      strategy: the active strategy.
      replica_context: the ReplicaContext in a replica context, else None.
      state: where variables are read and written; None means their storage.
      in_update: whether `extended.update` is running a function on components.
      colocate_with: the variable that new variables are colocated with, or None.
      is_default: whether this frame leaves the default state active.
      from_set_strategy: whether `set_strategy` pushed it.
      observer: who is told what traces prove, from here inwards (an `Observer`); None
        leaves it to the frames around, MUTED silences them.
    """

    strategy: Any
    replica_context: Any = None
    state: Any = None
    in_update: bool = False
    colocate_with: Any = None
    is_default: bool = False
    from_set_strategy: bool = False
    observer: Any = None

    @property
    def name(self) -> str:
        """The name of the context in error texts."""
        if self.in_update:
            return f"an update function under {self.strategy!r}"
        kind = "replica" if self.replica_context is not None else "cross-replica"
        return f"{kind} context of {self.strategy!r}"


_stack: ContextVar[tuple[Frame, ...]] = ContextVar("distjax_frames", default=())
_default_frame: list[Callable[[], Frame]] = []


def set_default_frame(make: Callable[[], Frame]) -> None:
    """Tells what frame an empty stack stands for (called once, on import)."""
    _default_frame[:] = [make]


def default_frame() -> Frame:
    """Returns the frame of the default strategy and its one replica."""
    return _default_frame[0]()


def current() -> Frame:
    """Returns the current frame."""
    stack = _stack.get()
    if not stack:
        return default_frame()
    frame = stack[-1]
    if frame.state is not None and jax_compat.current_trace() is not frame.state.trace:
        # An inner function asks for what JAX does not know of, and would remember the answer.
        jax_compat.forget_inner_traces(frame.state.trace)
    return frame


def stack() -> tuple[Frame, ...]:
    """Returns all frames of this thread, outermost first."""
    return _stack.get()


def push(frame: Frame) -> None:
    """Puts `frame` on the stack."""
    _stack.set((*_stack.get(), frame))


def pop(frame: Frame) -> None:
    """Takes `frame` off the stack.

    Raises:
      ContextError: `frame` is not the innermost one; it is taken out anyway.
    """
    frames = _stack.get()
    if frames and frames[-1] is frame:
        _stack.set(frames[:-1])
        return
    _stack.set(tuple(f for f in frames if f is not frame))
    here = any(f is frame for f in frames)
    raise ContextError(
        message(
            f"scopes need to be left in the order opposite to entering, "
            f"here the scope of {frame.strategy!r}",
            got=f"innermost is {frames[-1].name}" if here else "a scope entered in another thread",
            why="each thread has one stack of contexts (scope nesting error)",
            fix="with strategy.scope(): ...",
        )
    )


@contextlib.contextmanager
def with_frame(frame: Frame) -> Iterator[Frame]:
    """Puts `frame` on the stack for a block; restores the stack whatever happens."""
    before = _stack.get()
    _stack.set((*before, frame))
    try:
        yield frame
    finally:
        _stack.set(before)


@contextlib.contextmanager
def with_stack(frames: tuple[Frame, ...]) -> Iterator[None]:
    """Gives the calling thread the stack `frames` for a block (for our threads)."""
    before = _stack.get()
    _stack.set(frames)
    try:
        yield
    finally:
        _stack.set(before)


# -- who watches --------------------------------------------------------------

#: As the observer of a frame: nobody is told.
MUTED = object()


def observer() -> Observer | None:
    """Returns who is told what the traces of this thread prove (`dj.explain`), or None."""
    found = next((f.observer for f in reversed(_stack.get()) if f.observer is not None), None)
    return None if found is MUTED else found


def is_dry_run() -> bool:
    """Returns whether a trace is made to be looked at: it may change nothing."""
    return any(f.observer is not None for f in _stack.get())


@contextlib.contextmanager
def without_observer() -> Iterator[None]:
    """Tells nobody of a block: a trace for shapes proves nothing that counts."""
    if observer() is None:
        yield
        return
    with with_frame(dataclasses.replace(current(), observer=MUTED)):
        yield


# -- who may ------------------------------------------------------------------


def in_replica_context() -> bool:
    """Returns whether code runs as one replica (the default context counts)."""
    return current().replica_context is not None


def require_cross_replica(strategy: Any, method: str) -> None:
    """Raises unless `strategy.<method>` may be called here.

    Legal in the default context and in cross-replica context of `strategy`.
    """
    frame = current()
    if frame.is_default or (frame.replica_context is None and frame.strategy is strategy):
        return
    if frame.strategy is not strategy:
        raise StrategyMismatchError(mixing_text(strategy, frame, method))
    raise ContextError(
        message(
            f"{method} needs cross-replica context",
            got=frame.name,
            why="a replica sees its own values only. Method requires being in cross-replica "
            "context",
            fix="call it outside run, or inside ctx.merge_call(lambda strategy, x: "
            f"strategy.{method}(...), args=(x,)); for a reduction: ctx.all_reduce(op, x)",
        )
    )


def require_enterable(strategy: Any, method: str) -> None:
    """Raises unless `strategy.<method>` may make `strategy` active here.

    Legal in cross-replica context of `strategy` and wherever no strategy is
    active, functions that the default strategy runs among them.
    """
    if not current().strategy.extended.is_default:
        require_cross_replica(strategy, method)


def mixing_text(strategy: Any, frame: Frame, what: str) -> str:
    """Returns the text for a call of one strategy in the context of another."""
    return message(
        f"{what} of {strategy!r} needs this strategy, or none, to be active",
        got=frame.name,
        why="Mixing different tf.distribute.Strategy objects is not possible, nor is mixing "
        "distjax's: their replicas and variables live in different ways",
        fix=f"leave the context of {frame.strategy!r} first, or use one strategy throughout",
    )
