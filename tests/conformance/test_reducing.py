"""Laws of reductions and gathers, across replicas and inside one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import everywhere, ids, local, pads, per_replica


def context():
    return dj.get_replica_context()


# -- in cross-replica context ----------------------------------------------------


@pytest.mark.api_row("reduce (op, value, axis)")
@pytest.mark.pairwise
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_over_replicas(strategy, how, op):
    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, [np.array([r, 2.0 * r], np.float32) for r in range(n)])
    total = n * (n - 1) / 2
    expected = total / (n if op == "mean" else 1)
    out = how(lambda x: strategy.reduce(op, x))(x)
    np.testing.assert_allclose(out, [expected, 2 * expected])
    assert out.dtype == jnp.float32


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_r097_rows_of_unequal_length_by_mask(strategy, how, dtype):
    """Replica r holds [r] * (r + 1): shapes are equal here (decision 16), masks say what counts."""
    n = strategy.num_replicas_in_sync
    x, mask = pads(strategy, [[r] * (r + 1) for r in range(n)], dtype)
    out = how(lambda x, m: strategy.reduce("sum", x, axis=0, mask=m))(x, mask)
    assert int(out) == sum(r * (r + 1) for r in range(n))
    assert out.dtype == dtype


@pytest.mark.api_row("reduce (op, value, axis)")
def test_r099_axis_reduces_within_and_across(strategy, how):
    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, [np.array([1.0, 2.0], np.float32)] * n)
    reduce = how(lambda op, x: strategy.reduce(op, x, axis=0))
    assert float(reduce("mean", x)) == 1.5
    assert float(reduce("sum", x)) == 3.0 * n


class Lookalike:
    name = "SUM"


UNKNOWN_OPS = [
    "MAX",
    "",
    3,
    dj.VariableAggregation.NONE,
    dj.VariableAggregation.ONLY_FIRST_REPLICA,
    jnp.sum,
    Lookalike(),
    dj.VariableSynchronization.ON_READ,
]


def test_unknown_ops(strategy):
    """Decision 22: an error that lists what there is, wherever an op is taken."""
    text = "^op needs a ReduceOp: ReduceOp.SUM, ReduceOp.MEAN, 'sum', 'mean' "
    calls = [
        lambda op: strategy.reduce(op, 1.0),
        lambda op: strategy.extended.reduce_to(op, 1.0, None),
        lambda op: strategy.extended.batch_reduce_to(op, [(1.0, None)]),
        lambda op: strategy.run(lambda: dj.get_replica_context().all_reduce(op, 1.0)),
    ]
    for call in calls:
        for op in UNKNOWN_OPS:
            with pytest.raises(ValueError, match=text):
                call(op)


def test_trees_of_values(strategy, how):
    n = strategy.num_replicas_in_sync
    tree = {"a": [ids(strategy), None], "b": (per_replica(strategy, [np.ones(2)] * n),)}
    out = how(lambda t: strategy.reduce("mean", t))(tree)
    assert float(out["a"][0]) == (n - 1) / 2 and out["a"][1] is None
    np.testing.assert_array_equal(out["b"][0], [1, 1])


def test_the_count_of_examples_sums(strategy, how):
    """The example of decision 6: a step that returns x.shape[0] as an array, and sums it."""
    n = strategy.num_replicas_in_sync
    out = how(
        lambda x: strategy.reduce("sum", strategy.run(lambda x: jnp.float32(x.shape[0]), (x,)))
    )(np.ones((4, 2)))
    assert float(out) == 4.0 * n


def test_gather(strategy, how):
    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, [np.full((2, 1), r, np.int32) for r in range(n)])
    out = how(lambda x: strategy.gather(x, 0))(x)
    np.testing.assert_array_equal(out, np.repeat(np.arange(n), 2)[:, None])
    wide = how(lambda x: strategy.gather({"a": x}, axis=1))(x)["a"]
    np.testing.assert_array_equal(wide, [np.arange(n)] * 2)


# -- decision 6: a mirrored array counts as R equal copies -----------------------


def test_a_mirrored_array_is_r_equal_copies(strategy, how):
    """That the numbers do not depend on what is proved stands in `strategies/test_reduce.py`."""
    count, vector = strategy.num_replicas_in_sync, np.arange(3.0)

    def step():
        made = strategy.run(
            lambda: {"vector": jnp.arange(3.0), "int8": jnp.int8(100), "bool": jnp.asarray(True)}
        )
        x, small = made["vector"], made["int8"]
        return [
            (strategy.reduce("sum", x), count * vector),
            (strategy.extended.reduce_to("sum", x, None), count * vector),
            (strategy.reduce("mean", x), vector),
            (strategy.reduce("sum", x, axis=0), count * 3.0),
            (strategy.reduce("mean", x, axis=0), 1.0),
            (strategy.gather(x, 0), np.tile(vector, count)),
            (strategy.reduce("mean", small), 100.0),
            (strategy.reduce("sum", made["bool"]), count),
        ]

    for got, want in how(step)():
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)
    assert len(local(strategy, strategy.run(lambda: jnp.arange(3.0)))) == count


# -- in a replica --------------------------------------------------------------


def test_r139_sum_of_one_counts_the_replicas(strategy, how):
    out = how(lambda: strategy.run(lambda: context().all_reduce("sum", 1.0)))()
    assert float(out) == strategy.num_replicas_in_sync


@pytest.mark.api_row("all_reduce", "ReduceOp")
@pytest.mark.pairwise
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_every_strategy_reduces_in_a_replica_as_across(strategy, how, op):
    x = ids(strategy)
    inside = how(lambda x: strategy.run(lambda x: context().all_reduce(op, x), args=(x,)))(x)
    across = how(lambda x: strategy.reduce(op, x))(x)
    n = strategy.num_replicas_in_sync
    assert local(strategy, inside) == everywhere(
        strategy, n * (n - 1) / 2 / (n if op == "mean" else 1)
    )
    np.testing.assert_array_equal(inside, across)


def test_r145_r151_gathers_along_an_axis(strategy, how):
    """Shapes are equal on all replicas (decision 16)."""
    n = strategy.num_replicas_in_sync

    def fn(x):
        column = jnp.full((2, 1), x)
        return context().all_gather({"rows": column, "columns": [column]}, axis=0), (
            context().all_gather(column, axis=1)
        )

    first, wide = how(lambda x: strategy.run(fn, args=(x,)))(ids(strategy))
    expected = np.repeat(np.arange(n, dtype=np.float32), 2)[:, None]
    np.testing.assert_array_equal(first["rows"], expected)
    np.testing.assert_array_equal(first["columns"][0], expected)
    np.testing.assert_array_equal(wide, [np.arange(n)] * 2)


def test_r153_gradient_of_all_gather(strategy, how):
    n = strategy.num_replicas_in_sync
    c = per_replica(strategy, [np.float32(r + 1) for r in range(n)])

    def fn(c):
        x = jnp.array([[3.0], [5.0]])
        return jax.grad(lambda x: (context().all_gather(x, axis=1) * c).sum())(x)

    out = how(lambda c: strategy.run(fn, args=(c,)))(c)
    s = n * (n + 1) / 2
    assert local(strategy, out) == everywhere(strategy, [[s], [s]])


def test_fold_in_makes_keys_differ(strategy, how):
    n = strategy.num_replicas_in_sync
    key = jax.random.key(3)
    fn = lambda key: jax.random.key_data(context().fold_in(key))
    out = how(lambda key: strategy.run(fn, args=(key,)))(key)
    expected = [jax.random.key_data(jax.random.fold_in(key, r)).tolist() for r in range(n)]
    assert local(strategy, out) == expected
