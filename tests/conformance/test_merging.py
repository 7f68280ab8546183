"""Laws of merge_call: all replicas pause, one function sees them all."""

import jax.numpy as jnp
import pytest
from jax import lax

import distjax as dj
from distjax.errors import MergeError


def merge(fn, *args, **kwargs):
    return dj.get_replica_context().merge_call(fn, args=args, kwargs=kwargs)


def test_the_function_gets_the_strategy_first(strategy):
    seen = []
    strategy.run(lambda: merge(lambda s, *a, **k: seen.append((s, a, k)), 1, two=2))
    assert set(map(str, seen)) == {str((strategy, (1,), {"two": 2}))}
    assert seen[0][0] is strategy


def test_r095_keyword_arguments_are_passed_through(strategy):
    out = strategy.run(lambda: merge(lambda s, test_arg: test_arg, test_arg="foo"))
    assert out == "foo"


def test_a_bare_collective_that_only_one_locality_meets():
    """The second look, with every value per replica, would not see it."""
    collect = lambda s, x: x if isinstance(x, dj.PerReplica) else lax.psum(x, "replica")
    total = lambda x: dj.get_replica_context().all_reduce("sum", x)
    with pytest.raises(MergeError, match="needs strategy.reduce to combine values of replicas"):
        dj.VirtualStrategy(2).run(lambda x: merge(collect, total(x)), args=(jnp.float32(1),))


def test_a_bare_collective_in_a_merge_function(strategy):
    """Decision 29."""
    for op in (lax.psum, lax.pmean, lax.pmax, lax.all_gather):

        def collect(strategy, x, op=op):
            return op(x, "replica")

        run = lambda collect=collect: strategy.run(lambda: merge(collect, jnp.float32(1)))
        if strategy.axis_name is None:  # the default strategy calls: JAX's own error
            with pytest.raises(NameError, match="unbound axis name: replica"):
                run()
            continue
        with pytest.raises(MergeError) as info:
            run()
        text = str(info.value)
        first = text.splitlines()[0]
        assert "collect needs strategy.reduce to combine values of replicas" in first
        assert __file__ in text and "strategy.reduce('sum', x)" in text
