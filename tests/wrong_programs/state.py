"""State that comes back different: forgotten reductions."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import distjax as dj
from tests.wrong_programs.program import (
    ERROR,
    RUN,
    SILENT,
    WARNING,
    Case,
    ctx,
    first_argument,
    gradient,
    inputs,
    loss_of,
    mean,
    program,
    weights,
)

DIFFERENT = "state that comes back different"
LATER = "the first trace cannot know that a result is fed back"


def tree_loss(params, x):
    return loss_of(params["w"], x) + params["b"] ** 2


def params():
    return {"w": weights(), "b": np.float32(0.1)}


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@program(WARNING, DIFFERENT, "local training is legal")
def forgotten_mean_of_a_tree(s, right):
    def step(params, x):
        grads = jax.grad(tree_loss)(params, x)
        return descend(params, mean(grads) if right else grads)

    return Case(step, (params(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal")
def forgotten_mean_of_one_leaf(s, right):
    def step(params, x):
        grads = jax.grad(tree_loss)(params, x)
        w = mean(grads["w"]) if right else grads["w"]
        return descend(params, {"w": w, "b": mean(grads["b"])})

    return Case(step, (params(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal")
def forgotten_after_a_change_of_dtype(s, right):
    def step(params, x):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        grads = jax.grad(tree_loss)(half, x.astype(jnp.bfloat16))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return descend(params, mean(grads) if right else grads)

    return Case(step, (params(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal")
def forgotten_under_a_new_key(s, right):
    def step(params, x):
        loss, grads = jax.value_and_grad(tree_loss)(params, x)
        return {"params": descend(params, mean(grads) if right else grads), "loss": loss}

    feed = lambda out, args: (out["params"], args[1])
    return Case(step, (params(), inputs(s)), feed)


@program(WARNING, DIFFERENT, "local training is legal", more=True)
def forgotten_beside_the_local_gradients(s, right):
    def step(params, x):
        grads = jax.grad(tree_loss)(params, x)
        return descend(params, mean(grads) if right else grads), grads

    return Case(step, (params(), inputs(s)), lambda out, args: (out[0], args[1]))


@program(WARNING, DIFFERENT, "statistics of each replica are legal")
def batch_statistics_of_each_replica(s, right):
    def step(stats, x):
        batch = jnp.mean(x, axis=0)
        batch = mean(batch) if right else batch
        return {"mean": 0.9 * stats["mean"] + 0.1 * batch}

    return Case(step, ({"mean": weights()}, inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "moments of each replica are legal")
def updates_reduced_in_place_of_gradients(s, right):
    tx = optax.adam(0.1)

    def step(w, state, x):
        grads = gradient(w, x)
        updates, state = tx.update(mean(grads) if right else grads, state)
        return optax.apply_updates(w, updates if right else mean(updates)), state

    return Case(step, (weights(), tx.init(jnp.asarray(weights())), inputs(s)))


@program(WARNING, DIFFERENT, "local training is legal")
def learning_rate_by_the_local_loss(s, right):
    def step(params, x):
        loss, grads = jax.value_and_grad(tree_loss)(params, x)
        rate = jnp.where((mean(loss) if right else loss) > 1.0, 0.1, 0.01)
        return jax.tree.map(lambda p, g: p - rate * g, params, mean(grads))

    return Case(step, (params(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "noise of each replica is legal")
def noise_added_after_the_mean(s, right):
    def step(params, key, x):
        key = key if right else ctx().fold_in(key)
        grads = mean(jax.grad(tree_loss)(params, x))
        noise = 0.01 * jax.random.normal(key, grads["w"].shape)
        return descend(params, {**grads, "w": grads["w"] + noise})

    return Case(step, (params(), jax.random.key(0), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal")
def sum_in_the_loss_and_none_of_the_gradient(s, right):
    def step(params, x):
        reduced = lambda params: mean(tree_loss(params, x))
        loss, grads = jax.value_and_grad(reduced)(params)
        return descend(params, mean(grads) if right else grads), loss

    return Case(step, (params(), inputs(s)), lambda out, args: (out[0], args[1]))


@program(WARNING, DIFFERENT, LATER)
def one_lone_array(s, right):
    def step(w, x):
        grads = gradient(w, x)
        return w - 0.1 * (mean(grads) if right else grads)

    return Case(step, (weights(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, LATER)
def flattened_leaves(s, right):
    def step(leaves, x):
        w, b = leaves
        grads = jax.grad(tree_loss)({"w": w, "b": b}, x)
        grads = mean(grads) if right else grads
        return w - 0.1 * grads["w"], b - 0.1 * grads["b"]

    start = [weights(), np.float32(0)]
    return Case(step, (start, inputs(s)), lambda out, args: (list(out), args[1]))


@program(WARNING, DIFFERENT, LATER)
def repacked_by_the_loop(s, right):
    def step(params, x):
        grads = jax.grad(tree_loss)(params, x)
        new = descend(params, mean(grads) if right else grads)
        return new["w"], new["b"]

    repack = lambda out, args: ({"w": out[0], "b": out[1]}, args[1])
    return Case(step, (params(), inputs(s)), repack)


# -- more ----------------------------------------------------------------------


@program(ERROR, DIFFERENT, more=True)
def train_state_of_flax(s, right):
    def step(state, x):
        grads = jax.grad(tree_loss)(state.params, x)
        return state.apply_gradients(grads=mean(grads) if right else grads)

    start = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    return Case(step, (start, inputs(s)), first_argument)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    b: Any


class Weights(NamedTuple):
    w: Any
    b: Any


def _kept(make, s, right):
    def step(state, x):
        grads = jax.grad(tree_loss)({"w": state.w, "b": state.b}, x)
        grads = mean(grads) if right else grads
        return make(state.w - 0.1 * grads["w"], state.b - 0.1 * grads["b"])

    return Case(step, (make(weights(), np.float32(0)), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal", more=True)
def a_dataclass(s, right):
    return _kept(Model, s, right)


@program(WARNING, DIFFERENT, "local training is legal", more=True)
def a_named_tuple(s, right):
    return _kept(Weights, s, right)


@program(WARNING, DIFFERENT, LATER, more=True)
def a_dataclass_as_its_fields(s, right):
    def step(state, x):
        grads = jax.grad(tree_loss)({"w": state.w, "b": state.b}, x)
        grads = mean(grads) if right else grads
        return {"w": state.w - 0.1 * grads["w"], "b": state.b - 0.1 * grads["b"]}

    feed = lambda out, args: (Model(**out), args[1])
    return Case(step, (Model(weights(), np.float32(0)), inputs(s)), feed)


@program(WARNING, DIFFERENT, LATER, more=True)
def momentum_of_local_gradients(s, right):
    def step(w, velocity, x):
        grads = mean(gradient(w, x)) if right else gradient(w, x)
        velocity = 0.9 * velocity + grads
        return w - 0.1 * (velocity if right else mean(velocity)), velocity

    feed = lambda out, args: (*out, args[2])
    return Case(step, (weights(), np.zeros(3, np.float32), inputs(s)), feed)


@program(WARNING, DIFFERENT, LATER, more=True)
def average_of_local_losses_kept(s, right):
    def step(smooth, w, x):
        loss = loss_of(w, x)
        return 0.9 * smooth + 0.1 * (mean(loss) if right else loss)

    return Case(step, (np.float32(0), weights(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, LATER, more=True)
def a_temperature_learned_apart(s, right):
    def step(t, x):
        grad = jax.grad(lambda t: jnp.mean(jax.nn.logsumexp(x * t, axis=1)))(t)
        return t - 0.1 * (mean(grad) if right else grad)

    return Case(step, (1.0, inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal", more=True)
def accumulated_and_never_reduced(s, right):
    def step(params, x):
        halves = x.reshape(2, -1, 3)
        add = lambda a, x: (jax.tree.map(jnp.add, a, jax.grad(tree_loss)(params, x)), None)
        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), halves)
        return descend(params, mean(grads) if right else grads)

    return Case(step, (params(), inputs(s)), first_argument)


@program(WARNING, DIFFERENT, "local training is legal", more=True)
def reduced_only_when_logging(s, right):
    def step(params, x, log):
        grads = jax.grad(tree_loss)(params, x)
        reduced = mean(grads)
        grads = (
            reduced if right else jax.tree.map(lambda a, b: jnp.where(log, a, b), reduced, grads)
        )
        return descend(params, grads)

    return Case(step, (params(), inputs(s), np.bool_(True)), first_argument)


@program(ERROR, "needs a predicate that is equal", more=True)
def a_loop_left_by_the_local_loss(s, right):
    def step(w, x):
        def unfinished(w):
            loss = loss_of(w, x)
            return (mean(loss) if right else loss) > 0.9

        return jax.lax.while_loop(unfinished, lambda w: w - 0.01 * mean(gradient(w, x)), w)

    return Case(step, (weights(), inputs(s)))


@program(ERROR, "needs a predicate that is equal", more=True)
def a_step_skipped_by_the_local_gradient(s, right):
    def step(w, x):
        grads = gradient(w, x)
        finite = jnp.all(jnp.isfinite(mean(grads) if right else grads))
        return jax.lax.cond(finite, lambda: w - 0.1 * mean(grads), lambda: w)

    return Case(step, (weights(), inputs(s)))


@program(ERROR, "needs an aggregation method|must specify an aggregation", more=True)
def a_variable_without_aggregation(s, right):
    with s.scope():
        w = dj.Variable(
            weights(), name="w", aggregation=dj.VariableAggregation.MEAN if right else None
        )

    def step(x):
        w.assign_sub(0.1 * gradient(w.value, x))

    return Case(step, (inputs(s),))


@program(ERROR, "needs to return what it computes", more=True)
def parameters_updated_outside_of_the_arguments(s, right):
    outside = {"w": weights()}

    def step(w, x):
        new = (w if right else outside["w"]) - 0.1 * mean(gradient(w, x))
        if not right:
            outside["w"] = new
        return new

    return Case(step, (weights(), inputs(s)), first_argument)


@program(ERROR, "needs to return values of one replica", more=True)
def a_closed_over_value_of_all_replicas(s, right):
    x = inputs(s)

    def step(given):
        return given if right else x

    return Case(step, (x,))


@program(
    SILENT,
    "",
    "state that comes back as it was may be a step that was tried and not taken: line searches, "
    "unrolled steps of bilevel programs, statistics of a network that another one learns by",
    unseen="one replica drops them, too",
)
def moments_dropped(s, right):
    tx = optax.adam(0.1)

    def step(w, state, x):
        updates, new = tx.update(mean(gradient(w, x)), state)
        return optax.apply_updates(w, updates), new if right else state

    return Case(step, (weights(), tx.init(jnp.asarray(weights())), inputs(s)))


@program(SILENT, "", RUN, more=True)
def one_step_of_a_lone_array(s, right):
    def step(w, x):
        grads = gradient(w, x)
        return w - 0.1 * (mean(grads) if right else grads)

    return Case(step, (weights(), inputs(s)))
