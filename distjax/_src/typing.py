"""Public enums, and types of the arguments that users pass in, each declared once."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax.typing


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


# -- types of arguments --------------------------------------------------------


#: An array, a NumPy array or a number: whatever JAX accepts as an array.
ArrayLike: TypeAlias = jax.typing.ArrayLike

#: A dtype, its name, or a scalar type such as `jnp.float32`.
DTypeLike: TypeAlias = jax.typing.DTypeLike

#: Any user value: an array, a `PerReplica`, a variable, a number, another Python object, or
#: a container of these that JAX can flatten. Python's type system has no narrower type for it.
PyTree: TypeAlias = Any

#: The positional arguments of a call: a tuple or list.
PositionalArgs: TypeAlias = tuple[PyTree, ...] | list[PyTree]

#: The keyword arguments of a call; None means there are none.
KeywordArgs: TypeAlias = dict[str, PyTree] | None

#: How the replicas' values are combined: a ReduceOp, its name in any case, or
#: VariableAggregation.SUM or MEAN, as accepted by TF 1.12 and 1.13.
ReduceOpLike: TypeAlias = ReduceOp | VariableAggregation | str

#: Axes of each replica's value to reduce over as well; None reduces over the replicas only.
AxisLike: TypeAlias = int | tuple[int, ...] | list[int] | None

#: A variable's synchronization and aggregation, with AUTO resolved.
VariableModes: TypeAlias = tuple[VariableSynchronization, VariableAggregation]

#: A source of input: an iterable or a sequence of pytrees.
DatasetLike: TypeAlias = Iterable[PyTree]
