"""What a compiled program costs, as far as the compiler can tell."""

import math
from typing import Any, NamedTuple

import jax

from distjax.testing.hlo import CollectiveCount, count_collectives


class ProgramCost(NamedTuple):
    """The static costs of one compiled program, on one device.

    Attributes:
      collectives: By kind, how many and the bytes of their results.
      flops: Floating point operations.
      temp_bytes: Scratch memory.
      donated_bytes: Outputs that reuse the memory of inputs.
    """

    collectives: dict[str, CollectiveCount]
    flops: float
    temp_bytes: int
    donated_bytes: int


def program_cost(compiled: jax.stages.Compiled) -> ProgramCost:
    """The costs of a compiled program."""
    memory: Any = compiled.memory_analysis()
    costs: Any = compiled.cost_analysis()
    return ProgramCost(
        count_collectives(compiled.as_text()),
        float(costs.get("flops", 0.0)),
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
    )


def ratio(ours: float, baseline: float) -> float:
    """``ours / baseline``; 1 if both are zero.

    Example:
      >>> ratio(3, 2), ratio(0, 0), ratio(1, 0)
      (1.5, 1.0, inf)
    """
    if baseline:
        return ours / baseline
    return math.inf if ours else 1.0
