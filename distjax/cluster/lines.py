"""JSON lines that processes send each other: bounded in size, never executed."""

from __future__ import annotations

import json
from typing import Any


def as_line(content: dict[str, Any]) -> str:
    """Returns `content` as a line."""
    return json.dumps(content) + "\n"


def parse_line(line: str | bytes) -> dict[str, Any]:
    """Returns the content of a line; empty if it is not a JSON object."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def as_plain(text: object, max_length: int = 64) -> str:
    """Returns foreign text made printable: no control characters, truncated."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))
    return plain if len(plain) <= max_length else plain[: max_length - 3] + "..."
