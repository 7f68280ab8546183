"""How a process of a job exits: with a code that says why, soon after the others.

At exit, JAX waits for all processes and aborts (134) if one does not arrive; Python's exit code is
then lost, and meanwhile the others hang in a collective. So an uncaught exception ends the process
at once after it is printed, and at the end of the program the processes meet once more, in a wait
that times out before JAX's does. In IPython and at Python's prompt an exception does not end the
process, and neither does anything here.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn

import jax

from distjax._src import jax_compat
from distjax._src.cluster.events import record_failure
from distjax._src.cluster.exits import (
    DIFFERENT,
    PEER_LOST,
    begin_to_end,
    end_at_once,
    error_text,
    exit_code,
    is_interactive,
    leave,
    print_error,
)
from distjax._src.cluster.job import Job, job
from distjax._src.cluster.ledger import ledger
from distjax._src.cluster.meeting import come_and_hear, require_equal, who_came
from distjax._src.cluster.watch import Watch, watch_callbacks
from distjax.errors import AgreementError, ClusterError, PeerLostError, StuckError, message

#: The fraction of `shutdown_timeout` for the last meeting; JAX's own wait would abort.
_SHARE = 0.8
_PLACE = "distjax/end"


class _Ending:
    """Replacements for Python's exit hooks, installed once per process.

    Attributes:
      pid: the process that installed them; forked children exit as usual.
      code: the exit code last passed to `sys.exit`.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.code = 0
        self._former_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._former_thread_hook = threading.excepthook
        threading.excepthook = self._on_uncaught_in_thread

    def watch(self, joined: Job) -> None:
        """Makes this process end when another does, and meet the others at its regular end."""
        self._exit, sys.exit = sys.exit, self._remember_and_exit
        watch_callbacks()
        self._watch = Watch(joined, lambda: self.code)
        self._watch.start()
        atexit.register(self._meet)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Replaces `sys.excepthook`."""
        is_end = self._is_end(error)
        if is_end:
            begin_to_end()  # before printing, which another thread's exit would cut short
        try:
            self._former_hook(kind, error, trace)
        finally:
            if is_end:
                _end_after(error)

    def _on_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        """Replaces `threading.excepthook`."""
        error = args.exc_value or args.exc_type()
        is_end = not isinstance(error, SystemExit) and self._is_end(error)  # ends only its thread
        if is_end:
            begin_to_end()
        try:
            self._former_thread_hook(args)
        finally:
            if is_end:
                _end_after(error)

    def _is_end(self, error: BaseException) -> bool:
        is_ours = job() is not None or isinstance(error, ClusterError)
        return is_ours and os.getpid() == self.pid and not is_interactive()

    def _remember_and_exit(self, status: str | int | None = None, /) -> NoReturn:
        """Replaces `sys.exit`, since Python reveals its exit code nowhere else."""
        self.code = status if isinstance(status, int) else int(status is not None)
        self._exit(status)

    def _meet(self) -> None:
        """Returns when all processes have reached their end; otherwise ends this one."""
        joined = job()
        if joined is None or jax_compat.coordination_client() is None:
            return  # the user has left the job, by jax.distributed.shutdown()
        if os.getpid() != self.pid:
            return
        error = getattr(sys, "last_value", None)  # set before the hook is called
        if error is not None and sys.excepthook != self._on_uncaught and self._is_end(error):
            begin_to_end()  # another hook, which did not call ours, has printed it
            _end_after(error)
        self._watch.come_to_the_end()
        try:
            _wait_for_all(joined)
        except ClusterError as error:
            if not is_interactive():
                self._end_alone(joined, error)
            print_error(error)
        # A thread that is in a call to the coordinator when Python ends aborts the process.
        self._watch.stop()

    def _end_alone(self, joined: Job, error: ClusterError) -> NoReturn:
        begin_to_end()
        print_error(error)
        record_failure(exit_code(error), error_text(error))
        if isinstance(error, AgreementError):
            leave(joined, DIFFERENT, str(error), DIFFERENT)  # this one may be the first
        leave(joined, self.code or PEER_LOST, "it came to its end alone")


def _end_after(error: BaseException) -> NoReturn:
    joined, code = job(), exit_code(error)
    record_failure(code, error_text(error), error)
    if joined is None:
        end_at_once(code)
    is_of_all = isinstance(error, (AgreementError, StuckError))  # all will raise it any moment
    others_code = code if is_of_all else PEER_LOST
    leave(joined, code, error_text(error), others_code, says_who=code == PEER_LOST)


def _wait_for_all(joined: Job) -> None:
    """Waits until all processes have reached the end and launched the same programs.

    A process still at slow work, such as a checkpoint, is given up to `phase_timeout` longer.

    Raises:
      PeerLostError: a process has not arrived.
      AgreementError: the processes have launched different programs.
    """
    seconds = _SHARE * joined.timeouts.shutdown
    try:
        said = come_and_hear(joined, _PLACE, ledger.describe(), seconds)
    except jax.errors.JaxRuntimeError:
        raise PeerLostError(_end_text(joined, seconds)) from None
    require_equal(joined, "what they have launched", said)


def _end_text(joined: Job, seconds: float) -> str:
    missing = _find_missing(joined)
    return message(
        f"the end of {joined.name_process(joined.process_id)} needs to be that of all processes",
        got=f"no end of {', '.join(missing) or 'others'} within {seconds:g} s",
        why="they were lost, or do more than this one: the job has not ended as it should",
        fix="look for the first error of those; if they only take longer at the end: "
        "with dj.phase('the report'): around that, or dj.initialize(..., shutdown_timeout=300)",
    )


def _find_missing(joined: Job) -> list[str]:
    try:
        ended = who_came(joined, _PLACE)
    except jax.errors.JaxRuntimeError:  # the coordinator is gone
        ended = range(1, joined.num_processes)
    return [joined.name_process(i) for i in range(joined.num_processes) if i not in ended]


_endings: list[_Ending] = []


def watch_the_end() -> _Ending:
    """Installs our exit hooks once, and returns them."""
    if not _endings:
        _endings.append(_Ending())
    return _endings[0]
