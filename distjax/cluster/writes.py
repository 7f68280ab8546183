"""Eager writes of host values, which each process of a job makes to its own part."""

from __future__ import annotations

import zlib

from distjax.cluster.facts import describe_on_host
from distjax.cluster.job import job
from distjax.cluster.ledger import ledger
from distjax.typing import PyTree


def record_write(name: str, value: PyTree) -> None:
    """Records a write of a value that must be the same on every process, if there are several.

    Nothing is exchanged: see `Ledger`. Of an array that spans processes only shape and dtype
    count, since each process has a part of it.

    Args:
      name: what is written, in the user's words.
      value: an array or number.
    """
    if job() is not None:
        ledger.add_write(name, zlib.crc32(describe_on_host(value).encode()))
