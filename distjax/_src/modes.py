"""Enums: how replicas' values are combined, and when copies are synchronized."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the replicas' values are combined: their sum or their mean.

    Source: tf.distribute.ReduceOp.
    """

    SUM = "SUM"
    MEAN = "MEAN"


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    AUTO means ON_WRITE. NONE is rejected under a strategy.

    Source: tf.VariableSynchronization.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How values written to a variable by several replicas are combined.

    Source: tf.VariableAggregation.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
