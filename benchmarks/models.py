"""Three small models as pure functions, and the arithmetic of one training step.

Both sides of every comparison use exactly this code, so that any difference between
the compiled programs comes from how the step was distributed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

REPLICA_AXIS = "replica"


class State(NamedTuple):
    """What a training step carries from call to call.

    Attributes:
      params: The trained parameters.
      stats: Statistics that the forward pass updates; empty for most models.
      opt: The state of the optimizer.
    """

    params: Any
    stats: Any
    opt: Any


class Model(NamedTuple):
    """A model, the loss of one replica, and the optimizer.

    Attributes:
      name: How tables call it.
      init: From a PRNG key to `(params, stats)`.
      loss: From `(params, stats, batch)` of one replica to `(loss, stats)`.
      batch: From a number of examples to a batch of numpy arrays.
      optimizer: The optax transformation.
    """

    name: str
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    batch: Callable[[int], Any]
    optimizer: optax.GradientTransformation


def initial_state(model: Model) -> State:
    """The state before the first step, as numpy arrays."""
    params, stats = model.init(jax.random.key(0))
    state = State(params, stats, model.optimizer.init(params))
    return jax.tree.map(np.asarray, state)


def local_gradients(model: Model, state: State, batch: Any) -> tuple[Any, Any, Any]:
    """The loss, new statistics and gradients of one replica, nothing reduced."""
    evaluate = jax.value_and_grad(model.loss, has_aux=True)
    (loss, stats), grads = evaluate(state.params, state.stats, batch)
    return loss, stats, grads


def apply_gradients(model: Model, state: State, grads: Any, stats: Any) -> State:
    """The state after an optimizer step with reduced gradients."""
    updates, opt = model.optimizer.update(grads, state.opt, state.params)
    return State(optax.apply_updates(state.params, updates), stats, opt)


def mlp(width: int = 256, depth: int = 3) -> Model:
    """A multi-layer perceptron on 64 features, with momentum."""
    sizes = [64, *[width] * depth, 10]

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, len(sizes) - 1)
        shapes = zip(sizes[:-1], sizes[1:], strict=True)
        return [
            {"kernel": _kernel(k, *shape), "bias": jnp.zeros(shape[1])}
            for k, shape in zip(keys, shapes, strict=True)
        ], {}

    def loss(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, labels = batch
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        logits = x @ params[-1]["kernel"] + params[-1]["bias"]
        return _cross_entropy(logits, labels), stats

    def batch(num_examples: int) -> Any:
        return _features(num_examples, 64), _labels((num_examples,), 10)

    return Model("MLP", init, loss, batch, optax.sgd(1e-2, momentum=0.9))


class _ConvNet(nn.Module):
    """Two convolutions with batch normalization synchronized over the replicas."""

    axis_name: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            # Outside the replica axis (in `init`) Flax does not reduce.
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def cnn(axis_name: str = REPLICA_AXIS) -> Model:
    """A convolutional network with batch normalization on 8x8 images, with Adam."""
    network = _ConvNet(axis_name)

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = network.init(key, jnp.zeros((1, 8, 8, 1)))
        return variables["params"], variables["batch_stats"]

    def loss(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, "batch_stats": stats}
        logits, new = network.apply(variables, images, mutable=["batch_stats"])
        return _cross_entropy(logits, labels), new["batch_stats"]

    def batch(num_examples: int) -> Any:
        images = _features(num_examples, 8, 8, 1)
        return images, _labels((num_examples,), 10)

    return Model("CNN", init, loss, batch, optax.adam(1e-3))


def transformer(num_layers: int = 2, width: int = 64, length: int = 32) -> Model:
    """A decoder with causal attention and tied embeddings, with Adam."""
    vocabulary, num_heads = 128, 4

    def init(key: jax.Array) -> tuple[Any, Any]:
        first, second, *rest = jax.random.split(key, num_layers + 2)
        return {
            "tokens": 0.02 * jax.random.normal(first, (vocabulary, width)),
            "positions": 0.02 * jax.random.normal(second, (length, width)),
            "blocks": [_init_block(block_key, width) for block_key in rest],
            "norm": jnp.ones(width),
        }, {}

    def loss(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["tokens"][batch[:, :-1]] + params["positions"]
        for block in params["blocks"]:
            x = x + _attention(block, _rms_norm(x, block["norm1"]), num_heads)
            x = x + _feed_forward(block, _rms_norm(x, block["norm2"]))
        logits = _rms_norm(x, params["norm"]) @ params["tokens"].T
        return _cross_entropy(logits, batch[:, 1:]), stats

    def batch(num_examples: int) -> Any:
        return _labels((num_examples, length + 1), vocabulary)

    return Model("transformer", init, loss, batch, optax.adam(1e-3))


def _init_block(key: jax.Array, width: int) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 4)
    return {
        "qkv": _kernel(keys[0], width, 3 * width),
        "out": _kernel(keys[1], width, width),
        "up": _kernel(keys[2], width, 4 * width),
        "down": _kernel(keys[3], 4 * width, width),
        "norm1": jnp.ones(width),
        "norm2": jnp.ones(width),
    }


def _attention(block: dict[str, jax.Array], x: jax.Array, num_heads: int) -> jax.Array:
    qkv = x @ block["qkv"]
    heads = qkv.reshape(*x.shape[:2], 3, num_heads, -1)
    query, key, value = (heads[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(x.shape) @ block["out"]


def _feed_forward(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ block["up"]) @ block["down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def _kernel(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)


def _features(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _labels(shape: tuple[int, ...], num_classes: int) -> np.ndarray:
    labels = np.random.default_rng(1).integers(num_classes, size=shape)
    return labels.astype(np.int32)
