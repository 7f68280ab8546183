"""The default context in a jax.pmap or shard_map of the user: it reduces nothing, and says so."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import distjax as dj

ROWS = np.arange(8, dtype=np.float32)


def all_reduce(x):
    return dj.get_replica_context().all_reduce("mean", x)


def all_gather(x):
    return dj.get_replica_context().all_gather(x[None], 0)


def merge_call(x):
    return dj.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), args=(x,))


def optimizer(x):
    tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.sgd(1.0))
    return tx.update(x, tx.init(x))[0]


def sharded(fn, axis_names=("replica", "model")):
    mesh = jax.make_mesh((4, 2), ("replica", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = P(axis_names)
    names = set(axis_names)
    return jax.jit(
        jax.shard_map(
            lambda x: fn(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names
        )
    )


@pytest.mark.parametrize("wrap", [jax.pmap, sharded], ids=["pmap", "shard_map"])
@pytest.mark.parametrize("fn", [all_reduce, all_gather, merge_call, optimizer])
def test_a_reduction_that_ignores_the_devices_warns(fn, wrap):
    name = "all_reduce" if fn is optimizer else fn.__name__
    text = (
        f"{name} in a jax.pmap or jax.shard_map needs the strategy whose replicas it combines.\n"
        "  Got: no strategy, and 8 devices that each keep their own value.\n"
        "  Why: the default strategy has one replica, and knows no axis of jax.pmap or shard_map.\n"
        "  Fix: dj.pmap in place of jax.pmap, or strategy.run(fn, args); or, where it is meant: "
        "with dj.expect(reason)"
    )
    with pytest.warns(dj.errors.ReductionWarning, match=f"^{re.escape(text)}$"):
        wrap(lambda x: fn(x))(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dj.pmap(fn)(ROWS)


@pytest.mark.filterwarnings("error::distjax.errors.ReductionWarning")
def test_what_may_be_meant_does_not_warn():
    def own_keys(key):
        context = dj.get_replica_context()
        key = jax.random.fold_in(context.fold_in(key), context.replica_id_in_sync_group)
        return jax.random.normal(key) / context.num_replicas_in_sync

    def own_mean(x):
        return jax.lax.pmean(dj.losses.average_loss(x), "i")

    def expected(x):
        with dj.expect("each device has a model of its own"):
            return all_reduce(x)

    jax.pmap(own_keys)(jax.random.split(jax.random.key(0), 8))
    assert jax.pmap(own_mean, axis_name="i")(ROWS[:, None]).tolist() == [3.5] * 8
    assert jax.pmap(expected)(ROWS).tolist() == ROWS.tolist()
    assert jax.vmap(lambda x: all_reduce(x), axis_name="replica")(ROWS).tolist() == ROWS.tolist()
    assert jax.pmap(lambda x: all_reduce(x))(ROWS[:1]).tolist() == [0]
    sharded(lambda x: all_reduce(x), ("model",))(ROWS)  # a model's own, in one replica


@pytest.mark.filterwarnings("error::distjax.errors.ReductionWarning")
def test_reductions_of_a_strategy_do_not_warn(strategy):
    total = strategy.run(lambda: all_reduce(jnp.float32(2)))
    assert float(total) == 2
    assert float(strategy.run(lambda: merge_call(jnp.float32(2)))) == (
        2 * strategy.num_replicas_in_sync
    )
    assert float(jax.jit(all_reduce)(2.0)) == float(dj.jit(all_reduce)(2.0)) == 2
