"""A linen step written for `pmap` runs unchanged, and gives what it gives there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils
from jax import lax

import distjax as dj
from distjax.errors import LocalityError, LocalityWarning
from tests.flax.image_loop import make_batches
from tests.flax.linen_step import make_state, train_step

#: In one worker, which makes the curve of pmap once.
pytestmark = pytest.mark.xdist_group("flax linen")

NUM_REPLICAS = 4
BATCHES = make_batches(3)


def strategies():
    devices = jax.devices()[:NUM_REPLICAS]
    yield dj.MirroredStrategy(devices, axis_name="batch")
    yield dj.VirtualStrategy(NUM_REPLICAS, axis_name="batch")


def trained(strategy, state):
    losses = []
    for batch in strategy.distribute_dataset(BATCHES):
        state, metrics = strategy.run(train_step, args=(state, batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def under_pmap(state):
    step = jax.pmap(train_step, axis_name="batch", devices=jax.devices()[:NUM_REPLICAS])
    state, losses = jax_utils.replicate(state, jax.devices()[:NUM_REPLICAS]), []
    for batch in BATCHES:
        split = jax.tree.map(lambda x: x.reshape(NUM_REPLICAS, -1, *x.shape[1:]), batch)
        state, metrics = step(state, split)
        losses.append(float(metrics["loss"][0]))
    return state, losses


@pytest.fixture(scope="module")
def pmapped():
    return under_pmap(make_state())


@pytest.fixture(scope="module", params=[0, 1], ids=["mirrored", "virtual"])
def ours(request):
    """A strategy, and what it trains."""
    strategy = list(strategies())[request.param]
    with pytest.warns(LocalityWarning, match="batch_stats") as warned:
        state, losses = trained(strategy, make_state())
    assert len(warned) == 1  # for the first step, whose statistics went in equal
    return strategy, state, losses


def test_the_curve_is_that_of_pmap(pmapped, ours):
    _, state, losses = ours
    np.testing.assert_allclose(losses, pmapped[1], rtol=1e-4)
    stats = jax.tree.leaves(state.batch_stats, is_leaf=lambda x: isinstance(x, dj.PerReplica))
    assert all(isinstance(x, dj.PerReplica) for x in stats)
    for ours, theirs in zip(stats, jax.tree.leaves(pmapped[0].batch_stats), strict=True):
        np.testing.assert_allclose(ours.stacked, theirs, rtol=1e-4, atol=1e-6)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state.params))


def test_statistics_can_be_averaged_as_under_pmap(pmapped, ours):
    strategy, state, _ = ours
    devices = jax.devices()[:NUM_REPLICAS]
    cross_replica_mean = jax.pmap(lambda x: lax.pmean(x, "x"), "x", devices=devices)
    averaged = cross_replica_mean(jax.device_get(state.batch_stats))
    theirs = cross_replica_mean(pmapped[0].batch_stats)
    for a, b in zip(jax.tree.leaves(averaged), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    mean = averaged["BatchNorm_0"]["mean"]
    assert isinstance(mean, jax.Array) and mean.shape == (NUM_REPLICAS, 8)
    state = state.replace(batch_stats=strategy.per_replica(averaged))
    assert state.batch_stats["BatchNorm_0"]["mean"].shape == (8,)


def test_with_synchronized_statistics_the_curve_is_that_of_one_device():
    plain, expected = make_state(scaled=False), []
    step = jax.jit(lambda state, batch: train_step(state, batch, axis_name=None))
    for batch in BATCHES:
        plain, metrics = step(plain, batch)
        expected.append(float(metrics["loss"]))
    state, losses = trained(next(strategies()), make_state("batch", scaled=False))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_overflow_on_one_replica_is_skipped_by_all():
    strategy = next(strategies())
    state = make_state()
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    broken = dict(batch, image=batch["image"].map(jnp.copy))
    stacked = np.array(broken["image"].stacked)
    stacked[1] = np.inf
    broken["image"] = dj.PerReplica(stacked, broken["image"].topology)
    with pytest.warns(LocalityWarning, match="batch_stats"):  # no one synchronized them
        after, _ = strategy.run(train_step, args=(state, broken))
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(after.dynamic_scale.scale) == float(state.dynamic_scale.scale) / 2


def test_a_forgotten_pmean_is_refused():
    strategy = next(strategies())
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    with pytest.raises(LocalityError, match="takes state that is equal on every replica") as info:
        strategy.run(
            lambda state, batch: train_step(state, batch, axis_name=None)[0],
            args=(make_state(scaled=False), batch),
        )
    assert ".params" in str(info.value)


def test_replicated_trees_are_taken_in(pmapped):
    for strategy in strategies():
        taken = strategy.per_replica(pmapped[0])
        first = strategy.first(taken)
        assert isinstance(taken.params["Dense_1"]["bias"], dj.PerReplica)
        assert first.params["Dense_1"]["bias"].shape == (10,)
        for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(pmapped[0]), strict=True):
            np.testing.assert_array_equal(a, b)
        assert strategy.run(lambda s: s.step, args=(first,)) == len(BATCHES)
