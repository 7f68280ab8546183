"""A decoder of NNX whose parameters are split by FSDP and tensor parallelism.

After the form of Flax's `examples/gemma` (`train.py`, `utils.py`, `transformer.py`, `modules.py`
and `layers.py` of 2025): axis rules, a state made in `jit`, and shardings given to `jit`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("data", "fsdp", "tensor"))
data_sharding = NamedSharding(mesh, P(("data", "fsdp")))


@dataclasses.dataclass(frozen=True)
class MeshRules:
    embed: str | None = None
    mlp: str | None = None
    kv: str | None = None
    vocab: str | None = None

    def __call__(self, *keys):
        return tuple(key and getattr(self, key) for key in keys)


axis_rules = MeshRules(embed="fsdp", mlp="tensor", kv="tensor", vocab="tensor")


@dataclasses.dataclass(frozen=True)
class Config:
    num_layers: int = 2
    num_embed: int = 64
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    sliding_window: int = 4
    learning_rate: float = 0.01
    warmup_steps: int = 2
    weight_decay: float = 0.1


normal = nnx.initializers.normal(0.2)


def param(rngs, shape, *axes, init=normal):
    return nnx.Param(init(rngs.params(), shape), out_sharding=axis_rules(*axes))


class RMSNorm(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.scale = param(rngs, (dim,), "embed", init=nnx.initializers.zeros_init())

    def __call__(self, x):
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x * (1 + self.scale)


class Embedder(nnx.Module):
    def __init__(self, vocab_size, embed_dim, *, rngs):
        self.input_embedding = param(rngs, (vocab_size, embed_dim), "vocab", "embed")

    def encode(self, x):
        x = self.input_embedding[x]
        return x * jnp.sqrt(x.shape[-1]).astype(x.dtype)

    def decode(self, x):
        return jnp.dot(x, self.input_embedding.T)


def apply_rope(x, positions):
    fraction = 2 * jnp.arange(0, x.shape[-1] // 2) / x.shape[-1]
    angles = positions[..., None, None] / 10_000.0**fraction
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, config, sliding, *, rngs):
        n, k, d, h = config.num_heads, config.num_kv_heads, config.embed_dim, config.head_dim
        self.q_einsum = param(rngs, (n, d, h), None, "embed", "kv")
        self.kv_einsum = param(rngs, (2, k, d, h), None, None, "embed", "kv")
        self.attn_vec_einsum = param(rngs, (n, h, d), None, "kv", "embed")
        self.groups, self.window = n // k, config.sliding_window if sliding else None

    def __call__(self, x, positions, mask):
        query = jnp.einsum("BTD,NDH->BTNH", x, self.q_einsum[...])
        key, value = jnp.einsum("BSD,CKDH->CBSKH", x, self.kv_einsum[...])
        query = apply_rope(query, positions) * query.shape[-1] ** -0.5
        key = apply_rope(key, positions)
        b, t, n, h = query.shape
        query = query.reshape(b, t, n // self.groups, self.groups, h)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", query, key)
        if self.window is not None:
            mask = mask & jnp.triu(jnp.ones_like(mask), 1 - self.window)
        logits = jnp.where(mask[:, :, None, None, :], logits, -2.3819763e38)
        probs = jax.nn.softmax(logits, axis=-1)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probs, value).reshape(b, t, n, h)
        return jnp.einsum("BTNH,NHD->BTD", encoded, self.attn_vec_einsum[...])


class FeedForward(nnx.Module):
    def __init__(self, features, hidden_dim, *, rngs):
        self.gate_proj = param(rngs, (features, hidden_dim), "embed", "mlp")
        self.up_proj = param(rngs, (features, hidden_dim), "embed", "mlp")
        self.down_proj = param(rngs, (hidden_dim, features), "mlp", "embed")

    def __call__(self, x):
        return (nnx.gelu(x @ self.gate_proj) * (x @ self.up_proj)) @ self.down_proj


class Block(nnx.Module):
    def __init__(self, config, sliding, *, rngs):
        self.pre_attention_norm = RMSNorm(config.embed_dim, rngs=rngs)
        self.attn = Attention(config, sliding, rngs=rngs)
        self.pre_ffw_norm = RMSNorm(config.embed_dim, rngs=rngs)
        self.mlp = FeedForward(config.embed_dim, config.hidden_dim, rngs=rngs)

    def __call__(self, x, positions, mask):
        x = x + self.attn(self.pre_attention_norm(x), positions, mask)
        return x + self.mlp(self.pre_ffw_norm(x))


class Transformer(nnx.Module):
    def __init__(self, config, *, rngs):
        self.embedder = Embedder(config.num_embed, config.embed_dim, rngs=rngs)
        self.layers = nnx.List(
            Block(config, sliding=i % 2 == 0, rngs=rngs) for i in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.embed_dim, rngs=rngs)

    def __call__(self, tokens, positions, mask):
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.embedder.decode(self.final_norm(x))


class TrainState(train_state.TrainState):
    graphdef: nnx.GraphDef


def create_learning_rate_schedule(learning_rate, warmup_steps):
    def rsqrt(count):
        return learning_rate * (count + warmup_steps) ** -0.5 * warmup_steps**0.5

    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, rsqrt], [warmup_steps])


def compute_weighted_cross_entropy(logits, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum(), weights.sum()


def compute_metrics(logits, targets, weights):
    loss, denominator = compute_weighted_cross_entropy(logits, targets, weights)
    hits = (jnp.equal(jnp.argmax(logits, axis=-1), targets) * weights).sum()
    return {"loss": loss, "accuracy": hits, "denominator": denominator}


def train_step(state, batch):
    inputs, targets = batch["inputs"], batch["targets"]
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
    length = inputs.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool)) & (inputs > 0)[:, None, :]
    positions = jnp.broadcast_to(jnp.arange(length), inputs.shape)

    def loss_fn(params):
        logits = nnx.merge(state.graphdef, params)(inputs, positions, mask)
        loss, weight_sum = compute_weighted_cross_entropy(logits, targets, weights)
        return loss / weight_sum, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, compute_metrics(logits, targets, weights)


def setup_initial_state(config, tx):
    @jax.jit
    def sharded_init():
        model = Transformer(config, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model, nnx.Param)
        state = TrainState.create(apply_fn=None, params=params, tx=tx, graphdef=graphdef)
        state = jax.tree.map(jnp.asarray, state)
        return jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))

    with jax.set_mesh(mesh):
        state = sharded_init()
    return state, nnx.get_named_sharding(state, mesh)


def batches(config, num_steps, rows=16, length=8):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        tokens = random.integers(1, config.num_embed, (rows, length + 1)).astype(np.int32)
        tokens[rows // 2 :, length // 2 :] = 0  # short ones
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(num_steps):
    config = Config()
    learning_rate_fn = create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    tx = optax.adamw(learning_rate_fn, b1=0.9, b2=0.98, weight_decay=config.weight_decay)
    state, state_sharding = setup_initial_state(config, tx)
    step = jax.jit(
        train_step,
        in_shardings=(state_sharding, data_sharding),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
    history = []
    for batch in batches(config, num_steps):
        batch = jax.device_put(batch, data_sharding)
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    return (history, nnx.to_pure_dict(state.params)), step, (state, batch)
