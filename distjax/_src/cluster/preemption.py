"""SIGTERM as a notice: a process that polls for it goes on to a step at which all stop.

JAX's preemption service has a handler of SIGTERM of its own, in C++, which tells all processes of a
job; a program that does not poll would then survive SIGTERM. So `hold_notice` keeps that handler
aside when a process joins, and it is put back by the first poll: by the first call of
``multihost_utils.reached_preemption_sync_point``, which orbax and other libraries call, too.
In a program of one process a Python handler stands in for JAX's.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, Protocol

from distjax._src import jax_compat
from distjax._src.cluster.job import job

#: More than a `struct sigaction` of any system has.
_ACTION_BYTES = 512


def _swap_action(new: ctypes.Array[ctypes.c_char] | None) -> ctypes.Array[ctypes.c_char]:
    """Returns what SIGTERM does, as C code sees it, after setting it to `new`, if that is given."""
    former = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), new, former)
    return former


class SyncManager(Protocol):
    """What JAX asks whether all processes stop at a step."""

    def reached_sync_point(self, step: int) -> bool: ...


class Notice:
    """JAX's sync manager, with its handler of SIGTERM kept aside up to the first poll.

    Args:
      manager: JAX's.
      action: its handler of SIGTERM.
    """

    def __init__(self, manager: SyncManager, action: ctypes.Array[ctypes.c_char]):
        self._manager, self._action = manager, [action]

    def listen(self) -> None:
        """From now on SIGTERM is a notice, and no longer ends the process."""
        if self._action:
            _swap_action(self._action.pop())

    def reached_sync_point(self, step: int) -> bool:
        """Returns whether all processes stop at this step; called by JAX for each poll."""
        self.listen()
        return self._manager.reached_sync_point(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@contextlib.contextmanager
def hold_notice() -> Generator[None]:
    """A context in which JAX joins a job; SIGTERM then does what it did before, up to a poll."""
    former = _swap_action(None)
    try:
        yield
    finally:
        action = _swap_action(former)
    manager = jax_compat.preemption_sync_manager()
    if manager is not None:
        jax_compat.set_preemption_sync_manager(Notice(manager, action))


class _Alone:
    """The notice of a program of one process."""

    def __init__(self) -> None:
        self.is_told = False

    def tell(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_told = True


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def listening() -> Generator[Any]:
    """A context in which SIGTERM is a notice; gives a function of the step: whether all stop at it.

    In a job it stays one afterwards, as in plain JAX: another process may have been told.
    """
    manager = jax_compat.preemption_sync_manager()
    if isinstance(manager, Notice):
        manager.listen()
        yield manager.reached_sync_point
    elif manager is not None or job() is not None or not _is_main_thread():
        yield getattr(manager, "reached_sync_point", lambda step: False)  # none: it was disabled
    else:
        alone = _Alone()
        former = signal.signal(signal.SIGTERM, alone.tell)
        try:
            yield lambda step: alone.is_told
        finally:
            signal.signal(signal.SIGTERM, former if former is not None else signal.SIG_DFL)
