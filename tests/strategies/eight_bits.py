"""An optimizer whose state is narrower than its parameters, in blocks of its own."""

import jax
import jax.numpy as jnp
import optax


def eight_bit_adam(rate=0.05, block=16):
    """Adam whose first moment is int8 with a scale per block, the second bfloat16."""

    def encoded(x):
        flat = jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
        scale = jnp.max(jnp.abs(flat), axis=1, keepdims=True) / 127 + 1e-12
        numbers = jnp.round(flat / scale).astype(jnp.int8).reshape(-1)[: x.size].reshape(x.shape)
        return numbers, scale

    def decoded(numbers, scale):
        flat = jnp.pad(numbers.reshape(-1), (0, -numbers.size % block)).reshape(-1, block)
        return (flat * scale).reshape(-1)[: numbers.size].reshape(numbers.shape)

    def init(params):
        first = jax.tree.map(lambda p: encoded(jnp.zeros_like(p)), params)
        return {
            "numbers": jax.tree.map(lambda p, e: e[0], params, first),
            "scales": jax.tree.map(lambda p, e: e[1], params, first),
            "second": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), params),
        }

    def update(grads, state, params=None):
        first = jax.tree.map(
            lambda g, n, s: 0.9 * decoded(n, s) + 0.1 * g, grads, state["numbers"], state["scales"]
        )
        second = jax.tree.map(lambda g, v: 0.99 * v + 0.01 * g**2, grads, state["second"])
        updates = jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + 1e-3), first, second)
        pairs = jax.tree.map(encoded, first)
        new = {
            "numbers": jax.tree.map(lambda g, e: e[0], grads, pairs),
            "scales": jax.tree.map(lambda g, e: e[1], grads, pairs),
            "second": jax.tree.map(lambda v: v.astype(jnp.bfloat16), second),
        }
        return updates, new

    return optax.GradientTransformation(init, update)
