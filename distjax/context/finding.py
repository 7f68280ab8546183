"""Finding: something about a step that is probably wrong."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about a step that is probably wrong.

    Attributes:
      level: "error", "warning" or "note".
      rule: the kind of mistake, in a few words.
      text: what was expected and found, why it matters, and the fix.
      source: the user's line, "file:line (function)".
      expected: the reason given through `dj.expect`, or None.
    """

    level: str
    rule: str
    text: str
    source: str
    expected: str | None = None
