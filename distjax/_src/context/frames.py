"""Who is calling, and where variables' values live: the stack of frames, scopes, threads.

Frames are pushed by `scope` (cross-replica), by `run` (replica), by a merge function
(cross-replica again) and by `update`. An empty stack is the default context: the default
strategy with one replica. Each thread has its own stack, and new threads start in the
default context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import jax_compat, traces
from distjax._src.placement import PerReplica, Topology
from distjax._src.typing import (
    ArrayLike,
    AxisLike,
    DTypeLike,
    KeywordArgs,
    PositionalArgs,
    PyTree,
    ReduceOpLike,
    VariableModes,
)
from distjax.errors import ContextError, StrategyMismatchError, describe_value, message

# -- a strategy, as seen by code that gets it from the context -----------------
# The strategy interface as seen by code that gets a strategy from the context.
#
# These are Protocols because that code lies below the strategies. Floors that need more of a
# strategy declare it themselves (`ExtendedForVariables` in `variables.variable`).


#: The devices where a value is needed: those of a variable, array or PerReplica, or named
#: devices; None: all workers.
Destinations: TypeAlias = (
    "VariableLike | ArrayLike | PerReplica | jax.Device | str | Sequence[jax.Device | str] | None"
)


class StrategyLike(Protocol):
    """A strategy; see `distjax.Strategy`."""

    @property
    def extended(self) -> ExtendedLike:
        """The extended interface."""
        ...

    @property
    def num_replicas_in_sync(self) -> int: ...
    def run(
        self, fn: Callable[..., PyTree], args: PositionalArgs = (), kwargs: KeywordArgs = None
    ) -> PyTree: ...
    def reduce(
        self,
        op: ReduceOpLike,
        value: PyTree,
        axis: AxisLike = None,
        mask: PyTree = None,
    ) -> PyTree: ...


class VariableLike(Protocol):
    """A variable as the context needs it; see `distjax.Variable`."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that owns it."""
        ...


class ExtendedLike(Protocol):
    """A strategy's `extended`; see the methods of `distjax.StrategyExtended`."""

    is_default: bool
    wraps: bool
    compiles: bool

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that this extends."""
        ...

    @property
    def topology(self) -> Topology: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def axis_name(self) -> str: ...
    @property
    def public_axis_name(self) -> str | None: ...
    @property
    def worker_devices(self) -> tuple[jax.Device, ...]: ...
    def pause_writers(self) -> AbstractContextManager[None]: ...
    def place_arguments(self, tree: PyTree) -> PyTree: ...
    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> PyTree: ...
    def create_variable(
        self,
        initial_value: PyTree,
        *,
        trainable: bool | None,
        name: str,
        dtype: DTypeLike | None,
        modes: VariableModes,
        sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Any: ...


# -- the stack -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """One level of the context.

    Attributes:
      strategy: the active strategy.
      replica_context: the ReplicaContext in a replica context, else None.
      state: where variables are read and written; None: their storage.
      in_update: whether `extended.update` is running a function on components.
      formers: storage of a variable -> its array before the call that this frame is of wrote to it;
        for `variables.storage.call_or_undo`. None: nothing is to be undone.
      colocate_with: the variable that new variables are colocated with, or None.
      allows_both: whether no context was entered, so methods of either kind may be called.
      from_set_strategy: whether `set_strategy` pushed this frame.
    """

    strategy: StrategyLike
    replica_context: Any = None
    state: Any = None
    in_update: bool = False
    formers: dict[Any, Any] | None = None
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
        traces.forget_inner_traces(frame.state.trace)
    return frame


def push(frame: Frame) -> None:
    """Puts `frame` on the stack."""
    _stack.set((*_stack.get(), frame))
    traces.renew_inner_traces()


def take_out(frame: Frame) -> bool:
    """Removes `frame`, and no other, from the stack; returns whether it was there."""
    frames = _stack.get()
    rest = tuple(f for f in frames if f is not frame)
    if len(rest) == len(frames):
        return False
    _stack.set(rest)
    traces.renew_inner_traces()
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
        f"{method} needs cross-replica context",
        got=frame.name,
        why="a replica sees its own values only. Method requires being in cross-replica context",
        fix=_in_replica_fix(method),
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


# -- scopes, and the free functions that query the current context -------------


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
            push(frame)
            return self._strategy
        except BaseException:  # a signal: `with` does not exit what it has not entered
            take_out(frame)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        innermost = current()
        frame = next((f for f in reversed(stack()) if f in self._entered), None)
        if frame is not None:
            self._leave(frame)
        if frame is not innermost and kind is None:  # never mask an exception in flight
            raise ContextError(_order_text(self._strategy, None if frame is None else innermost))

    def _leave(self, frame: Frame) -> None:
        try:
            take_out(frame)
        finally:
            take_out(frame)  # a signal may have cut the first attempt short
            self._entered.remove(frame)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nobody can exit it any more: it was entered by hand, or a signal came first. (A signal
        # in `__init__` leaves no list.)
        if is_finalizing():  # Python has taken this module apart
            return
        for frame in vars(self).get("_entered", ()):
            take_out(frame)


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
    now = current()
    if strategy.extended.is_default:
        _require_nothing_to_nest(now)
        return Frame(strategy, now.replica_context, state=now.state, allows_both=True)
    require_enterable(strategy, "scope()")
    colocate_with = now.colocate_with if now.strategy is strategy else None
    return Frame(strategy, state=now.state, in_update=now.in_update, colocate_with=colocate_with)


def _require_nothing_to_nest(now: Frame) -> None:
    if not now.has_strategy:
        return
    raise StrategyMismatchError(
        "Must not nest tf.distribute.Strategy scopes: the default strategy's scope needs no "
        "other strategy to be active",
        got=now.name,
        why="inside it the default strategy would have to be active, and it is not",
        fix="`with default.scope():` outside of `with strategy.scope():`",
    )


def get_strategy() -> Any:
    """Returns the active strategy; the default strategy if there is none."""
    return current().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is active."""
    return current().has_strategy


def get_replica_context() -> Any:
    """Returns the ReplicaContext, or None in cross-replica context.

    If no strategy is active, the context of the default strategy's single replica.
    """
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Returns whether code runs once on behalf of all replicas."""
    return not in_replica_context()


def set_strategy(strategy: StrategyLike | None) -> None:
    """Makes `strategy` active from now on, replacing one set earlier.

    Args:
      strategy: the strategy; None deactivates the one set earlier.

    Raises:
      TypeError: not a strategy.
      ContextError: inside a `with strategy.scope():` block.
    """
    require_strategy(strategy, "set_strategy")
    now = stack()
    if len(now) > 1 or (now and not now[0].from_set_strategy):
        raise ContextError(
            "set_strategy Must not be called inside a `tf.distribute.Strategy` scope",
            got=current().name,
            why="the block would end under another strategy than it began",
            fix="leave the block first, or use `with strategy.scope():` alone",
        )
    if now:
        take_out(now[0])
    if strategy is not None and not strategy.extended.is_default:
        push(Frame(strategy, from_set_strategy=True))


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


# -- what another thread needs: the frames and JAX modes of this one -----------


#: The contexts of JAX modes that matter to another thread, or to another process.
_CONTEXTS: Mapping[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_default_device": jax.default_device,
}
_NAMES = tuple(_CONTEXTS)
#: Modes that change values.
_OF_VALUES = _NAMES[:5]
#: Modes that matter wherever a program runs: those that change values or check results.
_OF_PROGRAMS = _NAMES[:7]


@dataclasses.dataclass(frozen=True)
class ProgramModes:
    """JAX modes of a thread, by name, which another thread or process can enter."""

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of_this_thread(cls, names: Sequence[str] = _OF_PROGRAMS) -> ProgramModes:
        """Returns the modes in which the calling thread calls programs."""
        config: Any = jax.config  # thread-local values, unknown to pyright
        return cls(tuple((name, getattr(config, name)) for name in names))

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        """A context in which the calling thread has these modes."""
        config: Any = jax.config
        differing = [(n, value) for n, value in self.values if value != getattr(config, n)]
        with contextlib.ExitStack() as modes:
            for name, value in differing:
                modes.enter_context(_CONTEXTS[name](value))
            yield


def settings_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context factory that gives another thread this thread's context.

    That is the stack of frames and the JAX modes that change values and placement, such as
    64-bit mode, the implementation of random keys and the default device.
    """
    all_frames = stack()
    modes = ProgramModes.of_this_thread((*_OF_VALUES, "jax_default_device"))

    @contextlib.contextmanager
    def enter_settings() -> Generator[None]:
        with with_stack(all_frames), modes():
            yield

    return enter_settings
