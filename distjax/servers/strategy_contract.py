"""ServerStrategy: a strategy as the coordinator sees it."""

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
    """

    engine: Engine

    @property
    def num_workers(self) -> int:
        """The initial number of workers."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of each worker."""
        ...

    def cut_step(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> tuple[Plan, Sequence[jax.Array | np.ndarray]]:
        """Returns the plan of a step, traced the first time, and its flat arguments."""
        ...
