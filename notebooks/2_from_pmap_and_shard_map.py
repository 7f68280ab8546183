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
# # From pmap and shard_map to distjax
#
# One regression, written three times: with `pmap`, with `shard_map`, with distjax. The step stays
# the same; the code around it disappears.

# %%
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices where there is no accelerator

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import distjax as dj

plt.rcParams["figure.dpi"] = 80  # small pictures

random = np.random.default_rng(0)
NUM_STEPS, GLOBAL_BATCH = 40, 64
x = random.normal(size=(NUM_STEPS, GLOBAL_BATCH, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 0.1 * random.normal(size=x.shape[:2])
y = y.astype(np.float32)


def loss_fn(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def train_step(w, x, y):
    """One device's part; "batch" is the axis of devices."""
    loss, grads = jax.value_and_grad(loss_fn)(w, x, y)
    grads = jax.lax.pmean(grads, "batch")
    return w - 0.15 * grads, jax.lax.pmean(loss, "batch")


# %% [markdown]
# ## pmap
#
# State and batches carry a device axis, which you add (`replicate`, `shard`) and remove
# (`unreplicate`) yourself.

# %%
num_devices = jax.local_device_count()


def shard(x):
    return x.reshape(num_devices, -1, *x.shape[1:])


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    p_train_step = jax.pmap(train_step, axis_name="batch")
w = jnp.stack([jnp.zeros(3)] * num_devices)
pmap_losses = []
for features, targets in zip(x, y, strict=True):
    w, loss = p_train_step(w, shard(features), shard(targets))
    pmap_losses.append(float(loss[0]))
print("state", w.shape, "loss", loss.shape)
w[0]

# %% [markdown]
# ## shard_map
#
# No device axis, but a mesh, specs for every argument and result, and `check_vma=False`: with the
# check, the gradient with respect to a replicated argument is already summed, and `pmean` does not
# change that.

# %%
mesh = jax.make_mesh((num_devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


def by_hand(check_vma):
    step = jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(P(), P("batch"), P("batch")),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    step = jax.jit(step)
    w, losses = jnp.zeros(3), []
    for features, targets in zip(x, y, strict=True):
        w, loss = step(w, features, targets)
        losses.append(float(loss))
    return w, losses


w, shard_map_losses = by_hand(check_vma=False)
w_checked, checked_losses = by_hand(check_vma=True)
print("check_vma=False", w)
print("check_vma=True ", w_checked)

# %% [markdown]
# ## distjax
#
# `axis_name="batch"` gives the replica axis the name that the step uses. There are no specs: the
# dataset is split on input, and distjax proves what is equal on every replica.

# %%
strategy = dj.MirroredStrategy(axis_name="batch")
w = jnp.zeros(3)
distjax_losses = []
for batch in strategy.distribute_dataset(list(zip(x, y, strict=True))):
    w, loss = strategy.run(train_step, args=(w, *batch))
    distjax_losses.append(float(loss))
print("state", w.shape, dj.locality(w))
w

# %%
curves = {
    "pmap": (pmap_losses, "-"),
    "shard_map": (shard_map_losses, "--"),
    "distjax": (distjax_losses, ":"),
    "shard_map, check_vma=True": (checked_losses, "-"),
}
fig, ax = plt.subplots(figsize=(6, 2.8))
for name, (losses, style) in curves.items():
    ax.semilogy(np.minimum(losses, 1e4), style, lw=2, label=name)
ax.set_xlabel("step")
ax.set_ylabel("loss")
ax.legend(fontsize=8)
fig.tight_layout()
print("distjax as pmap:", np.allclose(distjax_losses, pmap_losses, rtol=1e-5))

# %% [markdown]
# Three curves coincide. The fourth has eight times the gradient, which is too much for this step
# size.
#
# ## The compiled program is the same
#
# distjax's step has exactly the collectives of the hand-written one. `dj.explain` counts them.

# %%
from distjax.testing.hlo import count_collectives

hand_written = jax.jit(
    jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(P(), P("batch"), P("batch")),
        out_specs=(P(), P()),
        check_vma=False,
    )
)
explained = dj.explain(train_step, jnp.zeros(3), *batch, strategy=strategy)
compiled = hand_written.lower(jnp.zeros(3), x[0], y[0]).compile()
print("by hand", count_collectives(compiled.as_text()))
print("distjax", explained.compiled_counts)

# %% [markdown]
# ## One line less
#
# Remove the `pmean`. `pmap` and `shard_map` still run; distjax returns what the result really is:
# one model per replica, which cannot be mistaken for a single one.


# %%
def forgetful_step(w, x, y):
    return w - 0.1 * jax.grad(loss_fn)(w, x, y)


models = strategy.run(forgetful_step, args=(jnp.zeros(3), *batch))
models

# %%
try:
    models + 1
except TypeError as error:
    print(error)
