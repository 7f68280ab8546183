"""A linen classifier with batch norm, trained by a step in the form of `pmap` code."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale, train_state
from jax import lax


class Net(nn.Module):
    """Linear, batch norm, linear (a convolution only compiles longer)."""

    axis_name: Any = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8, use_bias=False)(x.reshape(x.shape[0], -1))
        x = nn.BatchNorm(not train, axis_name=self.axis_name, momentum=0.9)(x)
        return nn.Dense(10)(nn.relu(x))


class State(train_state.TrainState):
    """A TrainState with batch statistics and a loss scale."""

    batch_stats: Any
    dynamic_scale: Any


def make_state(axis_name=None, scaled=True):
    net = Net(axis_name)
    variables = net.init(jax.random.key(0), jnp.ones((1, 6, 6, 1)), train=False)
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, 0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
        dynamic_scale=dynamic_scale.DynamicScale() if scaled else None,
    )


def train_step(state, batch, axis_name="batch"):
    """One step of one replica, as written for `jax.pmap(axis_name="batch")`."""
    mean = functools.partial(lax.pmean, axis_name=axis_name) if axis_name else lambda x: x

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (new, logits)

    scale = state.dynamic_scale
    if scale:
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True, axis_name=axis_name)
        scale, is_finite, aux, grads = grad_fn(state.params)
    else:
        aux, grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads, is_finite = mean(grads), True
    new, logits = aux[1]
    metrics = mean({"loss": aux[0], "accuracy": (logits.argmax(-1) == batch["label"]).mean()})
    changed = state.apply_gradients(
        grads=grads, batch_stats=new["batch_stats"], dynamic_scale=scale
    )
    keep = lambda new, old: jax.tree.map(functools.partial(jnp.where, is_finite), new, old)
    return changed.replace(
        params=keep(changed.params, state.params),
        opt_state=keep(changed.opt_state, state.opt_state),
    ), metrics
