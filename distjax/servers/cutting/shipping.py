"""The limit on what the programs of a plan close over, which is sent with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distjax.errors import message
from distjax.servers.cutting.code import Code
from distjax.servers.cutting.sizes import num_bytes

#: How many bytes of arrays the programs of one step may close over.
MOST_BYTES = 16 << 20


def require_small(name: str, codes: Iterable[Code]) -> None:
    """Raises a ValueError if the programs of a step hold large arrays.

    Args:
      name: the user's name of the step.
      codes: its programs.
    """
    held = {id(c): c for code in codes for c in code.consts}
    arrays: list[Any] = sorted(held.values(), key=num_bytes, reverse=True)
    total = sum(map(num_bytes, arrays))
    if total <= MOST_BYTES:
        return
    largest = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays[:3])
    raise ValueError(
        message(
            f"{name} needs to close over at most {MOST_BYTES >> 20} MiB of arrays",
            got=f"{total / (1 << 20):.1f} MiB, the largest {largest}",
            why="they are constants of its programs, which every worker and server is sent",
            fix="pass them as arguments, or make them variables: with strategy.scope(): "
            "table = dj.Variable(table)",
        )
    )
