"""A GPT of Equinox, whose heads and hidden units are split over a mesh axis beside the batch's.

After the form of `midGPT` of Allan Zhou (`src/train.py`, `src/model.py`, `src/layers.py`: layers
stacked and scanned, gradients accumulated in a scan over micro-batches) and of Equinox's
`examples/parallelism.ipynb` (`eqx.filter_shard` and a step that donates all). Theirs split weights
as the batch, or not at all; here columns and rows are split over an axis of their own.
"""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@dataclasses.dataclass(frozen=True)
class Config:
    block_size: int = 8
    vocab_size: int = 32
    n_layer: int = 4
    n_head: int = 2
    n_embd: int = 16
    batch_size: int = 16  # of all devices
    g_accum_iters: int = 2
    learning_rate: float = 1e-2
    weight_decay: float = 1e-4
    warmup_steps: int = 2
    max_steps: int = 20


class Linear(eqx.Module):
    weight: jax.Array

    def __init__(self, in_features, out_features, key):
        shape = (out_features, in_features)
        self.weight = jax.random.truncated_normal(key, -2, 2, shape) / math.sqrt(in_features)

    def __call__(self, x):
        return self.weight @ x


def rms_norm(x, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), keepdims=True) + eps)


class MLP(eqx.Module):
    c_fc: Linear
    c_proj: Linear

    def __init__(self, n_embd, key):
        key1, key2 = jax.random.split(key)
        self.c_fc = Linear(n_embd, 4 * n_embd, key1)
        self.c_proj = Linear(4 * n_embd, n_embd, key2)

    def __call__(self, x):
        return self.c_proj(jax.nn.gelu(self.c_fc(x)))


class CausalSelfAttention(eqx.Module):
    c_attn: Linear
    c_proj: Linear
    n_head: int

    def __init__(self, n_embd, n_head, key):
        key1, key2 = jax.random.split(key)
        self.n_head = n_head
        self.c_attn = Linear(n_embd, 3 * n_embd, key1)
        self.c_proj = Linear(n_embd, n_embd, key2)

    def __call__(self, x):
        length, width = x.shape
        heads = lambda x: jnp.reshape(x, (length, self.n_head, -1)).transpose(1, 0, 2)
        q, k, v = map(heads, jnp.split(jax.vmap(self.c_attn)(x), 3, axis=-1))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(width // self.n_head)
        scores = jnp.where(jnp.tril(jnp.ones((1, length, length))) == 0, -jnp.inf, scores)
        out = (jax.nn.softmax(scores, axis=-1) @ v).transpose(1, 0, 2).reshape(length, width)
        return jax.vmap(self.c_proj)(out)


class Block(eqx.Module):
    attn: CausalSelfAttention
    mlp: MLP

    def __init__(self, n_embd, n_head, key):
        key1, key2 = jax.random.split(key)
        self.attn = CausalSelfAttention(n_embd, n_head, key1)
        self.mlp = MLP(n_embd, key2)

    def __call__(self, x):
        x = x + self.attn(jax.vmap(rms_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(rms_norm)(x))


class GPT(eqx.Module):
    wte: jax.Array
    blocks: Block
    lm_head: Linear

    def __init__(self, config, key):
        block_key, wte_key, head_key = jax.random.split(key, 3)
        make_block = lambda key: Block(config.n_embd, config.n_head, key)
        self.blocks = eqx.filter_vmap(make_block)(jax.random.split(block_key, config.n_layer))
        self.wte = jax.random.normal(wte_key, (config.vocab_size, config.n_embd))
        self.lm_head = Linear(config.n_embd, config.vocab_size, head_key)

    def __call__(self, tokens):
        dynamic_blocks, static_blocks = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def block_fn(x, block):
            return eqx.combine(block, static_blocks)(x), None

        x, _ = jax.lax.scan(block_fn, jnp.take(self.wte, tokens, axis=0), dynamic_blocks)
        return jax.vmap(self.lm_head)(jax.vmap(rms_norm)(x))


def shardings(model):
    def sharding(path, x):
        name = jax.tree_util.keystr(path)
        is_first = "c_attn" in name or "c_fc" in name or "lm_head" in name
        spec = P("model", None) if is_first else P(None, "model") if "c_proj" in name else P()
        return NamedSharding(mesh, P(None, *spec) if "blocks" in name else spec)

    return jax.tree_util.tree_map_with_path(sharding, eqx.filter(model, eqx.is_array))


def loss_fn(params, static, x, y):
    logits = jax.vmap(eqx.combine(params, static))(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make_step(config, optimizer):
    @functools.partial(eqx.filter_jit, donate="all")
    def step(model, opt_state, x, y):
        params, static = eqx.partition(model, eqx.is_array)

        def microstep(grad_so_far, xy):
            loss, grad = jax.value_and_grad(loss_fn)(params, static, *xy)
            return jax.tree.map(jnp.add, grad, grad_so_far), loss

        grad, losses = jax.lax.scan(microstep, jax.tree.map(jnp.zeros_like, params), (x, y))
        grad = jax.tree.map(lambda g: g / config.g_accum_iters, grad)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        params = eqx.filter_shard(optax.apply_updates(params, updates), shardings(params))
        model = eqx.combine(params, static)
        return model, opt_state, jnp.mean(losses)

    return step


def batches(config, num_steps):
    random = np.random.default_rng(0)
    data = random.integers(0, config.vocab_size, 1000).astype(np.int32)
    for _ in range(num_steps):
        shape = (config.g_accum_iters, config.batch_size, 1)
        ix = random.integers(0, len(data) - config.block_size, shape)
        ix = ix + np.arange(config.block_size)
        yield data[ix], data[ix + 1]


def main(num_steps):
    config = Config()
    schedule = optax.warmup_cosine_decay_schedule(
        0, config.learning_rate, config.warmup_steps, config.max_steps
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(config.weight_decay / config.learning_rate),
        optax.scale_by_schedule(schedule),
        optax.scale(-1),
    )
    model = GPT(config, jax.random.key(0))
    model = eqx.filter_shard(model, shardings(model))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    step = make_step(config, optimizer)
    data_sharding = NamedSharding(mesh, P(None, "data"))
    losses = []
    for x, y in batches(config, num_steps):
        x, y = jax.device_put((x, y), data_sharding)
        model, opt_state, loss = step(model, opt_state, x, y)
        losses.append(loss)
    return (
        (losses, jax.tree.leaves(eqx.filter(model, eqx.is_array))),
        step,
        (model, opt_state, x, y),
    )
