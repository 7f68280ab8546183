"""Two alternatives timed side by side.

A shared machine drifts by more than the differences looked for here. So the
alternatives take turns in batches, each batch of one is compared with its
neighbor of the other, and what is reported is the median over these pairs.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

Call = Callable[[], Any]
_T = TypeVar("_T")
_UNTIMED_CALLS = 3


class Medians(NamedTuple):
    """Medians over pairs of neighboring batches.

    Attributes:
      ours_seconds: Of our batches.
      baseline_seconds: Of the batches compared with.
      ratio: Of ours / baseline, pair by pair.
    """

    ours_seconds: float
    baseline_seconds: float
    ratio: float


def interleave(
    ours: Callable[[], _T], baseline: Callable[[], _T], num_pairs: int
) -> list[tuple[_T, _T]]:
    """Runs two timed batches in turns.

    Args:
      ours: Runs one batch and returns what it measured.
      baseline: The same for what we compare with.
      num_pairs: How often each runs, an even number: who goes first alternates.

    Returns:
      Pairs `(ours, baseline)` of neighboring batches.
    """
    pairs = []
    for _ in range(num_pairs // 2):
        first, second = _clean(ours), _clean(baseline)
        pairs.append((first, second))
        second, first = _clean(baseline), _clean(ours)
        pairs.append((first, second))
    return pairs


def _clean(batch: Callable[[], _T]) -> _T:
    # Otherwise the first batch of a pair would pay for the garbage of the batch before it.
    gc.collect()
    return batch()


def medians(pairs: list[tuple[float, float]]) -> Medians:
    """The medians over pairs of seconds.

    Example:
      >>> medians([(2.0, 1.0), (3.0, 2.0), (9.0, 3.0)])
      Medians(ours_seconds=3.0, baseline_seconds=2.0, ratio=2.0)
    """
    return Medians(
        statistics.median(ours for ours, _ in pairs),
        statistics.median(baseline for _, baseline in pairs),
        statistics.median(ours / baseline for ours, baseline in pairs),
    )


def dispatch_seconds(call: Call, num_calls: int, at_once: int | None = None) -> float:
    """The time until the last of several calls returns, per call.

    Results are awaited only while the clock is stopped. A few calls come before it
    starts, to refill caches that the other side has evicted.

    Args:
      call: Does one step.
      num_calls: The number of steps.
      at_once: After how many calls a result is awaited; None: after the last. Some 30
        programs with collectives in flight hang JAX 0.10 and 0.11 on several CPU devices.
    """
    for _ in range(_UNTIMED_CALLS):
        call()
    seconds, left = 0.0, num_calls
    while left > 0:
        count = min(at_once or left, left)
        result = None
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        seconds += time.perf_counter() - start
        jax.block_until_ready(result)
        left -= count
    return seconds / num_calls


def loop_seconds(call: Call, num_calls: int, await_every: int | None = None) -> float:
    """The time until the last of several results is ready, per call.

    Args:
      call: Does one step.
      num_calls: The number of steps.
      await_every: After how many steps a result is awaited; None: only at the end.
    """
    result = None
    start = time.perf_counter()
    for index in range(num_calls):
        result = call()
        if await_every is not None and index % await_every == await_every - 1:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / num_calls


def carry(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> Call:
    """A call without arguments that threads the state from step to step.

    Args:
      step: From `(state, batch)` to `(state, result)`; may donate the state.
      state: The first state.
      batch: The batch of every step.

    Returns:
      A function that takes one step and returns its result.
    """

    def call() -> Any:
        nonlocal state
        state, result = step(state, batch)
        return result

    return call
