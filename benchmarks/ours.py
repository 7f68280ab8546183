"""The same training steps with distjax: functional state, and state as variables."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import distjax as dj
from benchmarks.models import Model, State, apply_gradients, local_gradients


def per_replica(strategy: dj.MirroredStrategy, tree: Any) -> Any:
    """The tree with the leading dimension of each numpy leaf split over replicas."""
    num_replicas = strategy.num_replicas_in_sync

    def piece(context: dj.ValueContext) -> Any:
        index = context.replica_id_in_sync_group
        return jax.tree.map(lambda x: np.split(x, num_replicas)[index], tree)

    return strategy.distribute_values_from_function(piece)


def make_functional_step(
    model: Model, strategy: dj.MirroredStrategy
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """A training step from `(state, batch)` to `(state, mean loss)`.

    Args:
      model: The model to train.
      strategy: Where to train it.

    Returns:
      The step. It donates nothing; wrap it in `dj.jit(..., donate_argnums=(0,))`.
    """

    def replica_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        context = dj.get_replica_context()
        loss, stats, grads = local_gradients(model, state, batch)
        grads = context.all_reduce("mean", grads)
        loss = context.all_reduce("mean", loss)
        return apply_gradients(model, state, grads, stats), loss

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        return strategy.run(replica_step, args=(state, batch))

    return step


def make_variables(strategy: dj.MirroredStrategy, state: State) -> State:
    """The state with each leaf in a mirrored variable named by its path."""
    with strategy.scope():
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: dj.Variable(leaf, name=jax.tree_util.keystr(path)),
            state,
        )


def make_variable_step(
    model: Model, strategy: dj.MirroredStrategy, variables: State
) -> Callable[[Any], jax.Array]:
    """A training step from a batch to the mean loss that updates variables.

    Args:
      model: The model to train.
      strategy: Where to train it.
      variables: The state, as `make_variables` gives it.

    Returns:
      The step. Gradients are reduced and applied in cross-replica context.
    """
    parameters, structure = jax.tree.flatten(variables.params)

    def apply(strategy: dj.MirroredStrategy, grads: list[Any], stats: Any, loss: Any) -> jax.Array:
        pairs = list(zip(grads, parameters, strict=True))
        reduced = strategy.extended.batch_reduce_to("mean", pairs)
        grads_tree = jax.tree.unflatten(structure, reduced)
        state = apply_gradients(model, read(variables), grads_tree, stats)
        assign(variables, state)
        return strategy.reduce("mean", loss)

    def replica_step(batch: Any) -> jax.Array:
        loss, stats, grads = local_gradients(model, read(variables), batch)
        context = dj.get_replica_context()
        return context.merge_call(apply, args=(jax.tree.leaves(grads), stats, loss))

    def step(batch: Any) -> jax.Array:
        return strategy.run(replica_step, args=(batch,))

    return step


def read(variables: Any) -> Any:
    """The tree with the value of each variable that the current context sees."""
    return jax.tree.map(lambda variable: variable.value, variables)


def assign(variables: Any, values: Any) -> None:
    """Writes each value of a tree to the variable at its place."""
    leaves = zip(jax.tree.leaves(variables), jax.tree.leaves(values), strict=True)
    for variable, value in leaves:
        variable.assign(value)
