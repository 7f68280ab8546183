"""Interrupts at chosen lines: Ctrl-C, sent by a trace function, never by a timer.

`sys.settrace` counts the lines that a call passes in the modules of interest, and sends SIGINT at
the n-th. The same n is the same line each time, so that a campaign is a loop over n. Python handles
the signal there, or where distjax lets it. From a terminal, signals come at fewer places than
lines: after calls of C, at loops and where functions begin. The garbage collector waits meanwhile:
what it runs would be counted too.

Two things are not lines to be interrupted at. When a block of `with` ends, its line is passed
once more before `__exit__` is called; CPython handles no signal there, and a lock would stay
locked for ever. And what runs in other threads: trace functions belong to one thread.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import gc
import itertools
import signal
import sys
from collections.abc import Callable, Set
from types import CodeType, FrameType
from typing import Any

#: Says of a frame whether its lines count.
Frames = Callable[[FrameType], bool]

_MAX_FAILURES = 3  # after which a campaign ends: the lines beside them mostly fail too


class Interrupt(KeyboardInterrupt):
    """Raised by the handler: one that came out of a call is told from a user's Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a call that was to be interrupted.

    Attributes:
      line: "module:number (function)" where it was interrupted; None: it ended before.
      error: what it raised, None if it returned. Without traceback, as after `except`: what the
        frames held is free.
      result: what it returned.
      num_lines: how many lines were counted until then.
    """

    line: str | None
    error: BaseException | None
    result: Any
    num_lines: int


def in_packages(*packages: str) -> Frames:
    """Returns a predicate: frames of code in these packages, and in the packages in them."""
    beginnings = tuple(f"{package}." for package in packages)

    @functools.cache
    def is_inside(module: str) -> bool:
        return module in packages or module.startswith(beginnings)

    return lambda frame: is_inside(frame.f_globals.get("__name__", ""))


def in_codes(codes: Set[CodeType]) -> Frames:
    """Returns a predicate: frames of these functions."""
    return lambda frame: frame.f_code in codes


def interrupted(
    call: Callable[[], Any],
    n: float,
    frames: Frames,
    *,
    after: Callable[[], bool] | None = None,
    after_calls: Frames | None = None,
) -> Outcome:
    """Calls ``call()`` and interrupts it at the n-th line that counts.

    Args:
      call: what is interrupted, in the main thread.
      n: which line, from 1 on; ``math.inf`` only counts.
      frames: which frames' lines count.
      after: lines count once this is true; asked before each line until it is.
      after_calls: frames in which the moment between the return of a call and the use of what
        it returned counts too. CPython handles signals there, for functions in C.
    """
    tracer = _Tracer(n, frames, after, after_calls)

    def handle(*_: object) -> None:
        raise Interrupt(tracer.line)

    former, collects = sys.gettrace(), gc.isenabled()
    handler = signal.signal(signal.SIGINT, handle)
    gc.disable()
    sys.settrace(tracer.entered)
    error = result = None
    try:
        result = call()
    except BaseException as caught:
        error = caught
    finally:
        sys.settrace(former)
        signal.signal(signal.SIGINT, handler)
        if collects:
            gc.enable()
    _drop_tracebacks(error)
    return Outcome(tracer.line, error, result, tracer.count)


def _drop_tracebacks(error: BaseException | None) -> None:
    """Lets go of the frames that an error holds, and those that it came from."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def campaign(
    make: Callable[[], tuple[Any, Callable[[], Any]]],
    check: Callable[[Any, Outcome], None],
    frames: Frames,
    *,
    limit: int,
    stride: int = 1,
    may_be_none: bool = False,
    **options: Any,
) -> None:
    """Interrupts a new call at each `stride`-th line, until one ends before its line.

    Args:
      make: returns a new case, and the call that is interrupted.
      check: called with the case and the outcome; raises if something is broken.
      frames: as in `interrupted`, which takes the `options` too.
      limit: more lines than this are an error: the campaign would be long.
      stride: how many lines further the next interrupt is.
      may_be_none: whether it is right that no line counts, say as all is in other threads.

    Raises:
      AssertionError: `check` has raised; it names the lines, `_MAX_FAILURES` at most.
    """
    failures: list[str] = []

    def is_reached(n: int) -> bool:
        case, call = make()
        outcome = interrupted(call, n, frames, **options)
        if outcome.line is None:
            return False
        try:
            check(case, outcome)
        except Exception as error:
            failures.append(f"{n}, {outcome.line}: {type(error).__name__}: {error}")
        return True

    for n in itertools.count(1, stride):
        assert n <= limit, f"more than {limit} lines: raise the stride, or the limit"
        call = functools.partial(is_reached, n)
        if not call():
            assert n > 1 or may_be_none, "no line was counted: nothing that ran fits"
            break
        if len(failures) == _MAX_FAILURES:
            break
    assert not failures, "broken by an interrupt at line " + "\n".join(failures)


class _Tracer:
    """A trace function for `sys.settrace`, and what it has seen."""

    def __init__(self, n: float, frames: Frames, after: Any, after_calls: Frames | None):
        self._n, self._frames, self._after = n, frames, after
        self._after_calls = after_calls
        self.count = 0
        self.line: str | None = None

    def entered(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._frames(frame):
            return None
        if self._after_calls is not None and self._after_calls(frame):
            frame.f_trace = self._passed  # first, or Python 3.13 reports no opcodes
            frame.f_trace_opcodes = True
        return self._passed

    def _passed(self, frame: FrameType, event: str, _: Any) -> Any:
        code, offset = frame.f_code, frame.f_lasti
        is_point = event == "line" or (event == "opcode" and offset in _returns_of_calls(code))
        if is_point and offset not in _ends_of_with(code):
            self._counted(frame)
        return self._passed

    def _counted(self, frame: FrameType) -> None:
        if self._after is not None:
            if not self._after():
                return
            self._after = None
        self.count += 1
        if self.count == self._n:
            code = frame.f_code
            module = frame.f_globals.get("__name__")
            self.line = f"{module}:{frame.f_lineno} ({code.co_qualname})"
            signal.raise_signal(signal.SIGINT)


@functools.cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Returns the offsets at which ``__exit__(None, None, None)`` of a `with` begins."""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("PRECALL", "PUSH_NULL")]
    ends = set()
    for start in range(len(steps) - 3):
        *nones, call = steps[start : start + 4]
        are_none = all(i.opname == "LOAD_CONST" and i.argval is None for i in nones)
        if are_none and call.opname == "CALL" and call.arg == 2:
            is_return = start > 0 and steps[start - 1].opname == "SWAP"  # `return` in the block
            ends.add(steps[start - is_return].offset)
    return frozenset(ends)


@functools.cache
def _returns_of_calls(code: CodeType) -> frozenset[int]:
    """Returns the offsets of the instructions behind a call."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in itertools.pairwise(steps)
        if before.opname.startswith("CALL")
    )
