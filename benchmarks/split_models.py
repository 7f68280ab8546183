"""Models whose columns, rows and heads the devices of a replica share: an MLP and a transformer."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

#: Examples of one replica.
ROWS = 8


class Task(NamedTuple):
    """A model to train, in each form.

    Attributes:
      name: How tables call it.
      initial: Returns the parameters at the start, by name.
      specs: What the devices of a replica split of each of them.
      loss: Of parameters, inputs and targets.
      batch: Of a number of replicas, inputs and targets for all of them, [R * ROWS, ...].
      module: Builds it in NNX; if `annotated`, with logical axes.
      paths: The specs by path in the module.
      error: The loss, of what the module returns and targets.
    """

    name: str
    initial: Callable[[], dict[str, np.ndarray]]
    specs: dict[str, P]
    loss: Callable[..., jax.Array]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]
    module: Callable[..., Any]
    paths: dict[str, P]
    error: Callable[..., jax.Array]


# -- an MLP ---------------------------------------------------------------------

WIDTH, HIDDEN = 16, 64
#: What the names of the module's axes stand for.
RULES = (("mlp", "model"), ("embed", None))


def _initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "b": HIDDEN, "down": (HIDDEN, WIDTH), "c": WIDTH}
    return {k: rng.normal(size=n).astype(np.float32) / 10 for k, n in shapes.items()}


def _batch(num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, num_replicas * ROWS, WIDTH)).astype(np.float32)
    return x, y


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["up"] + params["b"])
    return _squared_error(hidden @ params["down"] + params["c"], y)


def _squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


class Layers(nnx.Module):
    """The MLP in NNX; the names of its axes are logical."""

    def __init__(self, annotated: bool = False):
        named = nnx.with_partitioning if annotated else lambda init, _: init
        given = {k: functools.partial(_given, v) for k, v in _initial().items()}
        rngs, split = nnx.Rngs(0), ("embed", "mlp")
        self.up = nnx.Linear(
            WIDTH,
            HIDDEN,
            kernel_init=named(given["up"], split),
            bias_init=named(given["b"], split[1:]),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            HIDDEN,
            WIDTH,
            kernel_init=named(given["down"], split[::-1]),
            bias_init=named(given["c"], split[:1]),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def _given(value: np.ndarray, key: Any, shape: Any, dtype: Any, **_: Any) -> jax.Array:
    return jnp.asarray(value, dtype).reshape(shape)


MLP = Task(
    "mlp",
    _initial,
    {"up": P(None, "model"), "b": P("model"), "down": P("model"), "c": P()},
    _loss,
    _batch,
    Layers,
    {r"up\.kernel": P(None, "model"), r"up\.bias|down\.kernel": P("model"), "down": P()},
    _squared_error,
)


# -- a transformer ----------------------------------------------------------------

VOCABULARY, LENGTH, NUM_LAYERS, NUM_HEADS, VECTOR = 64, 16, 2, 8, 64
#: Whole heads, and the columns and rows of the dense layers, as in the language model example.
_PATHS = {
    r"attention\.(query|key|value)\.kernel|widen\.kernel": P(None, "model"),
    r"attention\.(query|key|value)\.bias|widen\.bias": P("model"),
    r"(attention\.out|narrow)\.kernel": P("model"),
}


class Block(nnx.Module):
    """Causal attention, then two dense layers, each added to its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(VECTOR, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(NUM_HEADS, VECTOR, decode=False, rngs=rngs)
        self.dense_norm = nnx.LayerNorm(VECTOR, rngs=rngs)
        self.widen = nnx.Linear(VECTOR, 4 * VECTOR, rngs=rngs)
        self.narrow = nnx.Linear(4 * VECTOR, VECTOR, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.dense_norm(x))))


class Decoder(nnx.Module):
    """Scores of each next token; the vectors of tokens are those of the scores, too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCABULARY, VECTOR, rngs=rngs)
        self.places = nnx.Embed(LENGTH, VECTOR, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(NUM_LAYERS)])
        self.norm = nnx.LayerNorm(VECTOR, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(LENGTH))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


@functools.cache
def _decoder() -> tuple[Any, dict[str, np.ndarray]]:
    """The graph of the module, and its parameters by path, in order."""
    graphdef, flat = nnx.graph.flatten(Decoder(), graph=True)
    names = [".".join(map(str, path)) for path in flat.paths]
    values = [np.asarray(v.get_raw_value()) for v in flat.leaves]
    return graphdef, dict(zip(names, values, strict=True))


def _decoder_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    graphdef, initial = _decoder()
    model = nnx.graph.unflatten(graphdef, [params[name] for name in initial])
    return _cross_entropy(model(x), y)


def _cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def _windows(num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    windows = rng.integers(VOCABULARY, size=(num_replicas * ROWS, LENGTH + 1)).astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


def transformer() -> Task:
    """A decoder of two layers."""
    _, values = _decoder()
    found = {k: [spec for path, spec in _PATHS.items() if re.search(path, k)] for k in values}
    specs = {k: each[0] if each else P() for k, each in found.items()}
    initial = lambda: dict(values)
    paths = {**_PATHS, "": P()}
    return Task(
        "transformer", initial, specs, _decoder_loss, _windows, Decoder, paths, _cross_entropy
    )
