"""The state of NNX objects, saved before a trace and restored after it.

Flax lets an object change only in the trace that it was made in. `__setstate__`, which `pickle`
uses, sets a variable's value, metadata and mark of the trace without that check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from distjax.flax import strategy_of
from distjax.typing import PyTree


class SavedState:
    """A snapshot of the current state of objects.

    Args:
      nodes: modules; their attributes are saved, and the strategy that they were placed for.
      variables: their variables; their values, metadata and trace marks are saved.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[nnx.Variable[Any]]):
        self._attributes = [(vars(node), dict(vars(node))) for node in nodes]
        self._strategies = strategy_of.records(nodes)
        # Restoring by assignment would fail Flax's check of the trace.
        self._states = [(v, v.__getstate__()) for v in variables]

    def restore(self) -> None:
        """Restores everything; idempotent, so that it can be retried after a signal."""
        for variable, state in self._states:
            variable.__setstate__(state)
        for attributes, before in self._attributes:
            for name in [*attributes]:
                if name not in before:
                    del attributes[name]
            attributes.update(before)
        strategy_of.put_back(self._strategies)


def set_in_trace(variable: nnx.Variable[Any], value: PyTree, metadata: dict[str, Any]) -> None:
    """Gives `variable` a value and metadata, and makes it part of the current trace."""
    variable.__setstate__(type(variable).from_metadata(value, metadata).__getstate__())
