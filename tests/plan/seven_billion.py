"""A plan's target: a decoder-only transformer of 7 billion parameters, of which none is ever made.

python -m distjax plan tests/plan/seven_billion.py:target --topology v5p:4x8x8 --model-axes model=8
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import distjax as dj

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, TOKENS = 32, 4096, 11008, 32, 32000, 512
#: Of all layers together, [layers, in, out].
SHAPES = {
    "qkv": (LAYERS, WIDTH, 3 * WIDTH),
    "out": (LAYERS, WIDTH, WIDTH),
    "gate": (LAYERS, WIDTH, HIDDEN),
    "widen": (LAYERS, WIDTH, HIDDEN),
    "narrow": (LAYERS, HIDDEN, WIDTH),
}
#: Over which of their axes the devices of a replica split them, if it has several.
SPLIT = {"embed": 0, "head": 1, "qkv": 2, "out": 1, "gate": 2, "widen": 2, "narrow": 1}
NUM_PARAMETERS = sum(map(np.prod, SHAPES.values())) + 2 * VOCABULARY * WIDTH


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def layer(x, weights):
    """`[B, T, width]` of `[B, T, width]`, and None: a step of a scan over layers."""
    w = jax.tree.map(lambda each: each.astype(jnp.bfloat16), weights)
    q, k, v = jnp.split((normalized(x) @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["out"]
    y = normalized(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["widen"])) @ w["narrow"], None


def loss_fn(params, tokens):
    x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (normalized(x) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def target(strategy):
    def variable(name, shape):
        axes = [None] * SPLIT[name] + ["model"]
        spec = P(*axes) if "model" in strategy.mesh.axis_names else None
        return dj.Variable(lambda: jnp.zeros(shape), name=name, sharding=spec)

    with strategy.scope():
        params = {
            "embed": variable("embed", (VOCABULARY, WIDTH)),
            "head": variable("head", (WIDTH, VOCABULARY)),
            "layers": {name: variable(name, shape) for name, shape in SHAPES.items()},
        }
    optimizer = dj.optim.Optimizer(optax.adam(1e-4), reduce_op="mean")
    optimizer.init(params)

    def step(tokens):
        values = jax.tree.map(lambda v: v.value, params)
        loss, grads = jax.value_and_grad(loss_fn)(values, tokens)
        optimizer.apply_gradients([(grads, params)])
        return loss

    rows = jax.ShapeDtypeStruct((strategy.num_replicas_in_sync, TOKENS + 1), jnp.int32)
    return lambda tokens: strategy.run(step, args=(tokens,)), (dj.plan.batch(rows),)
