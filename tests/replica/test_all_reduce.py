"""all_reduce and all_gather in a replica: values and derivatives (decisions 7, 8, 25)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import ids, local, per_replica


def context():
    return dj.get_replica_context()


def total(n):
    """Returns 0 + 1 + ... + (n - 1)."""
    return n * (n - 1) / 2


@pytest.mark.api_row("all_reduce")
def test_r133_sums_of_trees(pair, how):
    one = per_replica(pair, [np.float32(1), np.float32(3)])
    many = per_replica(pair, [np.array([39, 2.0]), np.array([3, 41.0])])
    out = how(lambda t: pair.run(lambda t: context().all_reduce("sum", t), args=(t,)))(
        {"a": one, "b": [many]}
    )
    assert local(pair, out["a"]) == [4.0, 4.0]
    assert local(pair, out["b"][0]) == [[42.0, 43.0]] * 2


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_r135_gradient_is_the_same_reduction(pair, how, op):
    c = per_replica(pair, [np.float32(1), np.float32(3)])

    def fn(x, c):
        return jax.grad(lambda x: context().all_reduce(op, x) * c)(x)

    out = how(lambda c: pair.run(fn, args=(2.0, c)))(c)
    assert local(pair, out) == ([4.0, 4.0] if op == "sum" else [2.0, 2.0])


@pytest.mark.parametrize("c", [4.0, 5.0])
def test_r137_gradient_on_one_replica(c):
    for strategy in (
        dj.OneDeviceStrategy(),
        dj.VirtualStrategy(1),
        dj.MirroredStrategy(jax.devices()[:1]),
        dj.get_strategy(),
    ):
        fn = lambda x: jax.grad(lambda x: context().all_reduce("sum", x) * c)(x)
        assert float(strategy.run(fn, args=(jnp.float32(1),))) == c


def test_decision_25_numbers_are_arrays_and_none_is_empty(pair, how):
    out = how(
        lambda: pair.run(lambda: context().all_reduce("sum", {"n": 2, "none": None, "l": []}))
    )()
    assert out["none"] is None and out["l"] == []
    assert isinstance(out["n"], jax.Array) and int(out["n"]) == 4
    assert pair.run(lambda: context().all_reduce("sum", None)) is None


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("number", [1, 1.0])
def test_the_result_of_a_number_is_not_weakly_typed(pair, how, op, number):
    out = how(lambda: pair.run(lambda: context().all_reduce(op, number)))()
    assert not out.weak_type


def test_r141_mean_of_integers(pair, how):
    x = per_replica(pair, [np.int32(1), np.int32(2)])
    out = how(lambda x: pair.run(lambda x: context().all_reduce("mean", x), args=(x,)))(x)
    assert out.dtype == jnp.float32 and float(out) == 1.5


def test_variables_are_reduced_by_what_the_replica_sees(pair):
    with pair.scope():
        m = dj.Variable(3.0)
        c = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )
    pair.run(lambda x: c.assign(x + 1), args=(ids(pair),))
    out = pair.run(lambda: context().all_reduce("sum", [m, c]))
    assert [float(x) for x in out] == [6.0, 3.0]


# -- all_gather ----------------------------------------------------------------


def test_r155_scalars_and_negative_axes(pair):
    with pytest.raises(ValueError, match="^all_gather needs a value with at least one axis"):
        pair.run(lambda x: context().all_gather(x, 0), args=(ids(pair),))
    with pytest.raises(ValueError, match="^all_gather needs an axis between 0 and 0"):
        pair.run(lambda: context().all_gather(jnp.ones(2), -1))
    with pytest.raises(ValueError, match="^all_gather needs an axis between 0 and 1"):
        pair.run(lambda: context().all_gather(jnp.ones((2, 2)), True))
    found = pair.run(lambda: context().all_gather(jnp.ones((2, 2)), np.int64(1)))
    assert found.shape == (2, 4)


def test_gather_of_keys(pair):
    out = pair.run(lambda: context().all_gather(context().fold_in(jax.random.key(0))[None], 0))
    assert out.shape == (2,)
    assert len({tuple(np.asarray(jax.random.key_data(k))) for k in out}) == 2


# -- fold_in -------------------------------------------------------------------


# -- sparse values: decision 16 ------------------------------------------------


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce", "gather", "values"])
def test_r143_r149_sparse_values_are_refused(pair, call):
    """The leaves of a sparse array are data and indices: reduced on their own they are wrong."""
    x = sparse.BCOO.fromdense(jnp.array([0.0, 2.0]))
    calls = {
        "all_reduce": lambda: pair.run(lambda: context().all_reduce("sum", x)),
        "all_gather": lambda: pair.run(lambda: context().all_gather(x, 0)),
        "reduce": lambda: pair.reduce("sum", pair.run(lambda: x)),
        "gather": lambda: pair.gather(pair.run(lambda: x), 0),
        "values": lambda: pair.distribute_values_from_function(lambda ctx: x),
    }
    if call == "values":
        with pytest.raises(LocalityError, match=r"(?s)^distribute_values_from_function.*sparse"):
            calls[call]()
        return
    with pytest.raises(
        NotImplementedError, match=f"^{call} needs dense arrays, not sparse"
    ) as caught:
        calls[call]()
    fix = "x.todense() in the replica function, before it is returned or reduced"
    assert str(caught.value).endswith(f"Fix: {fix}")
    dense = pair.run(lambda i: (x * i).todense(), args=(ids(pair),))
    assert pair.reduce("sum", dense).tolist() == [0, 2]


# -- bare collectives over the replica axis ------------------------------------


def test_bare_collectives(pair, how):
    def fn(x):
        return (
            lax.psum(x, "replica"),
            lax.pmean(x, "replica"),
            lax.pmax(x, "replica"),
            lax.axis_index("replica"),
            lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
        )

    x = per_replica(pair, [np.float32(1), np.float32(4)])
    summed, mean, largest, index, swapped = how(lambda x: pair.run(fn, args=(x,)))(x)
    assert (float(summed), float(mean), float(largest)) == (5.0, 2.5, 4.0)
    assert local(pair, index) == [0, 1]
    assert local(pair, swapped) == [4.0, 1.0]


def test_all_gather_of_nothing(pair, how):
    """An axis of size 0, as of an empty batch; JAX has no lowering for it."""

    def fn(x):
        gather = lambda x: dj.get_replica_context().all_gather(x * x, axis=0)
        return gather(x), jax.grad(lambda x: gather(x).sum())(x)

    x = per_replica(pair, [np.zeros((0, 3), np.float32)] * 2)
    total, gradient = how(lambda x: pair.run(fn, args=(x,)))(x)
    assert total.shape == (0, 3) and isinstance(gradient, jax.Array | dj.PerReplica)
    assert how(lambda x: pair.gather(x, axis=0))(x).shape == (0, 3)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_keys_have_no_sum(pair, op):
    reduced = lambda: context().all_reduce(op, context().fold_in(jax.random.key(0)))
    with pytest.raises(TypeError, match="^all_reduce needs numbers, not PRNG keys"):
        pair.run(reduced)
    keys = pair.run(lambda: context().fold_in(jax.random.key(0)))
    with pytest.raises(TypeError, match=f"^reduce.{op.upper()}. needs numbers, not PRNG keys"):
        pair.reduce(op, keys)


def test_objects_in_a_collective(pair):
    with pytest.raises(TypeError, match="^all_reduce needs arrays and numbers"):
        pair.run(lambda: context().all_reduce("sum", {"a": 1.0, "name": "text"}))
    with pytest.raises(TypeError, match="^all_gather needs arrays and numbers"):
        pair.run(lambda: context().all_gather(object(), axis=0))
