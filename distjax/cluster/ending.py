"""How a process of a job ends: with a code that says why, and never long after the others.

At its exit JAX waits for all processes, and aborts (134) where one does not come: the code that
Python had for the end is lost, and the others sit in a collective meanwhile. So an exception that
nobody catches ends the process at once, after it is printed; and at the end of the program the
processes meet once more, in a wait of ours that ends before JAX's. In IPython and at Python's
prompt an exception ends nothing, and nothing here does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import re
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

import jax

from distjax import jax_compat
from distjax.cluster.job import Job, job
from distjax.errors import (
    AgreementError,
    ClusterError,
    PeerLostError,
    PreemptedError,
    StuckError,
    message,
)

UNCAUGHT, PEER_LOST = 70, 71

#: The code of an exception that nobody catches; the first row that holds it.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (AgreementError, 77),
    (PeerLostError, PEER_LOST),
    (PreemptedError, 75),
    (StuckError, 76),
    (ClusterError, 78),
    (KeyboardInterrupt, 130),
)

#: What JAX's errors say when another process is gone: gloo's sockets, NCCL, the coordinator.
#: They begin with a status; a read of a value raises them as ValueError.
_GONE = re.compile(
    r"[A-Z_]+: .*(gloo|connection (closed|reset|refused)|socket closed|broken pipe"
    r"|coordination service|remote process exited)",
    re.IGNORECASE | re.DOTALL,
)

#: The part of `shutdown_timeout` that the last meeting waits: JAX's own wait would abort.
_SHARE = 0.8


def exit_code(error: BaseException) -> int:
    """Returns the code with which a process of a job ends after `error`."""
    cause: BaseException | None = error
    while cause is not None:
        is_jax = isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        if is_jax and _GONE.match(str(cause)):
            return PEER_LOST
        cause = cause.__cause__
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNCAUGHT)


def end_at_once(code: int) -> NoReturn:
    """Ends this process, without the callbacks of `atexit`, after what it said is written."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with contextlib.suppress(Exception):  # an output that is closed must not change the code
            flush()
    os._exit(code)


def is_interactive() -> bool:
    """Returns whether somebody sits at a prompt, where an exception ends nothing."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


class _Ending:
    """What this module puts in the place of Python's hooks, once in a process.

    Attributes:
      pid: the process that did it; its forked children end as they like.
      code: what `sys.exit` was last asked to end with.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.code = 0
        self._former_hook, sys.excepthook = sys.excepthook, self._end_after
        self._former_thread_hook = threading.excepthook
        threading.excepthook = self._end_after_thread

    def meet_at_exit(self) -> None:
        """Has the end of the program be a meeting; once, when the job is joined."""
        self._exit, sys.exit = sys.exit, self._remember_and_exit
        atexit.register(self._meet)

    def _end_after(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Stands for `sys.excepthook`."""
        try:
            self._former_hook(kind, error, traceback)
        finally:
            self._end(error)

    def _end_after_thread(self, args: Any) -> None:
        """Stands for `threading.excepthook`."""
        try:
            self._former_thread_hook(args)
        finally:
            if not issubclass(args.exc_type, SystemExit):  # the end of a thread, no more
                self._end(args.exc_value or args.exc_type())

    def _end(self, error: BaseException) -> None:
        is_ours = job() is not None or isinstance(error, ClusterError)
        if is_ours and os.getpid() == self.pid and not is_interactive():
            end_at_once(exit_code(error))

    def _remember_and_exit(self, status: Any = None, /) -> NoReturn:
        """Stands for `sys.exit`: Python tells nobody else with what code it ends."""
        self.code = status if isinstance(status, int) else int(status is not None)
        self._exit(status)

    def _meet(self) -> None:
        """Returns when all processes have come to their end; else ends this one."""
        joined = job()
        if joined is None or jax_compat.coordination_client() is None:
            return  # the user has left it, by jax.distributed.shutdown()
        if os.getpid() != self.pid or is_interactive():
            return
        text = _wait_for_all(joined)
        if text is not None:
            print(text, file=sys.stderr)
            end_at_once(self.code or PEER_LOST)


def _wait_for_all(joined: Job) -> str | None:
    """Returns None when all processes have come to their end, else what to say."""
    seconds = _SHARE * joined.timeouts.shutdown
    try:
        joined.client.key_value_set(f"distjax/end/{joined.process_id}", "", allow_overwrite=True)
        joined.client.wait_at_barrier("distjax/end", math.ceil(seconds * 1000))
        return None
    except jax.errors.JaxRuntimeError:
        missing = _find_missing(joined)
    return message(
        f"the end of {joined.name_process(joined.process_id)} needs to be that of all processes",
        got=f"no end of {', '.join(missing) or 'others'} within {seconds:g} s",
        why="they were lost, or do more than this one: the job has not ended as it should",
        fix="look for the first error of those; if they only take longer at the end: "
        "dj.initialize(..., shutdown_timeout=300)",
    )


def _find_missing(joined: Job) -> list[str]:
    try:
        ended = {
            key.rpartition("/")[2] for key, _ in joined.client.key_value_dir_get("distjax/end")
        }
    except jax.errors.JaxRuntimeError:  # the coordinator is gone
        ended = {str(i) for i in range(1, joined.num_processes)}
    return [joined.name_process(i) for i in range(joined.num_processes) if str(i) not in ended]


_endings: list[_Ending] = []


def watch_the_end() -> _Ending:
    """Puts our hooks in the place of Python's, once, and returns them."""
    if not _endings:
        _endings.append(_Ending())
    return _endings[0]
