"""Random training steps with a reduction removed, doubled or swapped, and what is true of them.

A step trains a small network in a way that the seed draws: its loss, normalization, optimizer, loop
and metrics. Each reduction in it is a site, and a mistake is made at one.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import distjax as dj

AXIS, ROWS, SIZE, HIDDEN = "replica", 8, 3, 4
MISTAKES = ("removed", "doubled", "swapped")
LOSSES = ("mean", "sum", "masked")
NORMS = ("none", "moments", "totals")
UPDATES = ("sgd", "momentum", "clipped", "adam", "guarded")


@dataclasses.dataclass
class Program:
    """A random step.

    Attributes:
      seed: what it is drawn from.
      mistake: what is done to one reduction; None: nothing.
    """

    seed: int
    mistake: str | None = None

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        choose = lambda options: options[rng.integers(len(options))]
        self.loss, self.norm, self.update = choose(LOSSES), choose(NORMS), choose(UPDATES)
        self.accumulates, self.decays, self.counts = (bool(rng.integers(2)) for _ in range(3))
        self.activate = choose((jnp.tanh, jax.nn.relu, jax.nn.gelu))
        self.site_number, self.data_rng = int(rng.integers(1000)), rng
        self.site, self.num_sites = None, 0

    def __str__(self):
        return (
            f"seed {self.seed}, {self.mistake} at site {self.site} of {self.num_sites}: loss "
            f"{self.loss}, norm {self.norm}, update {self.update}, accumulates {self.accumulates}, "
            f"decays {self.decays}, counts {self.counts}"
        )

    # -- the step ---------------------------------------------------------------

    def reduce(self, op, tree):
        """A reduction, or what the mistake makes of it."""
        here, self.at = self.at, self.at + 1
        reductions = {"mean": lax.pmean, "sum": lax.psum}
        reduce = lambda op, x: reductions[op](x, AXIS)
        if self.site is not None and here == self.site:
            if self.mistake == "removed":
                return tree
            if self.mistake == "doubled":
                return reduce(op, reduce(op, tree))
            if self.mistake == "swapped":
                op = {"mean": "sum", "sum": "mean"}[op]
        return reduce(op, tree)

    def normalized(self, h):
        if self.norm == "none":
            return h
        if self.norm == "moments":
            mean, square = self.reduce("mean", (h.mean(0), jnp.square(h).mean(0)))
        else:
            n = self.reduce("sum", jnp.float32(len(h)))
            mean = self.reduce("sum", h.sum(0)) / n
            square = self.reduce("sum", jnp.square(h).sum(0)) / n
        return (h - mean) * lax.rsqrt(square - mean**2 + 1e-1)

    def losses(self, params, x, y):
        h = self.normalized(self.activate(x @ params["w1"] + params["b1"]))
        return jnp.square(h @ params["w2"] - y)

    def step(self, state, x, y, mask):
        self.at = 0
        state, params = dict(state), state["params"]
        op = "mean" if self.loss == "mean" else "sum"
        count = self.reduce("sum", mask.sum()) if self.loss == "masked" else ROWS

        def loss(params, x, y, mask):
            losses = self.losses(params, x, y)
            if self.loss == "mean":
                return losses.mean()
            return jnp.sum(losses * mask if self.loss == "masked" else losses) / count

        if self.accumulates and self.norm == "none":
            value, grads = self.accumulated(jax.value_and_grad(loss), params, x, y, mask)
        else:
            value, grads = jax.value_and_grad(loss)(params, x, y, mask)
        grads = self.reduce(op, grads)
        if self.decays:
            grads = jax.tree.map(lambda g, p: g + 0.01 * p, grads, params)
        state["params"], state["slots"] = self.updated(params, state["slots"], grads, x)
        if self.counts:
            state["seen"] = state["seen"] + self.reduce("sum", jnp.float32(len(x)))
            state["moving"] = 0.9 * state["moving"] + 0.1 * self.reduce("mean", x.mean(0))
        is_near = (jnp.abs(y) < 0.5).sum().astype(jnp.float32)
        share = self.reduce("sum", is_near) / self.reduce("sum", jnp.float32(len(y)))
        self.num_sites = self.at
        return state, {"loss": self.reduce(op, value), "share": share}

    def accumulated(self, value_and_grad, params, x, y, mask):
        halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (x, y, mask))

        def body(total, half):
            return jax.tree.map(jnp.add, total, value_and_grad(params, *half)), None

        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(body, zero, halves)
        return jax.tree.map(lambda x: x / 2, total) if self.loss == "mean" else total

    def updated(self, params, slots, grads, x):
        if self.update == "clipped":
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        if self.update == "adam":
            slots = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g**2, slots, grads)
            grads = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + 1e-2), grads, slots)
        if self.update == "momentum":
            grads = slots = jax.tree.map(lambda s, g: 0.9 * s + g, slots, grads)
        descend = lambda rate: jax.tree.map(lambda p, g: p - rate * g, params, grads)
        if self.update == "guarded":
            large = self.reduce("sum", jnp.square(x).sum()) > 20.0
            return lax.cond(large, lambda: descend(0.05), lambda: descend(0.2)), slots
        return descend(0.1), slots

    # -- its arguments ------------------------------------------------------------

    def arguments(self):
        """Returns the state, and the arrays of the batch."""
        rng = np.random.default_rng([self.seed, 1])
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
        params = {"w1": draw(SIZE, HIDDEN), "b1": draw(HIDDEN), "w2": draw(HIDDEN)}
        state = {
            "params": jax.tree.map(jnp.asarray, params),
            "slots": jax.tree.map(lambda p: jnp.full_like(p, 0.1), params),
            "seen": jnp.float32(3),
            "moving": jnp.zeros(SIZE),
        }
        mask = np.array([1, 1, 0, 1, 1, 0, 1, 1], np.float32)
        return state, (draw(ROWS, SIZE), draw(ROWS), mask)

    def outcome(self, strategy):
        """Returns the new state and the results of a plain run."""
        state, arrays = self.arguments()
        batch = next(iter(strategy.distribute_dataset([arrays])))
        return strategy.run(self.step, args=(state, *batch))

    def break_it(self):
        """Makes the mistake at a site that the seed draws."""
        state, arrays = self.arguments()
        axes = {"axis_name": AXIS, "axis_size": 1}
        one = jax.tree.map(lambda a: jnp.asarray(a)[None], (state, *arrays))
        jax.eval_shape(jax.vmap(self.step, **axes), *one)  # counts the sites
        self.site = self.site_number % self.num_sites
        return self


def distance(program, num_replicas):
    """Returns how far a plain run of R replicas is from one of one replica; 0: they agree.

    State counts by how much it changes, and must not come back with a value for each replica. A
    result per replica may be averaged or summed afterwards.
    """
    (new, out), (new_one, out_one) = (
        program.outcome(dj.VirtualStrategy(n)) for n in (num_replicas, 1)
    )
    old, _ = program.arguments()
    found = []
    is_leaf = lambda x: isinstance(x, dj.PerReplica)
    triples = zip(*(jax.tree.leaves(t, is_leaf=is_leaf) for t in (new, new_one, old)), strict=True)
    for a, b, before in triples:
        rows = as_rows(a)
        if is_leaf(a):
            return np.inf
        b, before = as_rows(b)[0], np.asarray(before)
        change = max(np.abs(rows - before).max(), np.abs(b - before).max())
        found.append(np.abs(rows - b).max() / change if change else 0.0)
    for a, b in zip(*(jax.tree.leaves(t, is_leaf=is_leaf) for t in (out, out_one)), strict=True):
        rows, b = as_rows(a), as_rows(b)[0]
        wholes = [rows.mean(0), rows.sum(0)] if is_leaf(a) else [rows[0]]
        found.append(min(apart(whole, b) for whole in wholes))
    return max(x if np.isfinite(x) else np.inf for x in found)


def apart(a, b):
    """Returns the largest difference, as a part of the largest number."""
    return np.abs(a - b).max() / (max(np.abs(a).max(), np.abs(b).max()) or 1)


def as_rows(value):
    return (
        np.asarray(value.stacked) if isinstance(value, dj.PerReplica) else np.asarray(value)[None]
    )
