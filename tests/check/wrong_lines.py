"""Twenty-two wrong training steps in five styles, with the line that is wrong marked.

`# wrong` ends a statement that reduces, or computes, in the wrong way. Where a reduction is
missing, `# makes` ends the statement that computes what was to be reduced, and `# takes` the one
that uses it. Each function returns a step, its arguments, and the options of `dj.check`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax import lax

import distjax as dj

R, ROWS, SIZE, CLASSES = 4, 8, 5, 3
AXIS = "replica"
_rng = np.random.default_rng(7)
X = _rng.normal(size=(ROWS, SIZE)).astype(np.float32)
Y = _rng.normal(size=ROWS).astype(np.float32)
LABELS = (np.arange(ROWS) * 2 % CLASSES).astype(np.int32)
WEIGHTS = _rng.uniform(0.2, 2.0, ROWS).astype(np.float32)
PROGRAMS = []


def program(build):
    PROGRAMS.append(build)
    return build


def batch_of(strategy, *arrays):
    return next(iter(strategy.distribute_dataset([arrays])))


def weights(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32) / 2


# -- functional -------------------------------------------------------------------


@program
def weighted_mean_by_local_weights(strategy):
    def step(w, x, y, weight):
        def loss_of(w):
            errors = (x @ w - y) ** 2
            total = jnp.sum(errors * weight)
            return total / jnp.sum(weight)  # wrong

        loss, grads = jax.value_and_grad(loss_of)(w)
        loss, grads = lax.pmean((loss, grads), AXIS)
        return w - 0.1 * grads, loss

    return step, (weights(SIZE), *batch_of(strategy, X, Y, WEIGHTS)), {"strategy": strategy}


@program
def gradient_norm_of_the_local_gradient(strategy):
    def step(w, x, y):
        grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        norm = jnp.sqrt(jnp.sum(grads**2))  # wrong
        grads = lax.pmean(grads, AXIS)
        scale = jnp.minimum(1.0, 0.5 / norm)
        return w - 0.1 * scale * grads

    return step, (weights(SIZE), *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def decay_inside_of_a_sum(strategy):
    def step(w, x, y):
        def loss_of(w):
            fit = jnp.sum((x @ w - y) ** 2) / ROWS
            return fit + 0.1 * jnp.sum(w**2)  # wrong

        grads = lax.psum(jax.grad(loss_of)(w), AXIS)
        return w - 0.1 * grads

    return step, (weights(SIZE), *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def bias_is_not_reduced(strategy):
    def step(params, x, y):
        def loss_of(params):
            return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

        grads = jax.grad(loss_of)(params)  # makes
        grads = {**grads, "w": lax.pmean(grads["w"], AXIS)}
        rate = 0.1
        w = params["w"] - rate * grads["w"]
        b = params["b"] - rate * grads["b"]  # takes
        return {"w": w, "b": b}

    params = {"w": weights(SIZE), "b": jnp.float32(0.3)}
    return step, (params, *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def local_standardization_of_targets(strategy):
    def step(w, x, y):
        targets = (y - jnp.mean(y)) / (jnp.std(y) + 0.1)  # wrong

        def loss_of(w):
            prediction = jnp.tanh(x @ w)
            return jnp.mean((prediction - targets) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * lax.pmean(grads, AXIS), lax.pmean(loss, AXIS)

    return step, (weights(SIZE), *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def focal_weight_of_the_local_accuracy(strategy):
    def step(w, x, labels):
        logits = x @ w
        accuracy = jnp.mean((logits.argmax(-1) == labels).astype(jnp.float32))  # makes

        def loss_of(w):
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
            weight = 1.0 - 0.5 * accuracy
            return weight**2 * losses.mean()  # takes

        grads = lax.pmean(jax.grad(loss_of)(w), AXIS)
        return w - 0.3 * grads

    args = weights(SIZE, CLASSES), *batch_of(strategy, X, LABELS)
    return step, args, {"strategy": strategy}


def thresholds(labels):
    counts = jax.nn.one_hot(labels, CLASSES).sum(0)  # wrong: thresholds_of_local_counts
    status = counts / (1.0 + counts.max())
    return status / (2.0 - status)


@program
def thresholds_of_local_counts(strategy):
    def step(w, x, labels):
        def loss_of(w):
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
            weight = thresholds(labels)[labels]
            return jnp.mean(weight * losses)

        return w - 0.3 * lax.pmean(jax.grad(loss_of)(w), AXIS)

    args = weights(SIZE, CLASSES), *batch_of(strategy, X, LABELS)
    return step, args, {"strategy": strategy}


def distances(a, b):
    return jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-3)


@program
def nearest_of_own_rows(strategy):
    def step(w, x):
        def loss_of(w):
            z = jnp.tanh(x @ w)
            apart = distances(z, z)  # wrong
            own = jnp.eye(len(z))
            return jnp.mean(jnp.min(apart + 9.0 * own, axis=1))

        return w - 0.1 * lax.pmean(jax.grad(loss_of)(w), AXIS)

    return step, (weights(SIZE, CLASSES), *batch_of(strategy, X)), {"strategy": strategy}


# -- variables and dj.optim ---------------------------------------------------------


@program
def optimizer_that_sums(strategy):
    with strategy.scope():
        w = dj.Variable(weights(SIZE), name="w")
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), reduce_op="sum")  # wrong
        optimizer.init([w])

    def step(x, y):
        loss_of = lambda w: jnp.mean((x @ w - y) ** 2)
        grads = jax.grad(loss_of)(w.value)
        optimizer.apply_gradients([(grads, w)])

    return step, batch_of(strategy, X, Y), {"strategy": strategy}


@program
def total_added_by_every_replica(strategy):
    with strategy.scope():
        seen = dj.Variable(
            jnp.float32(2),
            name="seen",
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )

    def step(x):
        count = dj.get_replica_context().all_reduce("sum", jnp.float32(len(x)))
        seen.assign_add(count)  # wrong
        return count

    return step, batch_of(strategy, X), {"strategy": strategy}


@program
def moving_average_of_a_local_maximum(strategy):
    with strategy.scope():
        largest = dj.Variable(
            jnp.ones(SIZE), name="largest", trainable=False, aggregation=dj.VariableAggregation.MEAN
        )

    def step(x):
        maximum = jnp.abs(x).max(0)  # makes
        largest.assign(0.9 * largest.value + 0.1 * maximum)  # takes

    return step, batch_of(strategy, X), {"strategy": strategy}


@program
def loss_is_reduced_before_its_square_root(strategy):
    with strategy.scope():
        w = dj.Variable(weights(SIZE), name="w")
        optimizer = dj.optim.Optimizer(optax.adam(0.01))
        optimizer.init([w])

    def step(x, y):
        def loss_of(w):
            return jnp.sqrt(jnp.mean((x @ w - y) ** 2))  # wrong

        loss, grads = jax.value_and_grad(loss_of)(w.value)
        optimizer.apply_gradients([(grads, w)])
        return dj.get_replica_context().all_reduce("mean", loss)

    return step, batch_of(strategy, X, Y), {"strategy": strategy}


# -- linen ------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers."""

    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)  # wrong: linen_batch_norm_is_local
        return nn.Dense(CLASSES)(nn.tanh(x))


def linen_state(tx):
    net = Net()
    params = net.init(jax.random.key(0), X)["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def cross_entropy(state, params, x, labels):
    logits = state.apply_fn({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@program
def linen_sums_means(strategy):
    def step(state, x, labels):
        loss_of = lambda params: cross_entropy(state, params, x, labels).mean()
        loss, grads = jax.value_and_grad(loss_of)(state.params)
        grads = lax.psum(grads, AXIS)  # wrong
        return state.apply_gradients(grads=grads), lax.pmean(loss, AXIS)

    args = linen_state(optax.sgd(0.1, momentum=0.9)), *batch_of(strategy, X, LABELS)
    return step, args, {"strategy": strategy}


@program
def linen_scales_by_the_local_loss(strategy):
    def step(state, x, labels):
        loss_of = lambda params: cross_entropy(state, params, x, labels).mean()
        loss, grads = jax.value_and_grad(loss_of)(state.params)  # makes
        grads = lax.pmean(grads, AXIS)
        rate = 1.0 / (1.0 + loss)  # takes
        grads = jax.tree.map(lambda g: rate * g, grads)
        state = state.apply_gradients(grads=grads)
        return state.replace(step=state.step), lax.pmean(loss, AXIS)

    args = linen_state(optax.sgd(0.1)), *batch_of(strategy, X, LABELS)
    return step, args, {"strategy": strategy}


@program
def linen_batch_norm_is_local(strategy):
    net = Net(norm=True)
    variables = net.init(jax.random.key(0), X)

    def step(variables, x, labels):
        def loss_of(params):
            all_of = {"params": params, "batch_stats": variables["batch_stats"]}
            logits, new = net.apply(all_of, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        grads, new = jax.grad(loss_of, has_aux=True)(variables["params"])
        grads, new = lax.pmean((grads, new), AXIS)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, **new}

    return step, (variables, *batch_of(strategy, X, LABELS)), {"strategy": strategy}


# -- NNX ----------------------------------------------------------------------------


def nnx_model():
    model = nnx.Sequential(
        nnx.Linear(SIZE, 6, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(6, 1, rngs=nnx.Rngs(1))
    )
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@program
def nnx_clips_before_the_reduction(strategy):
    model, optimizer = nnx_model()

    def step(model, optimizer, x, y):
        loss_of = lambda model: jnp.mean((model(x)[:, 0] - y) ** 2)
        loss, grads = nnx.value_and_grad(loss_of)(model)
        grads = jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), grads)  # wrong
        grads = lax.pmean(grads, AXIS)
        optimizer.update(model, grads)
        return lax.pmean(loss, AXIS)

    return step, (model, optimizer, *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def nnx_penalty_counts_for_every_replica(strategy):
    model, _ = nnx_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss_of(model):
            fit = jnp.sum((model(x)[:, 0] - y) ** 2) / ROWS
            penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
            return fit + 0.05 * penalty  # wrong

        grads = nnx.grad(loss_of)(model)
        optimizer.update(model, lax.psum(grads, AXIS))

    return step, (model, optimizer, *batch_of(strategy, X, Y)), {"strategy": strategy}


@program
def nnx_contrasts_with_own_rows(strategy):
    model, _ = nnx_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    def step(model, optimizer, x):
        def loss_of(model):
            hidden = model.layers[0](x)
            similar = hidden @ hidden.T  # wrong
            return -jnp.mean(jax.nn.log_softmax(similar, axis=1).diagonal())

        grads = lax.pmean(nnx.grad(loss_of)(model), AXIS)
        optimizer.update(model, grads)

    return step, (model, optimizer, *batch_of(strategy, X)), {"strategy": strategy}


# -- pmap -----------------------------------------------------------------------------


@program
def pmap_averages_quotients(strategy):
    def step(w, x, labels):
        right = (x @ w).argmax(-1) == labels
        of_class = labels == 0
        recall = jnp.sum(right & of_class) / jnp.maximum(1, jnp.sum(of_class))  # wrong
        return w, lax.pmean(recall, "batch")

    w = weights(SIZE, CLASSES)
    x, labels = X.reshape(R, -1, SIZE), LABELS.reshape(R, -1)
    return (
        dj.pmap(step, axis_name="batch", in_axes=(None, 0, 0)),
        (w, x, labels),
        {"batch_argnums": (1, 2)},
    )


@program
def pmap_forgets_the_gradient(strategy):
    def step(w, x, y):
        loss_of = lambda w: jnp.mean((x @ w - y) ** 2)
        loss, grads = jax.value_and_grad(loss_of)(w)  # makes
        loss = lax.pmean(loss, "batch")
        new = w - 0.1 * grads  # takes
        return new, loss

    w = jnp.broadcast_to(weights(SIZE), (R, SIZE))
    x, y = X.reshape(R, -1, SIZE), Y.reshape(R, -1)
    return dj.pmap(step, axis_name="batch"), (w, x, y), {"batch_argnums": (1, 2)}


@program
def pmap_divides_by_the_replicas_twice(strategy):
    def step(w, x, y):
        grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        grads = lax.pmean(grads, "batch")
        grads = grads / lax.axis_size("batch")  # wrong
        return w - 0.1 * grads

    w = jnp.broadcast_to(weights(SIZE), (R, SIZE))
    x, y = X.reshape(R, -1, SIZE), Y.reshape(R, -1)
    return dj.pmap(step, axis_name="batch"), (w, x, y), {"batch_argnums": (1, 2)}


@program
def accumulation_sums_twice(strategy):
    def step(w, x, y):
        def body(total, row):
            x, y = row
            grads = jax.grad(lambda w: (x @ w - y) ** 2)(w)
            return total + lax.pmean(grads, AXIS), None

        total, _ = lax.scan(body, jnp.zeros_like(w), (x, y))
        mean = lax.psum(total, AXIS) / len(x)  # wrong
        return w - 0.1 * mean

    return step, (weights(SIZE), *batch_of(strategy, X, Y)), {"strategy": strategy}
