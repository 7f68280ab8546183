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
# # Finding a wrong reduction
#
# A data-parallel step that forgets its all-reduce runs, reports a falling loss, and trains a wrong
# model. This notebook makes that mistake in a hand-written `jax.shard_map`, and shows what happens
# and what distjax says about the same step.

# %%
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices where there is no accelerator

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import distjax as dj

plt.rcParams["figure.dpi"] = 80  # small pictures

# %% [markdown]
# ## A function to learn
#
# The examples are sorted, so device r sees one eighth of the interval, as easily happens with files
# that are not shuffled.

# %%
NUM_STEPS, EVALUATE_EVERY = 150, 5
x = np.linspace(-1, 1, 256, dtype=np.float32)[:, None]
y = np.sin(3 * x) + 0.3 * x


def initialize(key):
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (1, 32)) * 2,
        "b1": jnp.linspace(-2, 2, 32),
        "w2": jax.random.normal(second, (32, 1)) * 0.1,
        "b2": jnp.zeros(1),
    }


def predict(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


optimizer = optax.adam(2e-2)


def right_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = jax.lax.pmean(grads, "replica")
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def wrong_step(params, state, x, y):  # the same, but for one line
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


# %% [markdown]
# ## By hand
#
# Code that comes from `pmap`, or whose kernels do not pass the check, uses `check_vma=False`. The
# specs claim that the parameters come out replicated, and nothing verifies it.

# %%
steps_evaluated = range(0, NUM_STEPS, EVALUATE_EVERY)
evaluate = jax.jit(lambda params: loss_fn(params, x, y))
mesh = jax.make_mesh((8,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))


def train_by_hand(step):
    """Parameters, the mean of the devices' losses, and the loss of the model that is saved."""

    def on_one_device(params, state, x, y):
        params, state, loss = step(params, state, x, y)
        return params, state, jax.lax.pmean(loss, "replica")

    on_all_devices = jax.jit(
        jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(P(), P(), P("replica"), P("replica")),
            out_specs=(P(), P(), P()),
            check_vma=False,
        )
    )
    params = initialize(jax.random.key(0))
    state = optimizer.init(params)
    reported, true = [], []
    for step_number in range(NUM_STEPS):
        params, state, loss = on_all_devices(params, state, x, y)
        reported.append(float(loss))
        if step_number % EVALUATE_EVERY == 0:  # on the host, as a saved model is
            true.append(evaluate(jax.tree.map(np.asarray, params)))
    return params, reported, true


right_params, right_reported, right_true = train_by_hand(right_step)
wrong_params, wrong_reported, wrong_true = train_by_hand(wrong_step)
print("replicated, says the sharding:", wrong_params["w2"].sharding.is_fully_replicated)
print(f"reported loss: right {right_reported[-1]:.5f}, wrong {wrong_reported[-1]:.5f}")
print(f"true loss:     right {right_true[-1]:.5f}, wrong {wrong_true[-1]:.5f}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
axes[0].semilogy(right_reported, label="right")
axes[0].semilogy(wrong_reported, label="wrong")
axes[0].set(title="what training reports", xlabel="step", ylabel="loss")
axes[0].legend(fontsize=8)
axes[1].semilogy(steps_evaluated, right_true, label="right")
axes[1].semilogy(steps_evaluated, wrong_true, label="wrong")
axes[1].set(title="the loss of the model that is saved", xlabel="step")
fig.tight_layout()

# %% [markdown]
# The wrong run looks *better* while it trains: each device learns an eighth of the problem, which
# is easier. What is saved is the first device's copy.

# %%
fig, ax = plt.subplots(figsize=(6, 2.8))
copies = [
    jax.tree.map(lambda leaf, i=i: np.asarray(leaf.addressable_shards[i].data), wrong_params)
    for i in range(8)
]
for i, copy in enumerate(copies):
    ax.plot(x, predict(copy, x), lw=1, color=plt.cm.viridis(i / 8))
ax.plot(x, y, "k--", lw=2, label="what there was to learn")
ax.set(title='one "replicated" array of parameters: eight models', ylim=(-2.5, 2.5))
ax.legend(fontsize=8)
fig.tight_layout()

# %% [markdown]
# `assert_mirrored` compares the copies, which JAX does not. It is meant for arrays made by other
# code.

# %%
strategy = dj.MirroredStrategy()
strategy.assert_mirrored(right_params)
try:
    strategy.assert_mirrored(wrong_params)
except dj.errors.LocalityError as error:
    print(error)

# %% [markdown]
# ## The same step, with distjax
#
# The step is unchanged. distjax follows the data flow of the traced function: the batch differs per
# replica, so the gradients do, so the new parameters do. It warns before the first step has run,
# and names the leaves.

# %%
((features, targets),) = strategy.distribute_dataset([(x, y)])
params = initialize(jax.random.key(0))
state = optimizer.init(params)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    wrong_result, _, _ = strategy.run(wrong_step, args=(params, state, features, targets))
for warning in caught:  # in the first call: a compiled step is not traced again
    print(warning.category.__name__)
    print(warning.message)

# %% [markdown]
# And nothing claims to be replicated: the new parameters are one value per replica, which
# cross-replica code refuses.

# %%
print({name: dj.locality(value).kind for name, value in wrong_result.items()})
try:
    predict(wrong_result, x)
except TypeError as error:
    print(error)

# %% [markdown]
# ## The fix
#
# The line from the message, or a link in the optax chain.


# %%
def cured_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = dj.get_replica_context().all_reduce("mean", grads)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(step):
    params = initialize(jax.random.key(0))
    state = optimizer.init(params)
    reported = []
    for _ in range(NUM_STEPS):
        params, state, losses = strategy.run(step, args=(params, state, features, targets))
        reported.append(float(strategy.reduce("mean", losses)))
    return params, reported


params, reported = train(cured_step)
print({name: dj.locality(value).kind for name, value in params.items()})
print(f"true loss {float(loss_fn(params, x, y)):.5f}")

fig, ax = plt.subplots(figsize=(6, 2.6))
ax.semilogy(right_reported, lw=3, alpha=0.5, label="by hand, right")
ax.semilogy(reported, "k--", lw=1, label="distjax, cured")
ax.semilogy(steps_evaluated, wrong_true, color="tab:orange", label="by hand, wrong: true loss")
ax.set(xlabel="step", ylabel="loss")
ax.legend(fontsize=8)
fig.tight_layout()

# %% [markdown]
# ## With variables
#
# A variable needs to know how the replicas' writes are combined. Otherwise, a write in a replica is
# an error, since the copies would drift apart.

# %%
with strategy.scope():
    weight = dj.Variable(jnp.zeros(1), name="weight")
try:
    strategy.run(lambda x: weight.assign_sub(jnp.mean(x, axis=0)), args=(features,))
except dj.errors.AggregationError as error:
    print(error)

# %% [markdown]
# ## A sum where a mean was meant
#
# The sum of the replicas' mean gradients is equal on every replica, so nothing drifts apart, but
# gradient descent takes steps that are R times as long. The first call warns. When in doubt,
# compare with one device: the numbers of a correct step do not depend on R.


# %%
def descend(op, strategy):
    def step(params, x, y):
        grads = dj.get_replica_context().all_reduce(op, jax.grad(loss_fn)(params, x, y))
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)

    ((features, targets),) = strategy.distribute_dataset([(x, y)])
    params, losses = initialize(jax.random.key(0)), []
    for _ in range(40):
        losses.append(float(loss_fn(params, x, y)))
        params = strategy.run(step, args=(params, features, targets))
    return losses


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    summed = descend("sum", dj.VirtualStrategy(8))
print("\n".join(line for line in str(caught[0].message).splitlines() if "Got" not in line))

fig, ax = plt.subplots(figsize=(6, 2.6))
ax.semilogy(descend("mean", dj.VirtualStrategy(1)), lw=4, alpha=0.4, label="one replica")
ax.semilogy(descend("mean", dj.VirtualStrategy(8)), "k--", label="8 replicas, mean")
ax.semilogy(summed, label="8 replicas, sum")
ax.set(xlabel="step", ylabel="loss", ylim=(1e-2, 1e3))
ax.legend(fontsize=8)
fig.tight_layout()
