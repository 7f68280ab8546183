"""A custom strategy: replicas train independently, and are averaged every few steps.

In synchronous training the replicas average their gradients at each step. In local SGD each replica
trains its own model for `local_steps` steps, then the models are averaged: 1 / local_steps of
the communication, and a slightly different curve.

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019.
"""

from collections.abc import Sequence
from typing import Any

import jax

import distjax as dj
from distjax.parts import MirroredPlacement, mesh_topology

ON_READ, MEAN = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.MEAN


class LocalSGDExtended(dj.StrategyExtended):
    """Gives each trainable variable a component per replica, averaged when it is read."""

    def create_variable(self, initial_value: Any, **options: Any) -> dj.Variable:
        """A variable with the modes requested, unless it is trainable."""
        if options["trainable"] is not False:
            options.update(modes=(ON_READ, MEAN), trainable=True)
        return super().create_variable(initial_value, **options)


class LocalSGDStrategy(dj.Strategy):
    """A replica per device, each with a copy of the model that it trains on its own.

    In a replica function a trained variable is the replica's own copy, and writing it moves nothing
    between devices. In cross-replica context its value is the mean of the copies.

    Args:
        local_steps: Steps that replicas train independently between two averages.
        devices: The devices, one for each replica; all local ones by default.
    """

    def __init__(self, local_steps: int, devices: Sequence[jax.Device] | None = None):
        topology = mesh_topology(devices or jax.local_devices(), dj.REPLICA_AXIS)
        super().__init__(LocalSGDExtended(topology, MirroredPlacement(topology)))
        self.local_steps = local_steps

    def average(self, variables: Sequence[dj.Variable]) -> None:
        """In cross-replica context: every copy of each variable becomes the mean of its copies."""
        for variable in variables:
            variable.assign(variable.value)  # reads the mean, writes it to every copy
