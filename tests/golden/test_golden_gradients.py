"""Derivatives through all_reduce and all_gather, as TensorFlow has them (decision 8)."""

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from tests.golden.closed_form import numbers
from tests.golden.distjax_side import locals_of, make_strategy, make_variable, numbers_per_replica
from tests.golden.records import check, load

RECORDS = load("gradients")


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, lambda case: ask(**case))


def ask(strategy, op, fn):
    strategy = make_strategy(strategy)
    x = numbers_per_replica(strategy, [3], "float32")
    with strategy.scope():
        w = make_variable(numbers([3], seed=5), name="w")

    def replica(x):
        context = dj.get_replica_context()
        weight = context.replica_id_in_sync_group * 2 + 1.0

        def scalar(x, w):
            if fn == "linear":
                return jnp.sum(weight * context.all_reduce(op, x))
            if fn == "square":
                return jnp.sum(weight * context.all_reduce(op, x * x) ** 2)
            if fn == "reduced_twice":
                return jnp.sum(weight * context.all_reduce(op, x * context.all_reduce(op, x)))
            if fn == "loss":
                return context.all_reduce(op, jnp.sum(x**3))
            if fn == "variable":
                return jnp.sum(weight * context.all_reduce(op, x * w))
            gathered = context.all_gather(x, axis=0)
            return jnp.sum(weight * gathered * gathered)

        return jax.grad(scalar, argnums=1 if fn == "variable" else 0)(x, w.value)

    return locals_of(strategy, strategy.run(replica, (x,)))
