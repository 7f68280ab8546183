"""Finds the line of user code that an operation comes from.

Many operations are staged from distjax's own files. The user's line is that of the innermost
frame of the call stack that is in user code.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distjax import user_lines

UNKNOWN = "an unknown line"
#: Stands for the line of a library's operation in an unobserved merge, as in a cut for servers.
IN_A_MERGE = "a merge function"

#: The frames that separate the merge function's stack from that of the program's caller.
_MERGE_BOUNDARIES = (
    "UserMerge.emit",
    "UserMerge._trace.<locals>.traced",
    "call_as_reduction.<locals>.call",
)
_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
_SCOPE = re.compile(r"distjax_merge_(\d+)")


class SourceFrame(NamedTuple):
    """One level of a call stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def merge_scope(index: int) -> str:
    """Returns the name under which the operations of merge `index` are staged."""
    return f"distjax_merge_{index}"


def user_line(frames: Sequence[SourceFrame], names: str, merge_lines: Sequence[str]) -> str | None:
    """Returns "file:line (function)" of the user's innermost frame, or None.

    A frame in an installed package (a Flax layer) counts only if there is no other. If
    the merge function belongs to a library, the line is that of the `merge_call`.

    Args:
      frames: the call stack, innermost first.
      names: the scopes that the operation was staged in, "a/b/c".
      merge_lines: for each emitted merge, the line of its `merge_call`.
    """
    installed = None
    for frame in frames:
        if frame.function.endswith(_MERGE_BOUNDARIES):
            scopes = _SCOPE.findall(names)
            return merge_lines[int(scopes[-1])] if scopes else installed or IN_A_MERGE
        if user_lines.is_library_file(frame.file, frame.function):
            continue
        if not frame.file.startswith(_INSTALLED):
            return str(frame)
        installed = installed or str(frame)
    return installed


def calling_frames() -> Iterator[SourceFrame]:
    """Yields the call stack of the caller, innermost first."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        yield SourceFrame(code.co_qualname, code.co_filename, frame.f_lineno)
        frame = frame.f_back
