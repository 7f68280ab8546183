"""What a process tells the launcher: lines of JSON in a file of the result directory.

A launcher sets DISTJAX_RESULT_DIR; without it nothing is written. All processes of a machine append
to one file, each line in one write, which the operating system does not mix with others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback

from distjax._src.cluster.job import as_plain, job

FILE = "events.jsonl"
_MAX_TEXT = 8000
#: The step that the loop of this process is in, as far as it says so.
_step: list[int] = []


def record(event: str, **facts: object) -> None:
    """Appends an event of this process to the result directory, if there is one.

    Args:
      event: what happened, in a word: "joined", "restored", "committed", "failed".
      **facts: what else is known, as JSON values.
    """
    directory = os.environ.get("DISTJAX_RESULT_DIR")
    if not directory:
        return
    joined, text = job(), os.environ.get("DISTJAX_PROCESS_ID", "")
    own = joined.process_id if joined is not None else int(text) if text.isdecimal() else 0
    attempt = os.environ.get("DISTJAX_ATTEMPT", "")
    with contextlib.suppress(OSError):  # a full disk must not hide what is told
        append(directory, event, int(attempt) if attempt.isdecimal() else 0, own, **facts)


def append(
    directory: str, event: str, attempt: int, process: int | None = None, **facts: object
) -> None:
    """Appends an event to the file in a directory, in one write.

    Args:
      directory: the result directory.
      event: what happened.
      attempt: in which attempt.
      process: to which process; None: to the launcher.
      **facts: more JSON values; `code` and `step` are there, too, as None if not given.
    """
    line = {"time": time.time(), "attempt": attempt, "event": event, "process": process}
    line |= {"code": None, "step": None, **facts}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.open(os.path.join(directory, FILE), flags, 0o644)
    try:
        whole = json.dumps(line).encode() + b"\n"
        written = os.write(file, whole)
        end = os.lseek(file, 0, os.SEEK_CUR)
        if written < len(whole) and os.fstat(file).st_size == end:
            os.ftruncate(file, end - written)  # the disk is full: the next line begins one
    finally:
        os.close(file)


def set_step(step: int) -> None:
    """Records the step that this process is in, for what is told when it fails."""
    _step[:] = [step]


def record_failure(code: int, text: str, error: BaseException | None = None) -> None:
    """Records why this process is about to end.

    Args:
      code: its exit code.
      text: the error's type and text.
      error: with its traceback, if it is an exception.
    """
    trace = "" if error is None else "".join(traceback.format_exception(error))
    step = _step[0] if _step else None
    told = {"error": as_plain(text, _MAX_TEXT), "traceback": trace[-_MAX_TEXT:]}
    record("failed", code=code, step=step, **told)
