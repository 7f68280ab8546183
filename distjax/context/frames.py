"""The one stack of frames: who is asking, and where variables' values live.

A frame is pushed by `scope` (cross-replica), by `run` (replica), by a merge
function (cross-replica again) and by `update`. An empty stack is the default
context: the default strategy with one replica. The stack belongs to a thread; a
new thread starts in the default context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from contextvars import ContextVar, Token
from typing import Any

from distjax import jax_compat
from distjax.context.contracts import StrategyLike, VariableLike
from distjax.context.observer import Observer
from distjax.errors import ContextError, StrategyMismatchError, message
from distjax.placement.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """One level of the context.

    Attributes:
      strategy: the active strategy.
      replica_context: the ReplicaContext in a replica context, else None.
      state: where variables are read and written; None means their storage.
      in_update: whether `extended.update` is running a function on components.
      colocate_with: the variable that new variables are colocated with, or None.
      allows_both: whether no context was entered, so that methods of either may be called.
      axis_name: the name of the replica axis in this call (`dj.pmap`); None: the strategy's.
      from_set_strategy: whether `set_strategy` pushed it.
      observer: who is told what traces prove, from here inwards (an `Observer`); None
        leaves it to the frames around, MUTED silences them.
    """

    strategy: StrategyLike
    replica_context: Any = None
    state: Any = None
    in_update: bool = False
    colocate_with: Any = None
    allows_both: bool = False
    axis_name: str | None = None
    from_set_strategy: bool = False
    observer: Any = None

    @property
    def has_strategy(self) -> bool:
        """Whether a strategy was chosen: another one than the default is active."""
        return not self.strategy.extended.is_default

    @property
    def is_replica(self) -> bool:
        """Whether code runs as one of a chosen strategy's replicas."""
        return self.replica_context is not None and self.has_strategy

    def owns_variable(self, variable: VariableLike, *, read: bool) -> bool:
        """Returns whether code may read, or write, `variable` here.

        Any code may read those of the default strategy, and what the default strategy runs
        may read and write all.
        """
        owner = variable.strategy
        if owner is self.strategy or not self.has_strategy:
            return True
        return owner.extended.is_default and (read or self.replica_context is None)

    @property
    def name(self) -> str:
        """The name of the context in error texts."""
        if self.in_update:
            return f"an update function under {self.strategy!r}"
        kind = "replica" if self.replica_context is not None else "cross-replica"
        return f"{kind} context of {self.strategy!r}"


_stack: ContextVar[tuple[Frame, ...]] = ContextVar("distjax_frames", default=())
#: One frame: that of the default strategy and its one replica.
_default_frame: list[Frame] = []


def set_default_frame(frame: Frame) -> None:
    """Tells what frame an empty stack stands for (called once, on import)."""
    _default_frame[:] = [frame]


def current() -> Frame:
    """Returns the current frame."""
    stack = _stack.get()
    if not stack:
        return _default_frame[0]
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


def take_out(frame: Frame) -> bool:
    """Takes `frame`, and no other, off the stack; returns whether the stack had it."""
    frames = _stack.get()
    rest = tuple(f for f in frames if f is not frame)
    if len(rest) == len(frames):
        return False
    _stack.set(rest)
    return True


# A signal (Ctrl-C) may raise at any line below. So a frame is put on the stack inside the block
# that takes it off, and is taken off twice: the second time finds it if a signal came the first.
# What is left is what was entered, and only by a stack that has it: a generator that is suspended
# in a block may be finalised in another thread or task, or in the middle of somebody's step.


@contextlib.contextmanager
def with_frame(frame: Frame) -> Generator[Frame]:
    """Puts `frame` on the stack for a call.

    What was entered in the call ends with it, if only to be safe from generators that it
    leaves suspended in a block: they would leave the state of a trace behind that is over.
    """
    try:
        try:
            push(frame)
            yield frame
        except GeneratorExit:  # nobody left it, since a signal came; what is above is newer
            take_out(frame)
            raise
        finally:
            _leave(frame)
    finally:
        _leave(frame)


def _leave(frame: Frame) -> None:
    """Takes `frame` and all above it off the stack, if the stack has it."""
    frames = _stack.get()
    for index, each in enumerate(frames):
        if each is frame:
            _stack.set(frames[:index])
            return


@contextlib.contextmanager
def with_block(frame: Frame) -> Generator[Frame]:
    """Puts `frame` on the stack for a block of the user's, which a generator may suspend."""
    try:
        try:
            push(frame)
            yield frame
        finally:
            take_out(frame)
    finally:
        take_out(frame)


@contextlib.contextmanager
def with_stack(frames: tuple[Frame, ...]) -> Generator[None]:
    """Gives the calling thread the stack `frames` for a block (for our threads)."""
    tokens: list[Token[tuple[Frame, ...]]] = []
    try:
        try:
            tokens.extend(map(_stack.set, (frames,)))  # in C: no signal comes between the two
            yield
        finally:
            _reset(tokens)
    finally:
        _reset(tokens)


def _reset(tokens: Sequence[Token[tuple[Frame, ...]]]) -> None:
    for token in tokens:
        # Refused in the context of another thread or task, and the second time.
        with contextlib.suppress(ValueError, RuntimeError):
            _stack.reset(token)


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
def without_observer() -> Generator[None]:
    """Tells nobody of a block: a trace for shapes proves nothing that counts."""
    if observer() is None:
        yield
        return
    with with_frame(dataclasses.replace(current(), observer=MUTED)):
        yield


def replica_axis(topology: Topology) -> str:
    """Returns the name of the replica axis of `topology` in the code that runs now."""
    return current().axis_name or topology.axis_name


# -- who may ------------------------------------------------------------------


def in_replica_context() -> bool:
    """Returns whether code runs as one replica (the default context counts)."""
    return current().replica_context is not None


def require_cross_replica(strategy: StrategyLike, method: str) -> None:
    """Raises unless `strategy.<method>` may be called here.

    Legal in the default context and in cross-replica context of `strategy`.
    """
    frame = current()
    if frame.allows_both or (frame.replica_context is None and frame.strategy is strategy):
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
            f"strategy.{method}(...), args=(x,)); {_in_replica(method)}",
        )
    )


def _in_replica(method: str) -> str:
    """Returns what a replica calls in place of `method`."""
    if method == "gather":
        return "for all replicas' values: ctx.all_gather(x, axis) (ReplicaContext.all_gather)"
    return "for a reduction: ctx.all_reduce(op, x)"


def require_enterable(strategy: StrategyLike, method: str) -> None:
    """Raises unless `strategy.<method>` may make `strategy` active here.

    Legal in cross-replica context of `strategy` and wherever no strategy is
    active, functions that the default strategy runs among them.
    """
    if current().has_strategy:
        require_cross_replica(strategy, method)


def mixing_text(strategy: StrategyLike, frame: Frame, what: str) -> str:
    """Returns the text for a call of one strategy in the context of another."""
    return message(
        f"{what} of {strategy!r} needs this strategy, or none, to be active",
        got=frame.name,
        why="Mixing different tf.distribute.Strategy objects is not possible, nor is mixing "
        "distjax's: their replicas and variables live in different ways",
        fix=f"leave the context of {frame.strategy!r} first, or use one strategy throughout",
    )
