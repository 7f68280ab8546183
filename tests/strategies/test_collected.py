"""A strategy that nobody needs any more is collected, with all that it has compiled."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

MAKES = {
    "virtual": lambda: dj.VirtualStrategy(2),
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "reference": lambda: dj.testing.ReferenceStrategy(2),
}


def use(strategy):
    with strategy.scope():
        v = dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.SUM)

    def step(x):
        v.assign_add(x)
        return dj.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), args=(x,))

    strategy.run(step, args=(jnp.ones(3),))
    strategy.extended.update(v, lambda v: v.assign_add(jnp.ones(3)))
    strategy.extended.reduce_to("mean", jnp.ones(3), v)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.usefixtures("collect_garbage")
def test_a_strategy_that_was_used_is_collected(make):
    strategy = make()
    use(strategy)
    seen = weakref.ref(strategy), weakref.ref(strategy.extended)
    del strategy
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
