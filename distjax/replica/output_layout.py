"""Where the outputs of a program live: on the strategy's devices, as proved."""

from __future__ import annotations

from typing import Any

import jax

from distjax.collectives.constraint import constrain_to_replicas
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.typing import PyTree
from distjax.variables.variable import Variable


class AlreadyPlaced:
    """A result that is already placed; `place_output` leaves it as it is."""

    __slots__ = ("array",)

    def __init__(self, array: jax.Array):
        self.array = array


def place_output(value: PyTree, topology: Topology) -> Any:
    """Constrains a result of cross-replica code to the strategy's devices."""
    if isinstance(value, AlreadyPlaced):
        return value.array
    if isinstance(value, PerReplica):
        stacked = constrain_to_replicas(value.stacked, value.topology, varying=True)
        return PerReplica(stacked, value.topology)
    return constrain_to_replicas(value, topology, varying=False)


def to_storage(variable: Variable, value: jax.Array) -> jax.Array:
    """Returns the new value of a variable in its stored layout."""
    layout = variable.layout
    return layout.constrain(layout.to_stored(value))
