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
# # Contexts and localities
#
# A tour of the two ideas behind distjax: *who is asking* (the context), and *where a value lives
# and whether its copies are equal* (its locality).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices where there is no accelerator

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import distjax as dj

plt.rcParams["figure.dpi"] = 80  # small pictures

strategy = dj.MirroredStrategy()
strategy

# %% [markdown]
# ## Who is asking
#
# By default there is a strategy with one replica. Under `scope()` we are in cross-replica context.
# A function passed to `run` is in replica context.


# %%
def who():
    strategy = dj.get_strategy()
    return {
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "cross-replica": dj.in_cross_replica_context(),
        "replica context": dj.get_replica_context() is not None,
    }


print("outside ", who())
with strategy.scope():
    print("scope   ", who())
print("replica ", strategy.run(who))

# %% [markdown]
# `merge_call` switches from replica to cross-replica context for one function, and passes it the
# values of all replicas.


# %%
def replica_fn():
    context = dj.get_replica_context()
    number = context.replica_id_in_sync_group * 10
    return context.merge_call(
        lambda strategy, x: (who(), strategy.reduce("sum", x)), args=(number,)
    )


seen, total = strategy.run(replica_fn)
print("merge   ", seen)
print("sum of 0, 10, ..., 70:", total)

# %% [markdown]
# ## One value per replica: T
#
# A `PerReplica` is one array with a replica axis in front. Row r lives on the device of replica
# r.

# %%
batch = strategy.distribute_values_from_function(
    lambda context: np.sin(np.arange(12) / 2 + context.replica_id_in_sync_group)
)
print(dj.locality(batch))
strategy.run(lambda x: x[:3], args=(batch,))


# %%
def show(ax, values, title):
    ax.imshow(values, cmap="viridis", vmin=-1, vmax=1, aspect="auto")
    ax.set_title(title, fontsize=9)
    ax.set_xticks([])


fig, axes = plt.subplots(1, 2, figsize=(7, 2.4), gridspec_kw={"width_ratios": [3, 3]})
mean = strategy.run(lambda x: dj.get_replica_context().all_reduce("mean", x), args=(batch,))
show(axes[0], np.stack(strategy.local_results(batch)), "T: a row per replica")
show(axes[1], np.stack(strategy.local_results(mean)), "M: after all_reduce, eight equal copies")
axes[0].set_ylabel("replica")
fig.tight_layout()

# %% [markdown]
# ## Equal on every replica: M
#
# The mean came back as a plain `jax.Array`: distjax proved from the data flow of the traced
# function that it is equal on all replicas. Values that depend on a replica's own input are not.


# %%
def fn(x, scale):
    context = dj.get_replica_context()
    return {
        "x": x * scale,
        "scale": scale + 1,
        "all_reduce(x)": context.all_reduce("sum", x),
        "all_reduce(x) * scale": context.all_reduce("sum", x) * scale,
        "all_reduce(x) * replica id": context.all_reduce("sum", x)
        * context.replica_id_in_sync_group,
    }


for name, value in strategy.run(fn, args=(batch, jnp.float32(2))).items():
    print(f"{name:28} {dj.locality(value).kind}")

# %% [markdown]
# ## Where a variable lives: V(v)
#
# A strategy decides where variables live. The picture shows how many bytes of a 64 kB variable,
# and of its two Adam moments, each of the eight devices holds.

# %%
import optax

STRATEGIES = {
    "mirrored": dj.MirroredStrategy(),
    "sharded: optimizer": dj.ShardedStrategy(partition="optimizer", min_split_bytes=0),
    "sharded: parameters": dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
    "central storage": dj.CentralStorageStrategy(),
}


def bytes_per_device(variables):
    held = dict.fromkeys(jax.devices(), 0)
    for variable in variables:
        if dj.locality(variable).kind == "host":
            continue  # in host memory: none on the devices
        for shard in variable.value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return [count / 1024 for count in held.values()]


fig, axes = plt.subplots(1, 4, figsize=(8, 2.2), sharey=True)
for ax, (name, one) in zip(axes, STRATEGIES.items(), strict=True):
    with one.scope():
        weights = dj.Variable(jnp.zeros((128, 128)), name="weights")
    optimizer = dj.optim.Optimizer(optax.adam(1e-3))
    optimizer.init([weights])
    slots = [v for v in jax.tree.leaves(optimizer.state) if v.shape == weights.shape]
    ax.bar(range(8), bytes_per_device([weights]), label="weights")
    ax.bar(
        range(8),
        bytes_per_device(slots),
        bottom=bytes_per_device([weights]),
        label="Adam's moments",
    )
    ax.set_title(name, fontsize=9)
    print(f"{name:20} weights {dj.locality(weights).kind:11} moments {dj.locality(slots[0]).kind}")
axes[0].set_ylabel("kB per device")
axes[3].legend(*axes[0].get_legend_handles_labels(), fontsize=7)  # there is room
fig.tight_layout()

# %% [markdown]
# A slot has the locality of its variable or finer; `dj.locality(slot) == dj.locality(v)` states
# V(v).
#
# ## Variables that differ on purpose
#
# An ON_READ variable keeps one component per replica. Writing it needs no communication. Reading
# it in cross-replica context combines the components by its aggregation.

# %%
with strategy.scope():
    count = dj.Variable(
        0.0,
        name="count",
        synchronization=dj.VariableSynchronization.ON_READ,
        aggregation=dj.VariableAggregation.SUM,
    )


def add_number():
    count.assign_add(dj.get_replica_context().replica_id_in_sync_group + 1.0)


history = []
for _ in range(10):
    strategy.run(add_number)
    history.append([float(part) for part in count.local_results()] + [float(count.value)])

fig, ax = plt.subplots(figsize=(5, 2.4))
lines = ax.plot(np.array(history), color="tab:blue", lw=1)
lines[-1].set(color="tab:red", lw=2, label="read across replicas: the sum")
lines[0].set_label("the eight components")
ax.set_xlabel("step")
ax.legend(fontsize=8)
fig.tight_layout()

# %% [markdown]
# ## The same on one device
#
# `VirtualStrategy` runs any number of replicas on one device, and gives the same numbers.

# %%
virtual = dj.VirtualStrategy(8)
same = virtual.distribute_values_from_function(
    lambda context: np.sin(np.arange(12) / 2 + context.replica_id_in_sync_group)
)
on_one_device = virtual.run(lambda x: dj.get_replica_context().all_reduce("mean", x), args=(same,))
print(np.allclose(mean, on_one_device), dj.locality(on_one_device))
