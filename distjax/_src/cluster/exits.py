"""How a process of a job exits: with a code that says why, once the others have heard of it.

A process that exits early says so in the coordination service, under a single key that the watch
of every process looks at. The first one is the cause; errors that the others then run into are not.
Process 0 hosts that service, and JAX aborts the others as soon as it is gone. So all acknowledge
that they have read the key, and process 0 exits last, after a bounded wait.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from typing import NamedTuple, NoReturn

import jax

from distjax._src.cluster.job import Job, as_line, as_plain, parse_line
from distjax._src.cluster.ledger import CAUSE
from distjax.errors import (
    AgreementError,
    ClusterError,
    PeerLostError,
    PreemptedError,
    StuckError,
    as_part,
    message,
)

UNCAUGHT, PEER_LOST, STUCK, DIFFERENT = 70, 71, 76, 77

#: Exit codes of uncaught exceptions; the first matching row counts.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (AgreementError, DIFFERENT),
    (PeerLostError, PEER_LOST),
    (PreemptedError, 75),
    (StuckError, STUCK),
    (ClusterError, 78),
    (KeyboardInterrupt, 130),
)

#: How the note begins by which JAX says that it has removed frames from a traceback.
_NOTE_OF_JAX = "\n--------------------\nFor simplicity, JAX "

#: JAX error messages that mean another process is gone: from gloo's sockets, NCCL, the coordinator.
#: They begin with a status; reading a value raises them as ValueError.
_GONE = re.compile(
    r"[A-Z_]+: .*(gloo|connection (closed|reset|refused)|socket closed|broken pipe"
    r"|coordination service|remote process exited)",
    re.IGNORECASE | re.DOTALL,
)


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a process of a job after `error`."""
    cause: BaseException | None = error
    while cause is not None:
        is_jax = isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        text = "".join(traceback.format_exception_only(cause))  # `str` of a user's class may raise
        if is_jax and _GONE.match(text.partition(": ")[2]):
            return PEER_LOST
        cause = cause.__cause__
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNCAUGHT)


def error_text(error: BaseException) -> str:
    """Returns an error's type and text, as the other processes are told it."""
    return "".join(traceback.format_exception_only(error)).partition(_NOTE_OF_JAX)[0].strip()


def end_at_once(code: int) -> NoReturn:
    """Ends this process without `atexit` callbacks, after flushing its outputs."""
    flush_outputs()
    os._exit(code)


def flush_outputs() -> None:
    """Flushes stdout, stderr and logging, whose handlers it closes."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with contextlib.suppress(Exception):  # a closed output must not change the exit code
            flush()


def print_error(text: object) -> None:
    """Prints to stderr; one that is closed must not keep the process from ending."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def print_stacks() -> None:
    """Prints the stack of every thread of this process, if stderr is open."""
    flush_outputs()
    for output in (sys.stderr, 2):  # the second if stderr was replaced by something not a file
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(output)
            return


def is_interactive() -> bool:
    """Returns whether this is an interactive session, which exceptions do not end."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


# -- leaving a job ---------------------------------------------------------------

_LEFT = "distjax/departure/left"
#: How long a process may delay its exit for the others' sake: they look every two seconds at least.
_LEAVE_SECONDS = 5.0
#: How long process 0 stays after the last acknowledgment, so that the others can exit.
_LAST_SECONDS = 0.3

#: Acquired for good by the one thread that ends this process; again if that has failed half-way.
_end = threading.RLock()


def begin_to_end() -> None:
    """Returns in the first thread that wants to end the process; blocks all others."""
    _end.acquire()


class Departure(NamedTuple):
    """Which process has left, the code and the text for the others."""

    process: int
    code: int
    text: str


def parse_departure(line: str) -> Departure | None:
    """Returns the departure that a line tells of, or None."""
    match parse_line(line):
        case {"process": int(process), "code": int(code), "text": str(text)}:
            return Departure(process, code, text)
        case _:
            return None


def departure_text(joined: Job, left: Departure) -> str:
    """Returns what this process says when it ends because another one has left."""
    return message(
        f"{joined.name_process(joined.process_id)} needs all processes of its job",
        got=f"the end of {joined.name_process(left.process)}: {as_part(as_plain(left.text, 2000))}",
        why="no collective can be complete without it",
        fix="look at what that process said; start the job again",
    )


def leave(
    joined: Job, code: int, text: str, others_code: int = PEER_LOST, *, says_who: bool = False
) -> NoReturn:
    """Ends this process with `code`, and the others with `others_code` and `text`.

    Call after `begin_to_end`. If another process has already left, its code and text are
    the ones that the others get; and `says_who`, this one says so.
    """
    flush_outputs()  # once it has announced its exit, JAX may abort this process
    told = joined, text, others_code, says_who
    telling = threading.Thread(target=_tell, args=told, daemon=True)
    telling.start()
    telling.join(_LEAVE_SECONDS)  # an unresponsive coordinator must not block the exit
    end_at_once(code)


def _tell(joined: Job, text: str, others_code: int, says_who: bool) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    own, client = joined.process_id, joined.client
    cause = Departure(own, others_code, as_plain(text, 2000))
    try:
        client.key_value_set(CAUSE, as_line(cause._asdict()))
    except jax.errors.JaxRuntimeError:  # another process was first
        if says_who:
            _say_who(joined)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_LEFT}/{own}", "", allow_overwrite=True)
        for other in range(joined.num_processes) if own == 0 else ():
            seconds = max(deadline - time.monotonic(), 0.001)
            client.blocking_key_value_get(f"{_LEFT}/{other}", int(seconds * 1000))
        if own == 0:
            time.sleep(_LAST_SECONDS)


def _say_who(joined: Job) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        left = parse_departure(joined.client.blocking_key_value_get(CAUSE, 1000))
        if left is not None:
            print_error(departure_text(joined, left))
