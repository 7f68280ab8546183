"""What each synchronization x aggregation pair allows, as a table."""

from __future__ import annotations

import dataclasses
import enum

import jax.numpy as jnp

from distjax._src.typing import (
    DTypeLike,
    VariableAggregation,
    VariableModes,
    VariableSynchronization,
)
from distjax.errors import message, require


class Combine(enum.Enum):
    """How several replicas' values combine, or how one value applies to all copies.

    SUM and MEAN are those of `ReduceOp`, by name; for others `ops.combine` has a branch each.
    """

    REFUSE = "refuse"
    SUM = "sum"
    MEAN = "mean"
    FIRST = "first"
    EACH = "each copy on its own"
    SPLIT = "divided among the copies"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a variable does when it is read and written.

    Attributes:
      stacked: whether storage is [R, ...], one component per replica, rather than one value.
      replica_write: how values written by replicas are combined.
      cross_read: how components become the value of a cross-replica read.
      cross_assign: how one value assigned in cross-replica context is applied.
      cross_add: the same for assign_add and assign_sub.
      merges: whether the combined value is written by a `merge_call`, which applies it where
        the variable lives, to the value it has at that moment.
    """

    stacked: bool
    replica_write: Combine
    cross_read: Combine
    cross_assign: Combine
    cross_add: Combine
    merges: bool = False


#: What errors suggest beside SUM.
OTHER_AGGREGATIONS = "(or MEAN, ONLY_FIRST_REPLICA)"

_W, _R = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ
_A, _C = VariableAggregation, Combine

#: From tf.distribute (TF 1.13 and 2.21), with decisions 9 to 12 of `docs/decisions.md`.
POLICIES: dict[VariableModes, Policy] = {
    (_W, _A.NONE): Policy(False, _C.REFUSE, _C.EACH, _C.EACH, _C.EACH),
    (_W, _A.SUM): Policy(False, _C.SUM, _C.EACH, _C.EACH, _C.EACH),
    (_W, _A.MEAN): Policy(False, _C.MEAN, _C.EACH, _C.EACH, _C.EACH),
    (_W, _A.ONLY_FIRST_REPLICA): Policy(False, _C.FIRST, _C.EACH, _C.EACH, _C.EACH),
    (_R, _A.NONE): Policy(True, _C.EACH, _C.REFUSE, _C.REFUSE, _C.REFUSE),
    (_R, _A.SUM): Policy(True, _C.EACH, _C.SUM, _C.SPLIT, _C.REFUSE),
    (_R, _A.MEAN): Policy(True, _C.EACH, _C.MEAN, _C.EACH, _C.EACH),
    (_R, _A.ONLY_FIRST_REPLICA): Policy(True, _C.EACH, _C.FIRST, _C.EACH, _C.EACH),
}

#: One copy on one device: synchronization and aggregation have no effect.
PLAIN = Policy(False, _C.EACH, _C.EACH, _C.EACH, _C.EACH)


def resolve_modes(synchronization: object, aggregation: object, name: str) -> VariableModes:
    """Returns a new variable's two modes with AUTO resolved, or raises ValueError."""
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            message(
                f"Invalid variable synchronization mode: {synchronization} for variable: {name}",
                got=repr(synchronization),
                why="it says when the copies of the variable are synchronized",
                fix="synchronization=dj.VariableSynchronization.ON_READ (or ON_WRITE, AUTO)",
            )
        )
    if aggregation is None:
        aggregation = VariableAggregation.NONE
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            message(
                f"Invalid variable aggregation mode: {aggregation} for variable: {name}",
                got=repr(aggregation),
                why="it says how values of several replicas combine",
                fix="aggregation=dj.VariableAggregation.SUM (or MEAN, ONLY_FIRST_REPLICA, NONE)",
            )
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


def policy_for(modes: VariableModes, dtype: DTypeLike, name: str) -> Policy:
    """Returns the table entry for a variable of a strategy with replicas; or raises."""
    synchronization, aggregation = modes
    require_synchronization(synchronization, name)
    require(
        not (aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact)),
        f"variable {name!r} needs a floating dtype for aggregation MEAN",
        got=f"dtype {dtype}",
        why="the mean of integers need not be an integer",
        fix="dtype=jnp.float32, or aggregation=dj.VariableAggregation.SUM",
    )
    return POLICIES[synchronization, aggregation]


def require_synchronization(synchronization: VariableSynchronization, name: str) -> None:
    """Raises a ValueError for synchronization NONE."""
    require(
        synchronization is not VariableSynchronization.NONE,
        f"`NONE` variable synchronization mode is not supported for variable {name!r}",
        got="synchronization=VariableSynchronization.NONE under a strategy",
        why="a strategy has to know when to synchronize the copies",
        fix="use ON_WRITE (mirrored) or ON_READ (one component per replica)",
    )
