"""What a user may hand in, as types: declared once, for every argument that takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax.typing

from distjax.modes import ReduceOp, VariableAggregation, VariableSynchronization

#: An array, a NumPy array or a number: what JAX itself takes for an array.
ArrayLike: TypeAlias = jax.typing.ArrayLike

#: A dtype, its name, or a scalar type such as `jnp.float32`.
DTypeLike: TypeAlias = jax.typing.DTypeLike

#: Any value of the user's: an array, a `PerReplica`, a variable, a number, another Python
#: object, or a container of these that JAX can take apart. Python has no type for less.
PyTree: TypeAlias = Any

#: The positional arguments of a call: a tuple or list.
PositionalArgs: TypeAlias = tuple[PyTree, ...] | list[PyTree]

#: The keyword arguments of a call; None: there are none.
KeywordArgs: TypeAlias = dict[str, PyTree] | None

#: How values of replicas combine: a ReduceOp, its name in any case, or
#: VariableAggregation.SUM or MEAN, as TF 1.12 and 1.13 take it.
ReduceOpLike: TypeAlias = ReduceOp | VariableAggregation | str

#: Axes of one replica's value to reduce over; None: of the replicas alone.
AxisLike: TypeAlias = int | tuple[int, ...] | list[int] | None

#: The two modes of a variable, AUTO resolved.
VariableModes: TypeAlias = tuple[VariableSynchronization, VariableAggregation]

#: What input is read from: an iterable of trees, or a sequence of them.
DatasetLike: TypeAlias = Iterable[PyTree]
