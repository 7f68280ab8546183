"""Lines of JSON that processes send each other: bounded, and never executed."""

from __future__ import annotations

import json
from typing import Any


def as_line(content: dict[str, Any]) -> str:
    """Returns `content` as a line."""
    return json.dumps(content) + "\n"


def parse_line(line: str | bytes) -> dict[str, Any]:
    """Returns what a line says; a stranger's line, which is no object, says nothing."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def as_plain(text: object, max_length: int = 64) -> str:
    """Returns a text from elsewhere as it may be printed: no control characters, no end of it."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))
    return plain if len(plain) <= max_length else plain[: max_length - 3] + "..."
