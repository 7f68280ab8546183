"""Finds the line of user code that an operation comes from.

Many operations are staged from distjax's own files. The user's line is that of the innermost
frame of the call stack that is in user code.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from distjax.user_lines import SourceFrame, find_line

#: Stands for the line of a library's operation in an unobserved merge, as in a cut for servers.
IN_A_MERGE = "a merge function"

#: The frames that separate the merge function's stack from that of the program's caller.
_MERGE_BOUNDARIES = (
    "UserMerge.emit",
    "UserMerge._trace.<locals>.traced",
    "call_as_reduction.<locals>.call",
)
_SCOPE = re.compile(r"distjax_merge_(\d+)")


def merge_scope(index: int) -> str:
    """Returns the name under which the operations of merge `index` are staged."""
    return f"distjax_merge_{index}"


def user_line(frames: Sequence[SourceFrame], names: str, merge_lines: Sequence[str]) -> str | None:
    """Returns "file:line (function)" of the user's innermost frame, or None.

    If the merge function belongs to a library, the line is that of the `merge_call`.

    Args:
      frames: the call stack, innermost first.
      names: the scopes that the operation was staged in, "a/b/c".
      merge_lines: for each emitted merge, the line of its `merge_call`.
    """
    own = list(itertools.takewhile(lambda f: not f.function.endswith(_MERGE_BOUNDARIES), frames))
    if len(own) == len(frames):
        return find_line(own)
    scopes = _SCOPE.findall(names)
    return find_line(own, merge_lines[int(scopes[-1])] if scopes else None) or IN_A_MERGE
