"""R replicas train as plain optax does on one device with the whole batch."""

import jax
import numpy as np
import optax
import pytest

import distjax as dj
from tests.optim.regression import (
    assert_close,
    loss_fn,
    make_data,
    make_variables,
    plain,
    split,
    train,
    values,
)

WEIGHTS_ONLY = {"b": False, "w": True}
TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.05),
    "adamw_schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1.0)),
    "masked": optax.chain(
        optax.masked(optax.trace(0.9), WEIGHTS_ONLY),
        optax.masked(optax.add_decayed_weights(0.1), WEIGHTS_ONLY),
        optax.scale(-0.1),
    ),
    "multi_transform": optax.multi_transform(
        {"slow": optax.sgd(0.01, momentum=0.5), "fast": optax.adam(0.1)},
        {"b": "fast", "w": "slow"},
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 4), momentum=0.9
    ),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=2),
    "lion": optax.lion(0.01),
    "lookahead_free": optax.apply_if_finite(optax.rmsprop(0.01), 3),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_equals_optax_on_one_device(pair, name):
    tx = TRANSFORMATIONS[name]
    variables, _ = train(pair, tx, 5)
    assert_close(variables, plain(tx, 5))


@pytest.mark.pairwise
@pytest.mark.api_row("Optimizer.apply_gradients in a replica context")
@pytest.mark.parametrize("name", ["adam", "clip_by_global_norm"])
def test_on_every_strategy(strategy, how, name):
    tx = TRANSFORMATIONS[name]
    variables, _ = train(strategy, tx, 3, how)
    assert_close(variables, plain(tx, 3))


@pytest.mark.api_row("Optimizer.apply_gradients in a replica context")
def test_sums_by_default(strategy, how):
    """Gradients of the local means are summed: R times the gradient of the global mean."""
    count = strategy.num_replicas_in_sync
    with dj.expect("the sum of means is what is tested"):
        variables, _ = train(strategy, optax.sgd(0.01), 3, how, reduce_op="sum")
    assert_close(variables, plain(optax.sgd(0.01 * count), 3))


def test_the_norm_that_clips_is_the_global_one(pair):
    """Per-replica gradients (3, 0) and (-3, 4): the sum is (0, 4), of norm 4, not 3 or 5."""
    with pair.scope():
        w = dj.Variable(np.zeros(2, np.float32), name="w")
    optimizer = dj.optim.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    optimizer.init([w])
    g = pair.distribute_values_from_function(
        lambda ctx: np.array([[3.0, 0.0], [-3.0, 4.0]], np.float32)[ctx.replica_id_in_sync_group]
    )
    pair.run(lambda g: optimizer.apply_gradients([(g, w)]), args=(g,))
    np.testing.assert_allclose(w.value, [0.0, -1.0], rtol=1e-6)


def test_an_extra_argument_reaches_the_transformation(pair, how):
    """reduce_on_plateau scales by 0.5 once the value has not improved for two steps."""
    tx = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    with pair.scope():
        w = dj.Variable(0.0, name="w")
    optimizer = dj.optim.Optimizer(tx, "mean")
    optimizer.init([w])

    def replica_step(value):
        loss = dj.get_replica_context().all_reduce("mean", value)
        optimizer.apply_gradients([(np.float32(-1), w)], value=loss)

    step = how(lambda value: pair.run(replica_step, args=(value,)))
    seen = []
    for _ in range(5):
        step(np.float32(3))
        seen.append(float(w.value))
    # The plateau is seen at the third value that is no better than the first.
    np.testing.assert_allclose(seen, [1.0, 2.0, 2.5, 3.0, 3.25])


def test_gradients_of_a_cross_replica_step(strategy, how):
    """Gradients returned by run (T) are applied outside of it: distributed_apply."""
    variables = make_variables(strategy)
    optimizer = dj.optim.Optimizer(optax.adam(0.05), "mean")
    optimizer.init(variables)

    def gradients(x, y):
        return jax.grad(loss_fn)(values(variables), x, y)

    def step(x, y):
        grads = strategy.run(gradients, args=(x, y))
        optimizer.distributed_apply(strategy, [(grads, variables)])

    step = how(step)
    for i in range(3):
        step(*(split(strategy, array) for array in make_data(i)))
    assert_close(variables, plain(optax.adam(0.05), 3))
