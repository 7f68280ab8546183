"""What NNX objects held before a trace wrote to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from distjax.flax import strategy_of
from distjax.typing import PyTree


class SavedState:
    """What objects hold now, to be given back to them.

    Args:
      nodes: modules, whose attributes are saved, and the strategy that they were placed for.
      variables: their variables, whose values, metadata and marks of a trace are saved.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[nnx.Variable[Any]]):
        self._attributes = [(vars(node), dict(vars(node))) for node in nodes]
        self._strategies = strategy_of.records(nodes)
        # As pickle does: the one way past Flax's check that the trace is the variable's own.
        self._states = [(v, v.__getstate__()) for v in variables]

    def restore(self) -> None:
        """Gives everything back; where a signal raised in it, it is called once more."""
        for variable, state in self._states:
            variable.__setstate__(state)
        for attributes, before in self._attributes:
            for name in [*attributes]:
                if name not in before:
                    del attributes[name]
            attributes.update(before)
        strategy_of.put_back(self._strategies)


def hold(variable: nnx.Variable[Any], value: PyTree, metadata: dict[str, Any]) -> None:
    """Makes `variable` one of the trace under way: its value, metadata and mark."""
    variable.__setstate__(type(variable).from_metadata(value, metadata).__getstate__())
