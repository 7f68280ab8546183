"""What the coordinator asks of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from distjax.servers.engine import Engine
from distjax.servers.plan import Plan
from distjax.typing import PyTree


@runtime_checkable
class ServerStrategy(Protocol):
    """A strategy with workers and servers.

    Attributes:
      engine: runs workers and servers.
      num_workers: how many workers there are at the start.
    """

    engine: Engine

    @property
    def num_workers(self) -> int:
        """How many workers there are at the start."""
        ...

    def cut_step(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> tuple[Plan, Sequence[jax.Array | np.ndarray]]:
        """Returns the plan of a step, and its flat arguments; traces it the first time."""
        ...
