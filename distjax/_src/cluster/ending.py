"""How a process of a job exits: with a code that says why, soon after the others.

At exit, JAX waits for all processes and aborts (134) if one does not arrive; Python's exit code is
then lost, and meanwhile the others hang in a collective. So an uncaught exception ends the process
at once after it is printed, and at the end of the program the processes meet once more, in a wait
that times out before JAX's does. In IPython and at Python's prompt an exception does not end the
process, and neither does anything here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import TracebackType
from typing import Any, NoReturn

from distjax._src import jax_compat
from distjax._src.cluster.job import Job, job, record_failure
from distjax._src.cluster.meeting import exchange
from distjax._src.cluster.watch import (
    DIFFERENT,
    PEER_LOST,
    Watch,
    begin_to_end,
    end_at_once,
    error_text,
    exit_code,
    is_interactive,
    leave,
    print_error,
    watch_callbacks,
)
from distjax.errors import AgreementError, ClusterError, StuckError

#: The fraction of `shutdown_timeout` for the last meeting; JAX's own wait would abort.
_SHARE = 0.8
THE_END = "the end of the program"


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
        try:
            exchange(joined, THE_END, "", _SHARE * joined.timeouts.shutdown_timeout)
        except ClusterError as error:
            if not is_interactive():
                self._end_alone(joined, error)
            print_error(error)
        # A thread that is in a call to the coordinator when Python ends aborts the process.
        self._watch.stop()

    def _end_alone(self, joined: Job, error: ClusterError) -> NoReturn:
        begin_to_end()
        print_error(error)
        others_code = DIFFERENT if isinstance(error, AgreementError) else PEER_LOST
        code = self.code or others_code  # what the program has passed to `sys.exit` is the cause
        record_failure(code, error_text(error))
        leave(joined, code, str(error), others_code)


def _end_after(error: BaseException) -> NoReturn:
    joined, code = job(), exit_code(error)
    record_failure(code, error_text(error), error)
    if joined is None:
        end_at_once(code)
    is_of_all = isinstance(error, (AgreementError, StuckError))  # all will raise it any moment
    others_code = code if is_of_all else PEER_LOST
    leave(joined, code, error_text(error), others_code, says_who=code == PEER_LOST)


_endings: list[_Ending] = []


def watch_the_end() -> _Ending:
    """Installs our exit hooks once, and returns them."""
    if not _endings:
        _endings.append(_Ending())
    return _endings[0]


# -- SIGTERM as a notice ---------------------------------------------------------
# A process that polls for it goes on to a step at which all stop. JAX's preemption service has a
# handler of SIGTERM of its own, in C++, which tells all processes of a job; a program that does not
# poll would then survive SIGTERM. So the service begins with the first poll: the first call of
# ``multihost_utils.reached_preemption_sync_point``, which orbax and other libraries call, too. In a
# program of one process a Python handler stands in for JAX's.


class Notice:
    """What JAX asks whether all processes stop at a step; its own such service begins when asked.

    From then on SIGTERM is a notice, and no longer ends the process.
    """

    def reached_sync_point(self, step: int) -> bool:
        """Returns whether all processes stop at this step; called by JAX for the first poll."""
        jax_compat.begin_preemption_service()
        return jax_compat.preemption_sync_manager().reached_sync_point(step)

    def shutdown(self) -> None:
        """Called by JAX when the process leaves its job."""


@contextlib.contextmanager
def listening() -> Generator[Any]:
    """A context in which SIGTERM is a notice; gives a function of the step: whether all stop at it.

    In a job it stays one afterwards, as in plain JAX: another process may have been told.
    """
    if isinstance(jax_compat.preemption_sync_manager(), Notice):
        jax_compat.begin_preemption_service()
    manager = jax_compat.preemption_sync_manager()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if manager is not None or job() is not None or not is_main_thread:
        yield getattr(manager, "reached_sync_point", lambda step: False)  # none: it was disabled
    else:
        told: list[int] = []
        former = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        try:
            yield lambda step: bool(told)
        finally:
            signal.signal(signal.SIGTERM, former if former is not None else signal.SIG_DFL)
