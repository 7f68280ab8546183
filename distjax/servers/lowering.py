"""Lowers the programs of a worker with several devices, to show what these exchange."""

from __future__ import annotations

import jax

from distjax import user_mesh
from distjax.placement.topology import Topology
from distjax.servers.placing import outs_of, sharding_of, struct_of
from distjax.servers.plan import Plan
from distjax.servers.programs import Programs


@user_mesh.ignores_user_mesh
def lower_parts(plan: Plan, home: Topology) -> list[jax.stages.Lowered]:
    """Returns a worker's programs, lowered for its devices; none for a worker with one device."""
    programs, lowered = Programs(), []
    for stage in plan.stages if home.mesh is not None else ():
        operands = [
            struct_of(aval, sharding_of(slot, plan, home))
            for slot, aval in zip(stage.operands, stage.program.avals, strict=True)
        ]
        traced = programs.trace(stage.program, operands, outs=outs_of(stage, plan, home))
        lowered.append(traced.lower())
    return lowered
