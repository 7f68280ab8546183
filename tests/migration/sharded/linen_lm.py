"""A language model of linen whose weights have logical axes, split by rules.

After the form of Flax's `examples/lm1b` (`train.py`, `models.py` and `utils.py` of 2023 to 2024):
a state made in `jit` with shardings from logical rules, unboxed, and donated to each step.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
data_sharding = NamedSharding(mesh, P("data"))
logical_axis_rules = (
    ("activation_batch", "data"),
    ("embed", None),
    ("mlp", "tensor"),
    ("kv", "tensor"),
    ("vocab", "tensor"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 32
    emb_dim: int = 16
    num_heads: int = 4
    num_layers: int = 1
    mlp_dim: int = 32
    max_len: int = 8
    batch_size: int = 16
    learning_rate: float = 0.01
    warmup_steps: int = 2
    weight_decay: float = 0.1
    label_smoothing: float = 0.1


xavier = nn.initializers.xavier_uniform()
split = nn.with_logical_partitioning


def layer_norm(name=None):
    scale = split(nn.initializers.ones, ("embed",))
    return nn.LayerNorm(bias_init=split(nn.initializers.zeros, ("embed",)), scale_init=scale)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs, mask):
        config = self.config
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            kernel_init=split(xavier, ("embed", "kv")),
            use_bias=False,
        )(layer_norm()(inputs), mask=mask)
        x = x + inputs
        z = nn.Dense(
            config.mlp_dim,
            kernel_init=split(xavier, ("embed", "mlp")),
            bias_init=split(nn.initializers.normal(1e-6), ("mlp",)),
        )(layer_norm()(x))
        z = nn.Dense(
            config.emb_dim,
            kernel_init=split(xavier, ("mlp", "embed")),
            bias_init=split(nn.initializers.normal(1e-6), ("embed",)),
        )(nn.relu(z))
        return x + z


class TransformerLM(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs)
        )
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        embedding = split(nn.initializers.normal(1.0), ("vocab", "embed"))
        x = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=embedding)(shifted)
        x = nn.with_logical_constraint(x, ("activation_batch", None, "embed"))
        for _ in range(config.num_layers):
            x = Block(config)(x, mask)
        x = layer_norm()(x)
        return nn.Dense(
            config.vocab_size,
            kernel_init=split(xavier, ("embed", "vocab")),
            bias_init=split(nn.initializers.normal(1e-6), ("vocab",)),
        )(x)


def compute_weighted_cross_entropy(logits, targets, weights, label_smoothing):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, labels)
    return (losses * weights).sum(), weights.sum()


def compute_metrics(logits, labels, weights, label_smoothing):
    loss, weight_sum = compute_weighted_cross_entropy(logits, labels, weights, label_smoothing)
    hits = (jnp.equal(jnp.argmax(logits, axis=-1), labels) * weights).sum()
    return {"loss": loss, "accuracy": hits, "denominator": weight_sum}


def train_step(state, batch, label_smoothing):
    inputs = batch["inputs"]
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, inputs)
        loss, weight_sum = compute_weighted_cross_entropy(logits, inputs, weights, label_smoothing)
        return loss / weight_sum, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state, compute_metrics(logits, inputs, weights, label_smoothing)


def setup_initial_state(model, tx, config, rng):
    def init_train_state(rng):
        inputs = jnp.ones((config.batch_size, config.max_len), jnp.int32)
        params = model.init(rng, inputs)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    logical = nn.get_partition_spec(jax.eval_shape(init_train_state, rng))
    state_sharding = nn.logical_to_mesh_sharding(logical, mesh, logical_axis_rules)
    with jax.set_mesh(mesh), nn.logical_axis_rules(logical_axis_rules):
        state = jax.jit(init_train_state, out_shardings=state_sharding)(rng)
    return nn.meta.unbox(state), state_sharding


def batches(config, num_steps):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        inputs = random.integers(1, config.vocab_size, (config.batch_size, config.max_len))
        inputs[: config.batch_size // 2, config.max_len // 2 :] = 0  # short ones
        yield {"inputs": inputs.astype(np.int32)}


def main(num_steps):
    config = Config()
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps),
            lambda count: config.learning_rate * (1 + count / config.warmup_steps) ** -0.5,
        ],
        [config.warmup_steps],
    )
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=config.weight_decay)
    model = TransformerLM(config)
    state, state_sharding = setup_initial_state(model, tx, config, jax.random.key(0))
    step = jax.jit(
        functools.partial(train_step, label_smoothing=config.label_smoothing),
        in_shardings=(state_sharding, data_sharding),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
    history = []
    with jax.set_mesh(mesh), nn.logical_axis_rules(logical_axis_rules):
        for batch in batches(config, num_steps):
            state, metrics = step(state, jax.device_put(batch, data_sharding))
            history.append(jax.device_get(metrics))
    return (history, state.params), step, (state, jax.device_put(batch, data_sharding))
