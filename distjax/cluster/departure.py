"""How the processes of a job learn that one of them exits early, and exit too.

A process that exits early says so in the coordination service, under a single key for which a
thread of every process waits. The first one is the cause; errors that the others then run into
are not. Process 0 hosts that service, and JAX aborts the others as soon as it is gone. So all
acknowledge that they have read the key, and process 0 exits last, after a bounded wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from distjax.cluster.exits import (
    PEER_LOST,
    STUCK,
    end_at_once,
    error_text,
    exit_code,
    flush_outputs,
    is_interactive,
    print_error,
    print_stacks,
)
from distjax.cluster.job import Job
from distjax.cluster.ledger import ledger
from distjax.cluster.lines import as_line, as_plain, parse_line
from distjax.cluster.unwinding import unwinding
from distjax.errors import as_part, message

_CAUSE, _LEFT = "distjax/departure/cause", "distjax/departure/left"
#: How long a process may delay its exit for the others' sake.
_LEAVE_SECONDS = 3.0
_WATCH_SECONDS = 60.0
#: How long process 0 stays after the last acknowledgment, so that the others can exit.
_LAST_SECONDS = 0.3
#: How long this process may run its `finally` blocks once another has left; less than process 0
#: stays.
_UNWIND_SECONDS = 1.5

#: Acquired for good by the one thread that ends this process; again if that has failed half-way.
_end = threading.RLock()


def begin_to_end() -> None:
    """Returns in the first thread that wants to end the process; blocks all others."""
    _end.acquire()


def leave(
    joined: Job, code: int, text: str, others_code: int = PEER_LOST, *, is_told: bool = False
) -> NoReturn:
    """Ends this process with `code`, and the others with `others_code` and `text`.

    Call after `begin_to_end`. If another process has already left, its code and text are
    the ones that the others get. If this one ends because of it, it says so, unless `is_told`.
    """
    flush_outputs()  # once it has announced its exit, JAX may abort this process
    names_cause = code == PEER_LOST and not is_told
    args = joined, text, others_code, names_cause
    telling = threading.Thread(target=_tell, args=args, daemon=True)
    telling.start()
    telling.join(_LEAVE_SECONDS)  # an unresponsive coordinator must not block the exit
    end_at_once(code)


def _tell(joined: Job, text: str, others_code: int, names_cause: bool = False) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    own, client = joined.process_id, joined.client
    cause = {"process": own, "code": others_code, "text": as_plain(text, 2000)}
    try:
        client.key_value_set(_CAUSE, as_line(cause))
    except jax.errors.JaxRuntimeError:  # another process was first
        if names_cause:
            _print_cause(joined)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_LEFT}/{own}", "", allow_overwrite=True)
        for other in range(joined.num_processes) if own == 0 else ():
            seconds = max(deadline - time.monotonic(), 0.001)
            client.blocking_key_value_get(f"{_LEFT}/{other}", int(seconds * 1000))
        if own == 0:
            time.sleep(_LAST_SECONDS)


def _print_cause(joined: Job) -> None:
    """Prints who left first, and why: an error of gloo that this process has met does not say."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
        match parse_line(joined.client.blocking_key_value_get(_CAUSE, 1000)):
            case {"process": int(left), "text": str(text)} if left != joined.process_id:
                print_error(_lost_text(joined, joined.name_process(left), text))
            case _:
                pass  # the regular end of the program, or this process itself


def _lost_text(joined: Job, who: str, text: str) -> str:
    return message(
        f"{joined.name_process(joined.process_id)} needs all processes of its job",
        got=f"the end of {who}: {as_part(as_plain(text, 2000))}",
        why="no collective can be complete without it",
        fix="look at what that process said; start the job again",
    )


def start_watch(joined: Job, exit_status: Callable[[], int]) -> Callable[[], None]:
    """Starts a thread that waits for the departure of a process; returns its stopper.

    Args:
      joined: the job.
      exit_status: called when another process has left; returns the exit code that this process
        keeps, or 0 to take the other's.

    Returns:
      A function to call at the end of the program, when all processes have reached it.
    """
    watch = threading.Thread(
        target=_watch, args=(joined, exit_status), name="distjax-departures", daemon=True
    )
    watch.start()

    def stop() -> None:
        if joined.process_id == 0:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                joined.client.key_value_set(_CAUSE, "")
        watch.join(_LEAVE_SECONDS)

    return stop


def _watch(joined: Job, exit_status: Callable[[], int]) -> None:
    while True:
        try:
            line = joined.client.blocking_key_value_get(_CAUSE, int(_WATCH_SECONDS * 1000))
            break
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return  # the coordinator is gone, or JAX has disconnected from it
    match parse_line(line):
        case {"process": int(left), "code": int(code), "text": str(text)}:
            if left != joined.process_id:
                if code == STUCK and not is_interactive():
                    print_stacks()
                _follow(joined, exit_status() or code, joined.name_process(left), text)
        case _:
            return  # a regular end of the program


def _follow(joined: Job, code: int, who: str, text: str) -> None:
    """Ends this process because another one of its job has ended."""
    said = _lost_text(joined, who, text)
    if is_interactive():
        print_error(said)
        return
    own = unwinding.wait(ledger.count, _UNWIND_SECONDS)  # meanwhile this process may end by itself
    begin_to_end()
    if own is not None:
        print_error("".join(traceback.format_exception(own)))
        code, text = exit_code(own), error_text(own)
    print_error(said)
    leave(joined, code, text, is_told=True)
