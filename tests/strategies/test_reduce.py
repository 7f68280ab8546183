"""reduce, reduce_to, batch_reduce_to, broadcast_to, gather: values (decisions 6, 7, 16, 22)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import distjax as dj
from distjax.errors import LocalityError, describe_value
from tests.replica.blindness import blind
from tests.replicas import ids, local, per_replica


@pytest.fixture
def three():
    """Three replicas: means that two would hide."""
    return dj.VirtualStrategy(3)


# -- reduce over replicas, and over axes ---------------------------------------


@pytest.mark.api_row(
    "ReduceOp", "VariableAggregation as a reduction", '"sum" and "mean" as a reduction'
)
@pytest.mark.parametrize(
    "op",
    ["mean", "MEAN", "Mean", dj.ReduceOp.MEAN, dj.VariableAggregation.MEAN],
)
def test_r101_names_of_the_mean(pair, op):
    x = ids(pair)
    assert float(pair.reduce(op, x)) == 0.5
    assert float(pair.extended.reduce_to(op, x, None)) == 0.5
    assert float(pair.extended.batch_reduce_to(op, [(x, None)])[0]) == 0.5
    assert float(pair.run(lambda x: dj.get_replica_context().all_reduce(op, x), (x,))) == 0.5


@pytest.mark.api_row(
    "ReduceOp", "VariableAggregation as a reduction", '"sum" and "mean" as a reduction'
)
@pytest.mark.parametrize("op", ["sum", "SUM", dj.ReduceOp.SUM, dj.VariableAggregation.SUM])
def test_r101_names_of_the_sum(pair, op):
    x = ids(pair)
    assert float(pair.reduce(op, x)) == 1.0
    assert float(pair.extended.reduce_to(op, x, None)) == 1.0
    assert float(pair.extended.batch_reduce_to(op, [(x, None)])[0]) == 1.0
    assert float(pair.run(lambda x: dj.get_replica_context().all_reduce(op, x), (x,))) == 1.0


def test_r103_op_none(pair):
    with pytest.raises(ValueError, match="needs a ReduceOp"):
        pair.reduce(None, ids(pair))


def test_r105_mean_of_a_plain_value_is_the_value(pair, how):
    for value in (3.0, np.float32(3), np.ones(2)):
        assert how(lambda value=value: pair.reduce("mean", value) is value)()
    elsewhere = jax.device_put(jnp.float32(3), jax.devices()[7])
    assert pair.reduce("mean", elsewhere) is elsewhere


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [0, 0.0, 3.0, np.zeros(2), np.ones(2), np.float64(0)])
@pytest.mark.parametrize("axis", [None, 0])
def test_r107_sum_of_a_plain_value_is_refused_zeros_too(pair, how, value, axis):
    """Decision 6 (TF crashes on 0)."""
    if np.ndim(value) == 0 and axis is not None:
        axis = ()
    with pytest.raises(ValueError, match="^A non-DistributedValues value .* cannot be reduced"):
        how(lambda: pair.reduce("sum", value, axis=axis))()


def test_sum_of_a_plain_value_of_one_replica_is_the_value():
    for strategy in (dj.VirtualStrategy(1), dj.OneDeviceStrategy(), dj.get_strategy()):
        assert strategy.reduce("sum", 3.0) == 3.0
        assert float(strategy.reduce("sum", np.array([1.0, 2.0]), axis=0)) == 3.0


def test_r113_mean_of_integers_is_true_division(three, how):
    """Decision 7: in the default float dtype."""
    x = per_replica(three, [np.int32(1), np.int32(2), np.int32(2)])
    out = how(lambda x: three.reduce("mean", x))(x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, 5 / 3, rtol=1e-6)
    for dtype in (np.bool_, np.int8, np.uint8):
        out = three.reduce("mean", per_replica(three, [dtype(1), dtype(0), dtype(1)]))
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, 2 / 3, rtol=1e-6)


def test_mean_of_small_integers_does_not_overflow(pair):
    x = per_replica(pair, [np.full(200, 120, np.int8)] * 2)
    assert float(pair.reduce("mean", x, axis=0)) == 120.0
    assert float(pair.reduce("mean", per_replica(pair, [np.int8(120)] * 2))) == 120.0


def test_mean_keeps_a_floating_dtype(pair):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert pair.reduce("mean", per_replica(pair, [np.ones(2, dtype)] * 2)).dtype == dtype


def test_r115_several_axes(pair, how):
    x = per_replica(pair, [np.ones((2, 3), np.float32) * r for r in range(2)])
    assert float(how(lambda x: pair.reduce("mean", x, axis=(0, 1)))(x)) == 0.5
    assert float(how(lambda x: pair.reduce("sum", x, axis=[-1, 0]))(x)) == 6.0
    assert pair.reduce("sum", x, axis=()).shape == (2, 3)


@pytest.mark.parametrize("axis", ["x", 1.5, True, (0, "x"), None.__class__])
def test_r117_axis_of_another_type(pair, axis):
    with pytest.raises(TypeError, match="^reduce: axis needs to be None, an int or a tuple of"):
        pair.reduce("sum", per_replica(pair, [np.ones(2)] * 2), axis=axis)


@pytest.mark.parametrize("axis", [1, -2, (0, 1)])
def test_axis_out_of_range(pair, axis):
    with pytest.raises(ValueError, match="^reduce: axis needs to be between -1 and 0"):
        pair.reduce("sum", per_replica(pair, [np.ones(2)] * 2), axis=axis)


def test_axis_of_scalars(pair):
    with pytest.raises(ValueError, match="^reduce: axis needs to be None for values without axes"):
        pair.reduce("sum", ids(pair), axis=0)


@pytest.mark.parametrize("axis", [(0, 0), (1, -1), [0, -2]])
def test_axis_named_twice(pair, axis):
    with pytest.raises(ValueError, match="^reduce: axis needs to name each axis once"):
        pair.reduce("mean", per_replica(pair, [np.ones((2, 3))] * 2), axis=axis)


def test_axis_with_a_tree(pair):
    for tree in ({"a": ids(pair), "b": ids(pair)}, [], {}, None):
        with pytest.raises(TypeError, match="^reduce with an axis or a mask needs one value"):
            pair.reduce("sum", tree, axis=0)


def test_trees_without_values(pair):
    for tree in ([], {}, None, {"a": ()}):
        assert pair.reduce("sum", tree) == tree
        assert pair.local_results(tree) == (tree,)


def test_r119_plain_values_with_an_axis(pair):
    """SUM: refused by decision 6 (TF counts the value on every replica)."""
    with pytest.raises(ValueError, match="cannot be reduced"):
        pair.reduce("sum", np.ones(2), axis=0)
    assert float(pair.reduce("mean", np.array([1.0, 3.0]), axis=0)) == 2.0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_plain_values_are_summed_as_exactly_as_those_on_replicas(pair, dtype):
    """numpy would sum bfloat16 in bfloat16: the 256 of 1000 ones, and a mean of 0.256."""
    ones = np.ones(1000, dtype)
    mean = pair.reduce("mean", ones, axis=0)
    on_replicas = pair.reduce("mean", pair.extended.broadcast_to(ones), axis=0)
    assert float(mean) == float(on_replicas) == 1 and mean.dtype == on_replicas.dtype
    one = dj.OneDeviceStrategy()
    total, on_device = one.reduce("sum", ones, axis=0), one.reduce("sum", jnp.asarray(ones), axis=0)
    assert float(total) == float(on_device) == (1000 if dtype != "int8" else 1000 - 4 * 256)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "uint16", "int32"])
def test_a_sum_has_the_dtype_of_a_psum_wherever_the_value_is(dtype):
    """Decision 6: numpy and jnp would make a sum over an axis wider."""
    x = np.arange(200).astype(dtype)
    with np.errstate(over="ignore"):
        right = x.sum(dtype=np.int32 if dtype == "bool" else dtype)
    for s in dj.OneDeviceStrategy(), dj.VirtualStrategy(1), dj.MirroredStrategy(jax.devices()[:1]):
        for value in (x, s.extended.broadcast_to(x), s.run(lambda a: a, args=(x,))):
            total = s.reduce("sum", value, axis=0)
            assert (total.dtype, int(total)) == (right.dtype, int(right))
            masked = s.reduce("sum", value, axis=0, mask=np.ones(200, bool))
            assert (masked.dtype, int(masked)) == (right.dtype, int(right))


def test_r121_mirrored_variable(pair, how):
    with pair.scope():
        v = dj.Variable(2.0, name="kept")
    assert float(how(lambda: pair.reduce("mean", v))()) == 2.0
    with pytest.raises(LocalityError, match=r"^reduce\(SUM\) needs a value per replica, not mirr"):
        how(lambda: pair.reduce("sum", v))()


def test_sync_on_read_variable_is_reduced_by_components(pair, how):
    with pair.scope():
        v = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA,
        )
    pair.run(lambda x: v.assign(x + 1), args=(ids(pair),))
    assert float(how(lambda: pair.reduce("sum", v))()) == 3.0
    assert float(how(lambda: pair.reduce("mean", v))()) == 1.5


# -- decision 6: a mirrored array counts as R equal copies ---------------------


VALUES = {
    "float": lambda: jnp.float32(3) * 2,
    "constant": lambda: jnp.float32(6),
    "weak": lambda: jnp.sin(6.0),
    "weak vector": lambda: jnp.asarray([1, 2, 3]) * jnp.exp2(1.0),
    "int": lambda: jnp.int32(6),
    "int8": lambda: jnp.int8(100),
    "bool": lambda: jnp.asarray(True),
    "bfloat16": lambda: jnp.bfloat16(6),
    "vector": lambda: jnp.arange(3.0),
    "uint8": lambda: jnp.arange(3, dtype=jnp.uint8) + 254,
    "complex": lambda: jnp.complex64(1 + 2j),
}


@pytest.mark.parametrize("kind", ["mirrored3", "virtual3"])
def test_mirrored_counts_as_equal_copies(kind, how):
    """The same numbers, shapes, dtypes and weak types as if nothing had been proved.

    All kinds of values are in one program, which takes less than one for each.
    """
    from tests.conftest import STRATEGIES

    def reductions(strategy, name, m):
        yield "sum", strategy.reduce("sum", m)
        yield "mean", strategy.reduce("mean", m)
        yield "to", strategy.extended.reduce_to("sum", m, None)
        if "vector" in name:
            yield "sum axis", strategy.reduce("sum", m, axis=0)
            yield "mean axis", strategy.reduce("mean", m, axis=0)
            yield "gather", strategy.gather(m, 0)
            mask = np.array([True, False, True])
            yield "masked", strategy.reduce("mean", m, axis=0, mask=mask)

    def outcome():
        strategy = STRATEGIES[kind]()  # made anew: programs compiled before are not used

        @how
        def step():
            values = {name: strategy.run(make) for name, make in VALUES.items()}
            return {name: dict(reductions(strategy, name, m)) for name, m in values.items()}

        made = step()
        together = strategy.run(lambda: [make() for make in VALUES.values()])
        for result in together:
            assert len(strategy.local_results(result)) == 3
        for leaf in jax.tree.leaves(made):
            assert isinstance(leaf, jax.Array)
        return jax.tree.map(lambda x: (np.asarray(x).tolist(), x.dtype, x.weak_type), made)

    proved = outcome()
    with blind():
        blinded = outcome()
    assert proved == blinded


def test_mirrored_is_decided_by_the_sharding_outside_of_traces(mirrored):
    """The one place where eager mode may raise and dj.jit does not."""
    one = jax.devices()[7]
    on_one = jax.device_put(jnp.ones(2), one)
    mesh = mirrored.mesh
    split = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec("replica")))
    copies = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(ValueError, match="cannot be reduced"):
        mirrored.reduce("sum", on_one)
    with pytest.raises(LocalityError, match="^the value to reduce needs to be a PerReplica, or"):
        mirrored.reduce("sum", split)
    np.testing.assert_array_equal(mirrored.reduce("sum", copies), [2, 2])
    np.testing.assert_array_equal(dj.jit(lambda x: mirrored.reduce("sum", x))(copies), [2, 2])
    np.testing.assert_array_equal(dj.jit(lambda: mirrored.reduce("sum", jnp.ones(2)))(), [2, 2])


def test_any_array_on_the_device_of_a_virtual_strategy_is_mirrored():
    strategy = dj.VirtualStrategy(2)
    assert float(strategy.reduce("sum", jnp.float32(3))) == 6.0
    assert len(strategy.local_results(jnp.float32(3))) == 2
    with pytest.raises(ValueError, match="cannot be reduced"):
        strategy.reduce("sum", jax.device_put(jnp.float32(3), jax.devices()[1]))


def test_numpy_stays_unplaced_in_a_trace(pair):
    with pytest.raises(ValueError, match="cannot be reduced"):
        dj.jit(lambda: pair.reduce("sum", np.ones(2)))()
    with pytest.raises(ValueError, match="cannot be reduced"):
        pair.run(lambda: dj.get_replica_context().merge_call(lambda s: s.reduce("sum", np.ones(2))))


# -- reduce_to, batch_reduce_to ------------------------------------------------


@pytest.mark.parametrize("destinations", ["", [], (), 3, 2.5, {"a": 1}, "nowhere", [3], "gpu:99"])
def test_r123_destinations_that_are_none(pair, destinations):
    """A list of devices is a destination here (TF: AssertionError)."""
    for method in ("reduce_to", "broadcast_to"):
        call = getattr(pair.extended, method)
        with pytest.raises(ValueError, match=f"^{method}: destinations can not be empty"):
            if method == "reduce_to":
                call("sum", ids(pair), destinations)
            else:
                call(jnp.ones(2), destinations)


@pytest.mark.parametrize("names", [(0, 0), ("cpu:1", 1), (0, 1, 0)])
@pytest.mark.parametrize("method", ["reduce_to", "batch_reduce_to", "broadcast_to"])
def test_destinations_that_name_a_device_twice(method, names):
    """JAX fails an assertion, or takes them: it depends on the strategy and the method."""
    devices = [name if isinstance(name, str) else jax.devices()[name] for name in names]
    twice = jax.devices()[names[-1]]
    for strategy in (dj.MirroredStrategy(jax.devices()[:2]), dj.VirtualStrategy(2)):
        calls = {
            "reduce_to": lambda s: s.extended.reduce_to("sum", ids(s), devices),
            "batch_reduce_to": lambda s: s.extended.batch_reduce_to("sum", [(ids(s), devices)]),
            "broadcast_to": lambda s: s.extended.broadcast_to(np.ones(2), devices),
        }
        with pytest.raises(ValueError) as caught:
            calls[method](strategy)
        name = method.removeprefix("batch_")
        assert str(caught.value) == (
            f"{name}: destinations needs to name each device once.\n"
            f"  Got: {twice} 2 times.\n"
            "  Why: a device holds one copy of a value.\n"
            f"  Fix: {name}(..., destinations=list(dict.fromkeys(devices)))"
        )


@pytest.mark.api_row("batch_reduce_to")
def test_r125_batch_reduce_to(pair, how):
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    device = jax.devices()[0]
    out = how(lambda x: pair.extended.batch_reduce_to("sum", [(x, x), (x, device)]))(x)
    assert type(out) is list and [float(v) for v in out] == [3.0, 3.0]
    assert pair.extended.batch_reduce_to("sum", []) == []


def test_r127_batch_reduce_to_takes_mixed_dtypes(pair):
    """TF picks other collectives for int32 and refuses; XLA has no such limit."""
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    i = per_replica(pair, [np.int32(1), np.int32(2)])
    out = pair.extended.batch_reduce_to("sum", [(x, None), (i, None)])
    assert [v.dtype for v in out] == [jnp.float32, jnp.int32]
    assert [float(v) for v in out] == [3.0, 3.0]


@pytest.mark.parametrize("item", [1.0, (1.0,), (1.0, None, None), "ab c", None])
def test_pairs_that_are_none(pair, item):
    with pytest.raises(ValueError, match="^batch_reduce_to needs a sequence of"):
        pair.extended.batch_reduce_to("sum", [item])


def test_r131_mean_of_a_mirrored_variable_to_itself(pair):
    with pair.scope():
        v = dj.Variable(1.0)
    assert local(pair, pair.extended.reduce_to("mean", v, v)) == [1.0, 1.0]


def test_reduce_to_takes_trees(pair):
    out = pair.extended.reduce_to("sum", {"a": ids(pair), "b": [ids(pair)]}, None)
    assert float(out["a"]) == 1.0 and float(out["b"][0]) == 1.0


# -- broadcast_to, gather ------------------------------------------------------


def test_broadcast_to(pair, how):
    out = how(lambda: pair.extended.broadcast_to(np.arange(2.0)))()
    assert local(pair, out) == [[0.0, 1.0], [0.0, 1.0]]
    with pair.scope():
        v = dj.Variable(3.0)
    assert float(pair.extended.broadcast_to(v)) == 3.0


def test_broadcast_of_python_objects_among_arrays(pair, how):
    state = {"w": np.ones(2), "n": 3, "apply": jnp.tanh, "name": "enc", "dtype": jnp.float32}
    out = how(lambda: pair.extended.broadcast_to(state))()
    assert [local(pair, out["w"]), local(pair, out["n"])] == [[[1.0, 1.0]] * 2, [3, 3]]
    assert [out[key] is state[key] for key in ("apply", "name", "dtype")] == [True] * 3
    with pytest.raises(TypeError):  # no array that a step could use
        pair.extended.broadcast_to({"apply": jnp.tanh})


def test_broadcast_of_a_value_makes_it_reducible(pair):
    assert float(pair.reduce("sum", pair.extended.broadcast_to(3.0))) == 6.0


def test_broadcast_of_a_per_replica_is_refused(pair):
    with pytest.raises(LocalityError, match="^broadcast_to needs one value"):
        pair.extended.broadcast_to(ids(pair))


@pytest.mark.parametrize("value", ["abc", np.array(["abc"]), object()])
def test_broadcast_of_what_is_no_number_is_refused(pair, value):
    tree = {"a": value, "b": 1.0} if isinstance(value, np.ndarray) else value
    with pytest.raises(TypeError) as caught:
        pair.extended.broadcast_to(tree)
    assert str(caught.value) == (
        "broadcast_to needs arrays and numbers.\n"
        f"  Got: {describe_value(value)}.\n"
        "  Why: devices hold nothing else.\n"
        "  Fix: strategy.broadcast(...) of the arrays alone"
    )


def test_gather_returns_plain_values(pair):
    for value in (np.ones(2), 3.0):
        assert pair.gather(value, 0) is value


@pytest.mark.parametrize("axis", [-1, 1, "x", 0.0, None])
def test_gather_along_an_axis_that_is_not_there(pair, axis):
    with pytest.raises(ValueError, match="^gather needs an axis between 0 and 0"):
        pair.gather(per_replica(pair, [np.ones(2)] * 2), axis)


def test_r155_gather_of_scalars(pair):
    with pytest.raises(ValueError, match="^gather needs a value with at least one axis") as caught:
        pair.gather(ids(pair), 0)
    fix = "gather(x[None], axis=0); of a PerReplica: x.map(lambda value: value[None])"
    assert str(caught.value).endswith(f"Fix: {fix}")
    rows = ids(pair).map(lambda value: value[None])  # x[None] of a PerReplica is refused
    assert pair.gather(rows, axis=0).tolist() == [0, 1]


# -- local_results -------------------------------------------------------------


def test_local_results_of_a_mirrored_variable(pair):
    with pair.scope():
        v = dj.Variable(1.5)
    assert local(pair, v) == [1.5, 1.5]
    assert [float(x) for x in v.local_results()] == [1.5, 1.5]


def test_swapped_arguments_are_told_their_order(pair):
    with pytest.raises(ValueError) as info:
        pair.reduce(1.0, "mean")
    assert str(info.value).endswith(
        "Fix: 'sum' or 'mean'; the operation comes first in strategy.reduce('sum', x), "
        "ctx.all_reduce('sum', x)"
    )
