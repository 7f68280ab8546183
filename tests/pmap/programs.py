"""Random functions to map: operations, collectives, loops, derivatives, over random axes."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHAPE = (4, 8)


class Program:
    """A function of arrays [4, 8] and a shared number, drawn by a seed.

    Args:
      seed: what it is drawn by.

    Attributes:
      count: R.
      in_axes, out_axes: where its rows lie.
      uses: the names of the operations drawn.
    """

    def __init__(self, seed):
        draw = random.Random(seed)
        self.count = draw.choice((1, 2, 4, 8))
        self.num_arrays = draw.randint(1, 3)
        self.in_axes = (*(draw.choice((0, 0, 1, 2, None)) for _ in range(self.num_arrays)), None)
        if not any(axis is not None for axis in self.in_axes):
            self.in_axes = (0, *self.in_axes[1:])
        self.out_axes = tuple(draw.choice((0, 0, 1, 2)) for _ in range(3))
        self._steps = [self._draw_step(draw, 2) for _ in range(draw.randint(3, 8))]
        self._seed = seed

    def arguments(self):
        """Returns the arguments, with a row per replica where there is an axis."""
        numbers = np.random.default_rng(self._seed)
        arrays = [numbers.normal(size=SHAPE) for _ in range(self.num_arrays)]
        rows = [
            x if axis is None else np.stack([x + r for r in range(self.count)], axis)
            for x, axis in zip(arrays, self.in_axes, strict=False)
        ]
        return [*(x.astype(np.float32) for x in rows), np.float32(0.5)]

    def __call__(self, *arguments):
        """Computes the function on one replica."""
        *values, number = arguments
        for step in self._steps:
            values = step(values, number)
        return tuple((values * 3)[:2]), {"last": values[-1] * number}

    @property
    def out_tree(self):
        """A prefix of the results: the axis of each."""
        return (self.out_axes[0], self.out_axes[1]), {"last": self.out_axes[2]}

    def _draw_step(self, draw, depth, differentiable=False):
        collectives = [
            kind for kind in _COLLECTIVES if not differentiable or kind not in _NO_GRADIENT
        ]
        kind = draw.choice([*_PLAIN, *collectives, *(_NESTED if depth else ())])
        index, other = draw.randrange(8), draw.randrange(8)
        if kind in _NESTED:
            inner = self._draw_step(draw, depth - 1, differentiable or kind == "grad")
            return functools.partial(_NESTED[kind], inner)
        if kind in _PLAIN:
            return functools.partial(_apply, _PLAIN[kind], index, other)
        make = _COLLECTIVES[kind]
        return functools.partial(_apply_collective, make(self.count, draw), index)


def _apply(fn, index, other, values, number):
    x, y = values[index % len(values)], values[other % len(values)]
    return _replace(values, index, fn(x, y, number))


def _apply_collective(fn, index, values, number):
    return _replace(values, index, fn(values[index % len(values)]) * 0.5)


def _replace(values, index, value):
    values = list(values)
    values[index % len(values)] = value
    return values


_PLAIN = {
    "add": lambda x, y, n: x + y * n,
    "sin": lambda x, y, n: jnp.sin(x) * n,
    "tanh": lambda x, y, n: jnp.tanh(x - y),
    "dot": lambda x, y, n: jnp.tanh(x @ y.T) @ y * 0.1,
    "where": lambda x, y, n: jnp.where(x > 0, x, y),
    "sort": lambda x, y, n: jnp.sort(x, axis=-1),
    "cumsum": lambda x, y, n: jnp.cumsum(x, axis=0) * 0.3,
    "index": lambda x, y, n: x * (1 + lax.axis_index("i")) * n,
    "noise": lambda x, y, n: (
        x + jax.random.normal(jax.random.fold_in(jax.random.key(3), lax.axis_index("i")), x.shape)
    ),
    "same_noise": lambda x, y, n: x + jax.random.normal(jax.random.key(4), x.shape),
    "flip": lambda x, y, n: lax.rev(x, (1,)),
    "scatter": lambda x, y, n: x.at[1].set(y[2]),
}


def _ring(count, draw):
    shift = draw.randrange(count)
    return [(i, (i + shift) % count) for i in range(count)]


def _groups(count, draw):
    replicas = list(range(count))
    draw.shuffle(replicas)
    size = draw.choice([k for k in (1, 2, 4, 8) if count % k == 0])
    return [replicas[i : i + size] for i in range(0, count, size)]


def _partial(count, draw):
    pairs = _ring(count, draw)
    return pairs[: draw.randint(0, count)]


_COLLECTIVES = {
    "psum": lambda n, draw: lambda x: lax.psum(x, "i") / n,
    "pmean": lambda n, draw: lambda x: lax.pmean(x, "i"),
    "pmax": lambda n, draw: lambda x: lax.pmax(x, "i"),
    "pmin": lambda n, draw: lambda x: lax.pmin(x, "i"),
    "psum_groups": lambda n, draw: functools.partial(
        lax.psum, axis_name="i", axis_index_groups=_groups(n, draw)
    ),
    "pmax_groups": lambda n, draw: functools.partial(
        lax.pmax, axis_name="i", axis_index_groups=_groups(n, draw)
    ),
    "all_gather": lambda n, draw: lambda x: lax.all_gather(x, "i")[n - 1],
    "gathered_mean": lambda n, draw: lambda x: lax.all_gather(x, "i", axis=1).mean(1),
    "scatter_gather": lambda n, draw: (
        lambda x: lax.all_gather(
            lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), "i", axis=1, tiled=True
        )
    ),
    "ppermute": lambda n, draw: functools.partial(lax.ppermute, axis_name="i", perm=_ring(n, draw)),
    "partial": lambda n, draw: functools.partial(
        lax.ppermute, axis_name="i", perm=_partial(n, draw)
    ),
    "all_to_all": lambda n, draw: lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True),
}

#: Those without a derivative in JAX.
_NO_GRADIENT = frozenset(["pmax", "pmin", "pmax_groups"])


def _scan(inner, values, number):
    return lax.scan(lambda carry, _: (inner(carry, number), None), values, None, length=2)[0]


def _fori(inner, values, number):
    return lax.fori_loop(0, 2, lambda i, carry: inner(carry, number), values)


def _cond(inner, values, number):
    return lax.cond(number > 0, lambda v: inner(v, number), lambda v: v, values)


def _grad(inner, values, number):
    loss = lambda values: sum(jnp.sum(jnp.sin(v)) for v in inner(values, number))
    return jax.grad(loss)(values)


def _vmap(inner, values, number):
    def row(values):
        return [v[0] for v in inner([jnp.broadcast_to(v, SHAPE) for v in values], number)]

    return jax.vmap(row)(values)


_NESTED = {
    "jit": lambda inner, values, number: jax.jit(inner)(values, number),
    "remat": lambda inner, values, number: jax.checkpoint(inner)(values, number),
    "scan": _scan,
    "fori_loop": _fori,
    "cond": _cond,
    "grad": _grad,
    "vmap": _vmap,
}
