"""Worker: a worker of a coordinator, as its board sees it."""

from __future__ import annotations

import dataclasses
import weakref

from distjax.servers.elements import PerWorkerSource


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker of a coordinator.

    Attributes:
      number: its id.
      num_closures: how many it has completed.
      num_restarts: how often it was lost.
      is_removed: whether it may take no more.
      has_ended: whether its thread has ended.
      is_drawing: whether it may be drawing elements for its closure.
      ended: the data sources that have no more values for it.
    """

    number: int
    num_closures: int = 0
    num_restarts: int = 0
    is_removed: bool = False
    has_ended: bool = False
    is_drawing: bool = False
    ended: weakref.WeakSet[PerWorkerSource] = dataclasses.field(default_factory=weakref.WeakSet)
