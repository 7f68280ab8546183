"""Settings for orbax: participating processes, which steps to keep, the form of arrays, retries."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from distjax.cluster.job import job

_NUM_LOOKS = 5
T = TypeVar("T")
#: How good a step is, from its metrics.
Quality = Callable[[Mapping[str, float]], float]


def multiprocessing_options(alone: bool) -> ocp.options.MultiprocessingOptions:
    """Returns options that say who takes part: the whole job, or this process alone."""
    if job() is None or not alone:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


def quality_of(metric: str, mode: str) -> Quality:
    """Returns a function that is greater for better metrics; NaN is the worst.

    Args:
      metric: the name of the one that counts.
      mode: "max" or "min".
    """

    def quality(metrics: Mapping[str, float]) -> float:
        value = float(metrics.get(metric, math.nan))
        if math.isnan(value):
            return -math.inf
        return value if mode == "max" else -value

    return quality


def preservation_policy(max_to_keep: int | None, quality: Quality | None) -> Any:
    """Returns which steps are kept: the best and the latest, or without a `quality` the latest."""
    policies = ocp.checkpoint_managers
    if max_to_keep is None or quality is None:
        return policies.LatestN(max_to_keep)
    best = policies.BestN(get_metric_fn=quality, n=max_to_keep)
    return policies.AnyPreservationPolicy([policies.LatestN(1), best])


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
