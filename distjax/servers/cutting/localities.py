"""Which values of a step differ per replica of a worker, and how programs hold them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distjax import inner_traces, jax_compat
from distjax.context import frames
from distjax.jax_compat import Jaxpr, Literal, ShapedArray, Var
from distjax.placement.topology import Topology
from distjax.replica.emit import JaxprEmitter
from distjax.replica.global_value import GlobalValue, as_user_value
from distjax.servers.cutting.code import aval_of_atom
from distjax.variables.state import find_variables


@dataclass(frozen=True)
class Localities:
    """How the values of a trace are held: as one array, with a row per replica if they may differ.

    Attributes:
      topology: the replicas of a worker.
      varying: the names of the values that may differ; with one replica, none.
    """

    topology: Topology
    varying: frozenset[Any]

    def aval(self, name: Var) -> ShapedArray:
        """Returns shape and dtype of the array that holds a value."""
        aval = aval_of_atom(name)
        if name not in self.varying:
            return aval
        shape = (self.topology.num_replicas, *aval.shape)
        return ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)

    def value(self, name: Hashable, array: jax.Array) -> GlobalValue:
        """Returns the array that holds a value as a `GlobalValue`, varying or not."""
        return GlobalValue(array, not isinstance(name, Literal) and name in self.varying)

    def array(self, value: GlobalValue) -> Any:
        """Returns the array that holds a value."""
        is_one = self.topology.num_replicas == 1
        return as_user_value(value, self.topology) if is_one else jnp.asarray(value.array)


def find_localities(
    jaxpr: Jaxpr, consts: Sequence[Any], args_varying: Sequence[bool], topology: Topology
) -> Localities:
    """Returns the localities of all values of a replica trace.

    Emits the trace abstractly, as other strategies do, and keeps which values the emitter proved
    equal.

    Args:
      jaxpr: the jaxpr of the trace.
      consts: the values of its constants.
      args_varying: for each argument, whether it has a row for each replica.
      topology: the replicas of a worker.
    """
    if topology.num_replicas == 1:
        return Localities(topology, frozenset())
    given = Localities(
        topology, frozenset(v for v, t in zip(jaxpr.invars, args_varying, strict=True) if t)
    )
    ins = [*jaxpr.invars, *find_variables(jaxpr)]
    atoms = (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars)
    names = list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))
    everything = jax_compat.new_jaxpr(jaxpr, (), jaxpr.invars, names, jaxpr.eqns)
    found: list[GlobalValue] = []

    def run(*arrays: jax.Array) -> list[Any]:
        values = [given.value(v, x) for v, x in zip(ins, arrays, strict=True)]
        known = dict(zip(ins, values, strict=True))
        known.update((v, given.value(v, c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        args = values[: len(jaxpr.invars)]
        found[:] = JaxprEmitter(topology).emit(everything, (), args, known)
        return [value.array for value in found]

    with frames.without_observer():
        inner_traces.trace_jaxpr(run, list(map(given.aval, ins)))
    return Localities(
        topology, frozenset(v for v, x in zip(names, found, strict=True) if x.varying)
    )
