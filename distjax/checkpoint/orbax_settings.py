"""Settings for orbax: participating processes, the form of arrays, retries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from distjax.cluster.job import job

_NUM_LOOKS = 5
T = TypeVar("T")


def multiprocessing_options(alone: bool) -> ocp.options.MultiprocessingOptions:
    """Returns options that say who takes part: the whole job, or this process alone."""
    if job() is None or not alone:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


def retry_look(look: Callable[[], T]) -> T:
    """Returns ``look()``, retried if another process removes a step meanwhile."""
    for _ in range(_NUM_LOOKS - 1):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return look()
    return look()


def restore_args(sharding: Sharding | None) -> ocp.RestoreArgs:
    """Returns how to read an array: laid out on devices, or (None) to host memory."""
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)
