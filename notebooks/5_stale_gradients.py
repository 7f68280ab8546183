# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Stale gradients
#
# The workers of parameter servers do not wait for each other, so a gradient belongs to values that
# others have changed since. This notebook measures by how much, shows the effect on training, and
# three remedies: a bound, a smaller learning rate, a correction.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import distjax as dj

plt.rcParams["figure.dpi"] = 60  # small pictures

# %% [markdown]
# ## A training run
#
# Handwritten digits, one layer, plain gradient descent with a large learning rate. Nothing in the
# loss depends on workers or servers.

# %%
NUM_UPDATES, BATCH, RATE = 120, 128, 1.0
digits = load_digits()
images = np.concatenate([digits.data / 16, np.ones((len(digits.data), 1))], axis=1)
images, labels = images.astype(np.float32), digits.target.astype(np.int32)
random = np.random.default_rng(0)
batches = [random.integers(0, len(labels), BATCH) for _ in range(NUM_UPDATES)]


def loss_fn(w, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], axis=1))


@jax.jit
def loss_of_all(w):
    return loss_fn(w, images, labels)


# %% [markdown]
# The step pulls the weights and a counter of updates. What comes before `merge_call` runs at a
# worker, on the values that it has pulled; `update` runs at the server, on the values that are
# there *by then*. The step returns what it has seen, so that we can look at it afterwards.


# %%
def make_step(update, w, clock):
    def step(x, y):
        then, w_then = clock.value, w.value
        gradient = jax.grad(loss_fn)(w_then, x, y)

        def at_server(strategy, gradient, w_then, then):
            w.assign_sub(update(gradient, w.value, w_then, clock.value - then))
            clock.assign_add(1)

        dj.get_replica_context().merge_call(at_server, args=(gradient, w_then, then))
        return then, w_then

    return step


def plain(gradient, w_now, w_then, staleness):
    return RATE * gradient


# %% [markdown]
# In one process a push arrives at once. To simulate a network, the engine's fault hook (meant for
# testing what happens when workers die) waits before each push: 8 ms, and more for a slow worker.
# It also records when pushes were applied.


# %%
class Network:
    """Delays of pushes, by worker."""

    def __init__(self, delays):
        self.delays, self.arrivals = delays, []

    def __call__(self, point, worker, closure):
        if point == "before_push":
            time.sleep(self.delays[worker])
        if point == "after_push":
            self.arrivals.append(time.perf_counter())


class Run:
    """A training with some workers: its losses by update, their times, its staleness."""

    def __init__(self, num_workers, update=plain, max_staleness=None, slow=1):
        network = Network([0.008 * slow] + [0.008] * (num_workers - 1))
        strategy = dj.ParameterServerStrategy(
            workers=[[jax.devices()[0]]] * num_workers,
            max_staleness=max_staleness,
            engine=dj.servers.ThreadEngine(fault=network),
        )
        with strategy.scope():
            w = dj.Variable(jnp.zeros((65, 10)), name="w")
            clock = dj.Variable(0, name="clock")
        step = make_step(update, w, clock)
        strategy.run(step, args=(images[batches[0]], labels[batches[0]]))  # compiles
        w.assign(jnp.zeros((65, 10)))
        clock.assign(0)
        network.arrivals.clear()
        start = time.perf_counter()
        with dj.Coordinator(strategy) as coordinator:
            seen = [coordinator.schedule(step, args=(images[i], labels[i])) for i in batches]
            coordinator.join()
            self.staleness = coordinator.stats()["staleness"]
            seen = sorted(coordinator.fetch(seen), key=lambda pair: pair[0])
        self.updates = np.array([then for then, _ in seen] + [NUM_UPDATES])
        self.losses = np.array([loss_of_all(w) for _, w in seen] + [loss_of_all(w.value)])
        self.seconds = np.array([start, *sorted(network.arrivals)])[self.updates] - start

    @property
    def mean_staleness(self):
        return sum(k * n for k, n in self.staleness.items()) / NUM_UPDATES


# %% [markdown]
# ## How stale
#
# A single worker is never late. With W equally fast workers, about W - 1 updates of the others come
# between a pull and its push. A worker that is four times as slow sees many more, and the others
# hardly notice it.

# %%
runs = {f"{n} worker{'s' * (n > 1)}": Run(n) for n in (1, 2, 4)}
slow = {"4 workers, one slow": Run(4, slow=4)}
for name, run in (runs | slow).items():
    print(f"{name}: mean staleness {run.mean_staleness:.1f}, at most {max(run.staleness)}")


def draw_staleness(ax, runs):
    for i, (name, run) in enumerate(runs.items()):
        heights = np.array(list(run.staleness.values()))
        ax.bar(np.array(list(run.staleness)) + 0.2 * i - 0.3, heights, width=0.2, label=name)
    ax.set(xlabel="updates between pull and push", ylabel="pushes")
    ax.legend(fontsize=8)


fig, ax = plt.subplots(figsize=(8, 2.6))
draw_staleness(ax, runs | slow)
fig.tight_layout()

# %% [markdown]
# ## What it does
#
# Per update, more workers are worse: with four, the same rate overshoots at first, since each of
# them corrects an error that the others have already corrected. Per second, workers that do not
# wait make more progress, as long as they do not overshoot.


# %%
def draw_losses(axes, runs):
    for name, run in runs.items():
        axes[0].semilogy(run.updates, run.losses, lw=1.2, label=name)
        axes[1].semilogy(run.seconds, run.losses, lw=1.2, label=name)
    axes[0].set(xlabel="updates", ylabel="loss")
    axes[1].set(xlabel="seconds")
    axes[0].legend(fontsize=8)


fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
draw_losses(axes, runs)
fig.tight_layout()
for name, run in runs.items():
    print(f"{name}: highest loss {run.losses.max():.2f}, last {run.losses[-1]:.2f}")

# %% [markdown]
# ## A bound
#
# With `max_staleness=1`, at most one update of others comes in between, whoever is slow. The bound
# is exact: a push waits if another one would otherwise be too late. `max_staleness=0` runs one
# closure after the other, whatever the number of workers. The bound costs time, since workers wait
# for each other.

# %%
bounded = {f"4 workers, max_staleness={s}": Run(4, max_staleness=s) for s in (1, 0)}
bounded = {"4 workers": runs["4 workers"]} | bounded
assert max(bounded["4 workers, max_staleness=1"].staleness) <= 1
assert max(bounded["4 workers, max_staleness=0"].staleness) == 0
fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
draw_losses(axes, bounded)
fig.tight_layout()

# %% [markdown]
# ## A smaller rate, a correction
#
# The merge has both versions of each value: an argument is what the worker had, a read is what is
# there now. Dividing the rate by the staleness is one line. So is DC-ASGD (Zheng et al., 2017),
# which estimates how the gradient has changed since, using the squared gradient in place of a
# second derivative.

# %%
CORRECTION = 50.0


def slowed(gradient, w_now, w_then, staleness):
    return RATE / (1 + staleness) * gradient


def corrected(gradient, w_now, w_then, staleness):
    return RATE * (gradient + CORRECTION * gradient**2 * (w_now - w_then))


compensated = {
    "4 workers": runs["4 workers"],
    "rate / (1 + staleness)": Run(4, slowed),
    "DC-ASGD": Run(4, corrected),
    "1 worker": runs["1 worker"],
}
fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
draw_losses(axes, compensated)
fig.tight_layout()
for name, run in compensated.items():
    print(f"{name}: highest loss {run.losses.max():.2f}, last {run.losses[-1]:.2f}")

# %% [markdown]
# The smaller rate is safe and slow, since it is also divided where nothing would have overshot. The
# correction keeps most of the rate, but needs a factor that fits the problem.
#
# `dj.explain` shows where the step was cut: the corrected step sends the gradient and the weights
# that it was computed from, and the server does the arithmetic of the update.

# %%
strategy = dj.ParameterServerStrategy(workers=1)
with strategy.scope():
    w, clock = dj.Variable(jnp.zeros((65, 10)), name="w"), dj.Variable(0, name="clock")
for update in (plain, corrected):
    step = make_step(update, w, clock)
    cut = dj.explain(step, images[:BATCH], labels[:BATCH], strategy=strategy).cut
    print(f"{update.__name__}: {cut.pulled_bytes} bytes pulled, {cut.pushed_bytes} pushed")
