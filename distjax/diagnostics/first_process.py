"""Work that only the first process of a job does, for all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import jax

from distjax.typing import PyTree


def is_first_process() -> bool:
    """Returns whether this process writes summaries and shows progress."""
    return jax.process_index() == 0


def progress(iterable: Iterable[Any], **options: PyTree) -> Iterable[Any]:
    """Returns `iterable` with a progress bar on the first process.

    The bar is tqdm's. Without tqdm, and on other processes, returns `iterable` unchanged.

    Args:
      iterable: what the loop iterates over.
      **options: tqdm's options, such as `desc`, `total`, `disable`.

    Example:
      >>> sum(dj.diagnostics.progress(range(4), disable=True))
      6
    """
    if importlib.util.find_spec("tqdm") is None or not is_first_process():
        return iterable
    from tqdm.auto import tqdm

    return tqdm(iterable, **options)
