"""The context stack: who is calling, and where variables' values live.

Frames are pushed by `scope` (cross-replica), by `run` (replica), by a merge function
(cross-replica again) and by `update`. An empty stack is the default context: the default
strategy with one replica. Each thread has its own stack, and new threads start in the
default context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from contextvars import ContextVar, Token
from typing import Any

from distjax._src import inner_traces, jax_compat
from distjax._src.context.contracts import StrategyLike, VariableLike
from distjax.errors import ContextError, StrategyMismatchError, message


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """One level of the context.

    Attributes:
      strategy: the active strategy.
      replica_context: the ReplicaContext in a replica context, else None.
      state: where variables are read and written; None: their storage.
      in_update: whether `extended.update` is running a function on components.
      colocate_with: the variable that new variables are colocated with, or None.
      allows_both: whether no context was entered, so methods of either kind may be called.
      from_set_strategy: whether `set_strategy` pushed this frame.
    """

    strategy: StrategyLike
    replica_context: Any = None
    state: Any = None
    in_update: bool = False
    colocate_with: Any = None
    allows_both: bool = False
    from_set_strategy: bool = False

    @property
    def has_strategy(self) -> bool:
        """Whether a strategy other than the default one is active."""
        return not self.strategy.extended.is_default

    @property
    def is_replica(self) -> bool:
        """Whether code runs as one of the replicas of a non-default strategy."""
        return self.replica_context is not None and self.has_strategy

    def owns_variable(self, variable: VariableLike, *, read: bool) -> bool:
        """Returns whether code here may read, or write, `variable`.

        Any code may read the default strategy's variables, and code run by the default strategy
        may read and write all variables.
        """
        owner = variable.strategy
        if owner is self.strategy or not self.has_strategy:
            return True
        return owner.extended.is_default and (read or self.replica_context is None)

    @property
    def name(self) -> str:
        """The context's name in error texts."""
        if self.in_update:
            return f"an update function under {self.strategy!r}"
        kind = "replica" if self.replica_context is not None else "cross-replica"
        return f"{kind} context of {self.strategy!r}"


_stack: ContextVar[tuple[Frame, ...]] = ContextVar("distjax_frames", default=())
#: ``stack()`` returns all frames of this thread, outermost first; in C, as each call asks.
stack = _stack.get
#: At most one frame: that of the default strategy and its one replica.
_default_frame: list[Frame] = []


def set_default_frame(frame: Frame) -> None:
    """Sets the frame that an empty stack stands for; called once, on import."""
    _default_frame[:] = [frame]


def current() -> Frame:
    """Returns the current frame."""
    frames = _stack.get()
    if not frames:
        return _default_frame[0]
    frame = frames[-1]
    if frame.state is not None and jax_compat.current_trace() is not frame.state.trace:
        # An inner function reads state that is not part of JAX's cache key.
        inner_traces.forget_inner_traces(frame.state.trace)
    return frame


def push(frame: Frame) -> None:
    """Puts `frame` on the stack."""
    _stack.set((*_stack.get(), frame))
    inner_traces.renew_inner_traces()


def take_out(frame: Frame) -> bool:
    """Removes `frame`, and no other, from the stack; returns whether it was there."""
    frames = _stack.get()
    rest = tuple(f for f in frames if f is not frame)
    if len(rest) == len(frames):
        return False
    _stack.set(rest)
    inner_traces.renew_inner_traces()
    return True


# A signal (Ctrl-C) may raise at any line below. So a frame is pushed inside the block that removes
# it, and is removed twice: the second attempt succeeds if a signal cut the first short. Only the
# frame that was entered is removed, and only from a stack that has it: a generator suspended in a
# block may be finalized in another thread or task, or in the middle of another step.


@contextlib.contextmanager
def with_frame(frame: Frame) -> Generator[Frame]:
    """Puts `frame` on the stack for a call.

    Everything entered during the call ends with it. This guards against generators that the
    call leaves suspended inside a block: they would leave behind the state of a finished trace.
    """
    try:
        try:
            push(frame)
            yield frame
        except GeneratorExit:  # abandoned because of a signal; frames above are newer
            take_out(frame)
            raise
        finally:
            _leave(frame)
    finally:
        _leave(frame)


def _leave(frame: Frame) -> None:
    """Removes `frame` and all above it from the stack, if it is there."""
    frames = _stack.get()
    for index, each in enumerate(frames):
        if each is frame:
            _stack.set(frames[:index])
            return


@contextlib.contextmanager
def with_block(frame: Frame) -> Generator[Frame]:
    """Puts `frame` on the stack for a user's block, which a generator may suspend."""
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
    """Gives the calling thread the stack `frames` for a block; for distjax's threads."""
    tokens: list[Token[tuple[Frame, ...]]] = []
    try:
        try:
            tokens.extend(map(_stack.set, (frames,)))  # in C, so no signal comes in between
            yield
        finally:
            _reset(tokens)
    finally:
        _reset(tokens)


def _reset(tokens: Sequence[Token[tuple[Frame, ...]]]) -> None:
    for token in tokens:
        # Raises in the context of another thread or task, and the second time.
        with contextlib.suppress(ValueError, RuntimeError):
            _stack.reset(token)


# -- permissions --------------------------------------------------------------


def in_replica_context() -> bool:
    """Returns whether code runs as one replica; True in the default context."""
    return current().replica_context is not None


def require_cross_replica(strategy: StrategyLike, method: str) -> None:
    """Raises unless `strategy.<method>` may be called here.

    Allowed in the default context and in cross-replica context of `strategy`.
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
            fix=_in_replica_fix(method),
        )
    )


_OF_STRATEGY = ("reduce", "gather", "run")
_OF_EXTENDED = ("reduce_to", "batch_reduce_to", "broadcast_to", "update", "update_non_slot")


def _in_replica_fix(method: str) -> str:
    """Returns what to do where `method` was called in a replica."""
    fix = "call it outside run"
    if method in _OF_STRATEGY or method in _OF_EXTENDED:  # what a merge function may call
        owner = "strategy" if method in _OF_STRATEGY else "strategy.extended"
        fix += f", or inside ctx.merge_call(lambda strategy, x: {owner}.{method}(...), args=(x,))"
    if method == "gather":
        fix += "; for all replicas' values: ctx.all_gather(x, axis) (ReplicaContext.all_gather)"
    elif "reduce" in method:
        fix += "; for a reduction: ctx.all_reduce(op, x)"
    return fix


def require_enterable(strategy: StrategyLike, method: str) -> None:
    """Raises unless `strategy.<method>` may make `strategy` active here.

    Allowed in cross-replica context of `strategy` and wherever no strategy is active,
    including functions run by the default strategy.
    """
    if current().has_strategy:
        require_cross_replica(strategy, method)


def other_call_text(what: str) -> str:
    """Returns the error text for a replica context that is not that of the current call."""
    return message(
        f"{what} needs the context of the function that is running",
        got="a context of an earlier or outer call. Mismatching ReplicaContext",
        why="a replica context is valid only in the call that made it",
        fix="ask for it where it is used: dj.get_replica_context()",
    )


def mixing_text(strategy: StrategyLike, frame: Frame, what: str) -> str:
    """Returns the error text for calling one strategy in the context of another."""
    return message(
        f"{what} of {strategy!r} needs this strategy, or none, to be active",
        got=frame.name,
        why="Mixing different tf.distribute.Strategy objects is not possible, nor is mixing "
        "distjax's: their replicas and variables live in different ways",
        fix=f"leave the context of {frame.strategy!r} first, or use one strategy throughout",
    )
