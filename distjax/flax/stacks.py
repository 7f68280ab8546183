"""A scan over a stack of layers that gathers each layer only when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from distjax.context import frames
from distjax.errors import LocalityError, UnsupportedError, message
from distjax.flax import static_attributes
from distjax.flax.plans import raw_value, write_entries
from distjax.placement.per_replica import is_per_replica
from distjax.typing import PyTree
from distjax.variables.layouts import LocalForm


def scan_layers(
    fn: Callable[[Any, Any], Any], layers: PyTree, carry: PyTree, *, checkpoint: bool = True
) -> Any:
    """Returns `carry` passed through a stack of equal layers, one after the other.

    Equivalent to ``for layer in layers: carry = fn(layer, carry)``, as one compiled loop.
    If the strategy splits the parameters, each iteration gathers those of its own layer
    only, and again in the backward pass: gathered parameters take the memory of one layer.

    Args:
      fn: takes a layer and the carry, returns the carry.
      layers: a module whose variables are stacked, [L, ...], as made by `nnx.vmap` of a
        constructor over `nnx.Rngs.split(L)`.
      carry: a tree of arrays.
      checkpoint: whether to recompute a layer in the backward pass instead of keeping its
        residuals, which include its gathered parameters.

    Locality: that of ``fn``. Context: any. Cost: an all-gather per split variable and
      layer, twice with `checkpoint`, and a reduce-scatter in the backward pass.

    Raises:
      LocalityError: a variable that holds a PerReplica.
      UnsupportedError: ``fn`` adds a variable or an attribute to the layer, or removes one.
      ValueError: variables without a common leading dimension.

    Example:
      >>> from flax import nnx
      >>> make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
      >>> layers = make(nnx.Rngs(0).split(4))
      >>> x = dj.flax.scan_layers(lambda layer, x: jnp.tanh(layer(x)), layers, jnp.ones((2, 3)))
      >>> x.shape
      (2, 3)

    Source: ZeRO stage 3 (Rajbhandari et al., 2020).
    """
    graphdef, flat = nnx.graph.flatten(layers, graph=True)
    variables = list(flat.leaves)
    values = [raw_value(v) for v in variables]
    _require_stack(layers, values)
    sources, forms = zip(*map(_slice_source, values), strict=True)
    changed: list[int] = []

    def body(carry: PyTree, slices: Sequence[Any]) -> tuple[Any, list[Any]]:
        whole = [x if f is None else f.gather(x) for x, f in zip(slices, forms, strict=True)]
        layer = nnx.graph.unflatten(graphdef, whole)
        graph_before, inner = nnx.graph.flatten(layer, graph=True)
        before = [raw_value(v) for v in inner.leaves]
        carry = fn(layer, carry)
        static_attributes.require_no_traced_values([layer])
        if nnx.graph.flatten(layer, graph=True)[0] != graph_before:
            raise UnsupportedError(_changed_graph_text(layer))
        after = [raw_value(v) for v in inner.leaves]
        changed[:] = [i for i, x in enumerate(before) if after[i] is not x]
        return carry, [after[i] for i in changed]

    if checkpoint:
        body = jax.checkpoint(body, prevent_cse=False)
    carry, ends = lax.scan(body, carry, list(sources))
    write_entries(variables, dict(zip(changed, ends, strict=True)))
    return carry


def _slice_source(value: PyTree) -> tuple[Any, LocalForm | None]:
    """Returns what to scan over, and the form of a slice that has to be gathered, or None."""
    state = frames.current().state
    held = state.shard_of(value) if state is not None else None
    if held is None:
        return value, None
    shard, form = held
    return form.unstack(shard, value.shape) or (value, None)


def _changed_graph_text(layer: PyTree) -> str:
    name = type(layer).__name__
    return message(
        f"scan_layers needs a function that keeps the variables and attributes of {name} as they "
        "are",
        got="one that adds or removes some, as the first self.sow of a name does",
        why="a scanned layer is a view of one row of the stack, which exists during its call only",
        fix="self.h = nnx.Intermediate(jnp.zeros(shape)) in __init__, and self.h[...] = x in the "
        "layer",
    )


def _require_stack(layers: PyTree, values: Sequence[Any]) -> None:
    if any(map(is_per_replica, values)):
        raise LocalityError(
            message(
                f"scan_layers needs one value of each variable of {type(layers).__name__}",
                got="a variable that holds a PerReplica, a value for each replica",
                why="a layer would be given the values of all replicas",
                fix="call it in the function given to strategy.run, where each replica has its own",
            )
        )
    lengths = {x.shape[0] if getattr(x, "ndim", 0) else None for x in values}
    if len(lengths) == 1 and None not in lengths:
        return
    raise ValueError(
        message(
            f"scan_layers needs variables of {type(layers).__name__} with one leading dimension, "
            "the number of layers",
            got=f"leading dimensions {', '.join(sorted(map(str, lengths))) or 'of no variable'}",
            why="layer i is made of element i of each variable",
            fix="layers = nnx.vmap(lambda rngs: Block(rngs=rngs))(nnx.Rngs(0).split(num_layers))",
        )
    )
