"""The state of NNX objects before a trace wrote to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from distjax.flax import strategy_of
from distjax.typing import PyTree


class SavedState:
    """The current state of objects, for restoring it.

    Args:
      nodes: modules, whose attributes are saved, and the strategy that they were placed for.
      variables: their variables, whose values, metadata and trace marks are saved.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[nnx.Variable[Any]]):
        self._attributes = [(vars(node), dict(vars(node))) for node in nodes]
        self._strategies = strategy_of.records(nodes)
        # As pickle does: the only way past Flax's check that the trace is the variable's own.
        self._states = [(v, v.__getstate__()) for v in variables]

    def restore(self) -> None:
        """Restores everything; idempotent, since a signal may interrupt it."""
        for variable, state in self._states:
            variable.__setstate__(state)
        for attributes, before in self._attributes:
            for name in [*attributes]:
                if name not in before:
                    del attributes[name]
            attributes.update(before)
        strategy_of.put_back(self._strategies)


def hold(variable: nnx.Variable[Any], value: PyTree, metadata: dict[str, Any]) -> None:
    """Makes `variable` part of the current trace: its value, metadata and mark."""
    variable.__setstate__(type(variable).from_metadata(value, metadata).__getstate__())
