"""Mixed precision: computing in a short float type while variables stay in float32."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.flax.object_types import is_object
from distjax.flax.plans import raw_value
from distjax.typing import DTypeLike, PyTree

T = TypeVar("T")


def cast(tree: T, dtype: DTypeLike) -> T:
    """Returns `tree` with its floating-point arrays cast to `dtype`.

    A module becomes a view of it: parameters are cast copies, while every other variable
    (batch statistics, random streams) is shared with the original. A `dj.Variable` becomes its
    value. Gradients with respect to the original module have the dtype of its parameters.

    Args:
      tree: a module, arrays, variables, or a tree of these.
      dtype: e.g. `jnp.bfloat16`.

    What the view gains (a new attribute, the first `sow` of a name) the original does not have.

    Locality: that of `tree`. Context: any; for gradients, inside the loss function.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     model, x = dj.flax.cast((model, x), jnp.bfloat16)
      ...     return model(x).astype(jnp.float32).mean()
      >>> grads = nnx.grad(loss_fn)(model, jnp.ones((4, 2)))
      >>> grads["kernel"][...].dtype
      dtype('float32')
    """
    return jax.tree.map(lambda x: _cast(x, dtype), tree, is_leaf=is_object)


def _cast(value: PyTree, dtype: DTypeLike) -> Any:
    if not is_object(value):
        return jnp.asarray(value).astype(dtype) if _is_floating(value) else value
    graphdef, flat = nnx.graph.flatten(value, graph=True)
    leaves = [
        jax.tree.map(lambda x: _cast(x, dtype), raw_value(v)) if isinstance(v, nnx.Param) else v
        for v in flat.leaves
    ]
    return nnx.graph.unflatten(graphdef, leaves)


def _is_floating(value: PyTree) -> bool:
    return hasattr(value, "dtype") and bool(jnp.issubdtype(value.dtype, jnp.floating))
