"""A decoder-only transformer in Flax NNX. It knows nothing of replicas."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import text

#: What the devices of one replica split, by path, where the strategy has an axis "model": whole
#: heads of the attention, and the columns and rows between which a dense layer is wide.
SPLIT = {
    r"attention\.(query|key|value)\.kernel": P(None, "model"),
    r"attention\.(query|key|value)\.bias": P("model"),
    r"attention\.out\.kernel": P("model"),
    r"widen\.kernel": P(None, "model"),
    r"widen\.bias": P("model"),
    r"narrow\.kernel": P("model"),
}


class Block(nnx.Module):
    """Causal self-attention, then two dense layers, each added to its input."""

    def __init__(self, width: int, num_heads: int, dropout: float, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads, width, dropout_rate=dropout, decode=False, rngs=rngs
        )
        self.dense_norm = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`[B, T, width]` of `[B, T, width]`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        hidden = nnx.gelu(self.widen(self.dense_norm(x)))
        return x + self.dropout(self.narrow(hidden))


class LanguageModel(nnx.Module):
    """Predicts each next token.

    Args:
        context: The maximum number of tokens that it sees.
        width: The size of a token's vector.
        num_layers: The number of blocks.
        num_heads: The number of attention heads; must divide `width`.
        dropout: The dropout rate while training.
        rngs: Has streams "params" and "dropout".
    """

    def __init__(
        self,
        context: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        *,
        rngs: nnx.Rngs,
    ):
        self.context = context
        self.token_vectors = nnx.Embed(text.VOCABULARY, width, rngs=rngs)
        self.place_vectors = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List(
            [Block(width, num_heads, dropout, rngs=rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.scores = nnx.Linear(width, text.VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits `[B, T, vocabulary]` of tokens `[B, T]`."""
        x = self.token_vectors(tokens) + self.place_vectors(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.scores(self.norm(x))


def mean_loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Mean cross entropy `[]`, in nats per token, of windows `[B, T + 1]`."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def continued(
    model: LanguageModel, prompt: jax.Array, count: int, key: jax.Array, temperature: float
) -> jax.Array:
    """The prompt `[n]` and `count` tokens drawn after it, `[n + count]`.

    Compile it with a static `count`.

    Args:
        model: A model in evaluation mode.
        prompt: At least one token.
        count: The number of tokens to draw.
        key: The PRNG key to draw them with.
        temperature: Below 1 prefers likely tokens.
    """
    size, context = len(prompt), model.context
    tokens = jnp.concatenate([prompt, jnp.zeros(count, prompt.dtype)])

    def draw(i, tokens):
        end = size + i
        start = jnp.maximum(end - context, 0)
        window = jax.lax.dynamic_slice_in_dim(padded(tokens), start, context)
        logits = model(window[None])[0, end - start - 1]
        token = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[end].set(token.astype(tokens.dtype))

    def padded(tokens):
        return jnp.concatenate([tokens, jnp.zeros(context, tokens.dtype)])

    return jax.lax.fori_loop(0, count, draw, tokens)
