"""The ledger of a process: which programs over several processes it has launched, in order.

Programs that are compiled need no meeting, so processes may launch them in another order, or one of
them once too often. That shows at their next meeting (a new shape, a save, an element of a dataset,
the end of the program), where ledgers are compared first.
"""

from __future__ import annotations

import collections
import zlib

_NUM_SHOWN = 4


class _Ledger:
    def __init__(self) -> None:
        self.count = self.checksum = 0
        self.latest: collections.deque[str] = collections.deque(maxlen=_NUM_SHOWN)


_ledger = _Ledger()


def record_launch(name: str) -> None:
    """Notes that a program over several processes is about to run.

    Args:
      name: the user's name of the function, or that of an operation.
    """
    _ledger.count += 1
    _ledger.checksum = zlib.crc32(name.encode(), _ledger.checksum)
    _ledger.latest.append(name)


def describe_launches() -> str:
    """Returns the number of launches, the latest of them and a checksum of all, in one line."""
    latest = ", ".join(_ledger.latest) or "none"
    return f"{_ledger.count} launches, the latest {latest} (checksum {_ledger.checksum:08x})"
