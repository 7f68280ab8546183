"""Graph classification on one device, after the form of Flax's `examples/ogbg_molpcba`."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

NODES, EDGES, GRAPHS = 12, 20, 4  # of a padded group of graphs; the last graph is padding


class GraphsTuple(NamedTuple):
    nodes: jax.Array
    senders: jax.Array
    receivers: jax.Array
    n_node: jax.Array
    labels: jax.Array


class GraphConvNet(nn.Module):
    @nn.compact
    def __call__(self, graphs):
        x = nn.Dense(8)(graphs.nodes)
        sent = jax.ops.segment_sum(x[graphs.senders], graphs.receivers, NODES)
        x = x + nn.relu(nn.Dense(8)(sent))
        owner = jnp.repeat(jnp.arange(GRAPHS), graphs.n_node, total_repeat_length=NODES)
        return nn.Dense(2)(jax.ops.segment_sum(x, owner, GRAPHS))


def get_valid_mask(labels, graphs):
    is_graph = jnp.arange(GRAPHS) < GRAPHS - 1
    return ~jnp.isnan(labels) & is_graph[:, None]


@jax.jit
def train_step(state, graphs):
    labels = graphs.labels
    mask = get_valid_mask(labels, graphs)

    def loss_fn(params):
        logits = jax.vmap(lambda graphs: state.apply_fn(params, graphs))(graphs)
        losses = optax.sigmoid_binary_cross_entropy(logits, jnp.where(mask, labels, -1))
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    hits = jnp.sum(((logits > 0) == labels) & mask)
    return state, {"loss": loss, "hits": hits, "count": jnp.sum(mask)}


def batches(num_steps, groups=8):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        labels = random.integers(0, 2, (groups, GRAPHS, 2)).astype(np.float32)
        labels[random.random(labels.shape) < 0.3] = np.nan
        n_node = np.tile(np.array([3, 4, 2, NODES - 9], np.int32), (groups, 1))
        yield GraphsTuple(
            random.normal(size=(groups, NODES, 5)).astype(np.float32),
            random.integers(0, 9, (groups, EDGES)),
            random.integers(0, 9, (groups, EDGES)),
            n_node,
            labels,
        )


def main(num_steps):
    net = GraphConvNet()
    first = jax.tree.map(lambda x: x[0], next(batches(1)))
    params = net.init(jax.random.key(0), first)
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.01))
    history = []
    for graphs in batches(num_steps):
        state, metrics = train_step(state, graphs)
        history.append(jax.device_get(metrics))
    return history, state.params
