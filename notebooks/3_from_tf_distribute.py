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
# # From tf.distribute to distjax
#
# A custom training loop as TensorFlow 2 users write it, part by part. The names in the comments
# are those of `tf.distribute`.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices where there is no accelerator

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import distjax as dj

plt.rcParams["figure.dpi"] = 80  # small pictures

# %% [markdown]
# ## Data
#
# Two moons. A dataset is any iterable of batches; `experimental_distribute_dataset` is
# `distribute_dataset`. The last batch is smaller: `partial="pad"` pads it and provides a mask of
# the examples that count.

# %%
random = np.random.default_rng(0)
NUM_EXAMPLES, GLOBAL_BATCH = 1000, 64
angle = random.uniform(0, np.pi, NUM_EXAMPLES)
label = random.integers(0, 2, NUM_EXAMPLES)
points = np.stack(
    [np.cos(angle) * (1 - 2 * label) + label, np.sin(angle) * (1 - 2 * label) + label / 2], axis=1
)
points = (points + 0.1 * random.normal(size=points.shape)).astype(np.float32)
batches = [
    {"points": points[i : i + GLOBAL_BATCH], "label": label[i : i + GLOBAL_BATCH]}
    for i in range(0, NUM_EXAMPLES, GLOBAL_BATCH)
]
print([len(batch["label"]) for batch in batches])

# %% [markdown]
# ## Model, variables, optimizer, metrics
#
# Variables are created in `with strategy.scope():`, as in TensorFlow. An optax transformation takes
# the place of the Keras optimizer; like the latter, `dj.optim.Optimizer` sums the gradients of the
# replicas.


# %%
def initialize(key, sizes=(2, 16, 16, 2)):
    """The weights of a small network: a list of layers."""
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(jax.random.split(key, 3), sizes, sizes[1:], strict=False)
    ]


def apply(layers, x):
    """Logits [B, 2] of points [B, 2]."""
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


class Training:
    """What `strategy.scope()` makes."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.layers = jax.tree.map(dj.Variable, initialize(jax.random.key(0)))
            self.accuracy = dj.metrics.Accuracy()
        self.optimizer = dj.optim.Optimizer(optax.adam(2e-2))
        self.optimizer.init(self.layers)

    def values(self):
        return jax.tree.map(lambda variable: variable.value, self.layers)


# %% [markdown]
# ## The step
#
# `strategy.run(fn)` in a `tf.function` is `strategy.run(fn)` in `dj.jit`. The loss of a replica
# is the sum over its examples that count, divided by their *global* number, as with
# `compute_average_loss`. So the sum over the replicas is the loss of the global batch.


# %%
def make_train_step(training):
    strategy, optimizer = training.strategy, training.optimizer

    def step_fn(batch):
        data, mask = batch.data, batch.mask
        global_count = dj.get_replica_context().all_reduce("sum", jnp.sum(mask))

        def loss_fn(layers):
            logits = apply(layers, data["points"])
            per_example = optax.softmax_cross_entropy_with_integer_labels(logits, data["label"])
            return jnp.sum(per_example, where=mask) / global_count, logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(training.values())
        optimizer.apply_gradients([(grads, training.layers)])
        training.accuracy.update(logits, data["label"], mask=mask)
        return loss

    @dj.jit
    def train_step(batch):
        losses = strategy.run(step_fn, args=(batch,))
        return strategy.reduce(dj.ReduceOp.SUM, losses, axis=None)

    return train_step


# %% [markdown]
# ## The loop, under four strategies
#
# Nothing below the line that creates the strategy depends on which one it is.

# %%
STRATEGIES = {
    "one device": dj.OneDeviceStrategy(),
    "mirrored, 8": dj.MirroredStrategy(),
    "virtual, 64": dj.VirtualStrategy(64),
    "sharded, 8": dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
}
curves = {}
for name, strategy in STRATEGIES.items():
    training = Training(strategy)
    train_step = make_train_step(training)
    dataset = strategy.distribute_dataset(batches, dj.InputOptions(partial="pad"))
    curves[name] = []
    for _ in range(6):
        training.accuracy.reset()
        curves[name] += [float(train_step(batch)) for batch in dataset]
    print(f"{name:12} loss {curves[name][-1]:.4f}  accuracy {training.accuracy.result():.2%}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 2.8))
for style, (name, losses) in zip(("-", "--", "-.", ":"), curves.items(), strict=True):
    axes[0].plot(losses, style, lw=2, label=name)
    distance = np.abs(np.array(losses) - np.array(curves["one device"]))
    axes[1].semilogy(np.maximum(distance, 1e-9)[::4], style, label=name)
axes[0].set(xlabel="step", title="loss")
axes[0].legend(fontsize=8)
axes[1].set(xlabel="step / 4", title="distance from one device", ylim=(1e-9, 1))
fig.tight_layout()

# %% [markdown]
# The curves coincide up to rounding, even with a padded last batch and 64 replicas.
#
# ## Where variables live
#
# `MirroredVariable` is an array on all devices. Under the sharded strategy each device holds a
# part.

# %%
for name, strategy in STRATEGIES.items():
    with strategy.scope():
        v = dj.Variable(jnp.zeros((32, 32)))
    shapes = {tuple(shard.data.shape) for shard in v.value.addressable_shards}
    print(f"{name:12} {dj.locality(v).kind:12} each device holds {shapes}")

# %% [markdown]
# ## `merge_call`, as in TensorFlow's documentation
#
# Each replica adds its number to three; the merge function sums over replicas; each adds the sum
# to its own.


# %%
def merge_fn(strategy, three_plus_replica_id):
    return sum(strategy.local_results(three_plus_replica_id))


def fn(three):
    context = dj.get_replica_context()
    v = three + context.replica_id_in_sync_group
    return context.merge_call(merge_fn, args=(v,)) + v


dj.VirtualStrategy(2).run(fn, args=(3,))

# %% [markdown]
# Code for an older API keeps its names: see `distjax.compat.v1_12`, `v1_13`, `v1_15`.
