"""Image classification as the ImageNet example of Flax has it: linen, batch statistics."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import lax


class Block(nn.Module):
    features: int
    norm: Any

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(self.norm()(y))
        residual = nn.Conv(self.features, (1, 1))(x)
        return nn.relu(y + residual)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        for features in (8,):
            x = Block(features, norm)(x)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_train_state(rng):
    model = ResNet()
    variables = model.init(rng, jnp.ones((1, 8, 8, 3)))
    tx = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=tx,
    )


def compute_metrics(logits, labels):
    one_hot = common_utils.onehot(labels, 10)
    loss = jnp.mean(optax.softmax_cross_entropy(logits, one_hot))
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        one_hot = common_utils.onehot(batch["label"], 10)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, one_hot))
        decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 1e-4 * 0.5 * decay, (new, logits)

    (_, (new, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    metrics = compute_metrics(logits, batch["label"])
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return compute_metrics(state.apply_fn(variables, batch["image"], train=False), batch["label"])


def main(num_steps):
    random = np.random.default_rng(0)
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    cross_replica_mean = jax.pmap(lambda x: lax.pmean(x, "x"), "x")
    history = []
    for _ in range(num_steps):
        image = random.normal(size=(16, 8, 8, 3)).astype(np.float32)
        batch = common_utils.shard({"image": image, "label": random.integers(0, 10, 16)})
        state, metrics = p_train_step(state, batch)
        history.append(metrics)
    state = state.replace(batch_stats=cross_replica_mean(state.batch_stats))
    final = p_eval_step(state, batch)
    history = common_utils.get_metrics(history)
    return history, jax_utils.unreplicate(final), jax_utils.unreplicate(state.params)
