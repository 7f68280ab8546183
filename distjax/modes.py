"""The modes that a user names: how values of replicas combine, and when copies meet."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How values of replicas combine: their sum or their mean.

    Source: tf.distribute.ReduceOp.
    """

    SUM = "SUM"
    MEAN = "MEAN"


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together.

    AUTO is ON_WRITE. NONE is refused under a strategy. Source:
    tf.VariableSynchronization.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How values of replicas combine when they meet in a variable.

    Source: tf.VariableAggregation.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
