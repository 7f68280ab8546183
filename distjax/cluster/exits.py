"""The codes with which a process ends, and the one way that keeps them."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
from typing import NoReturn

import jax

from distjax.errors import (
    AgreementError,
    ClusterError,
    PeerLostError,
    PreemptedError,
    StuckError,
)

UNCAUGHT, PEER_LOST, STUCK, DIFFERENT = 70, 71, 76, 77

#: The code of an exception that nobody catches; the first row that holds it.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (AgreementError, DIFFERENT),
    (PeerLostError, PEER_LOST),
    (PreemptedError, 75),
    (StuckError, STUCK),
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
    flush_outputs()
    os._exit(code)


def flush_outputs() -> None:
    """Writes what this process said."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with contextlib.suppress(Exception):  # an output that is closed must not change the code
            flush()


def print_stacks() -> None:
    """Prints the stack of every thread of this process."""
    flush_outputs()
    try:
        faulthandler.dump_traceback(sys.stderr)
    except (AttributeError, OSError, ValueError):  # what stands in its place is no file
        faulthandler.dump_traceback(2)


def is_interactive() -> bool:
    """Returns whether somebody sits at a prompt, where an exception ends nothing."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)
