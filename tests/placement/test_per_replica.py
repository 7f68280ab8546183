"""PerReplica: one value per replica (decisions 16, 20, 24)."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import ids, local, per_replica

# -- arithmetic ----------------------------------------------------------------

BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
COMPARE = "lt le gt ge eq ne".split()
REFUSED = {
    **{name: lambda x, name=name: getattr(operator, name)(x, 1) for name in BINARY + COMPARE},
    **{f"r{name}": lambda x, name=name: getattr(operator, name)(1, x) for name in BINARY},
    **{name: lambda x, name=name: getattr(operator, name)(x) for name in ("neg", "pos", "inv")},
    "divmod": lambda x: divmod(x, 2),
    "rdivmod": lambda x: divmod(2, x),
    "abs": abs,
    "round": round,
    "float": float,
    "int": int,
    "complex": complex,
    "index": operator.index,
    "bool": bool,
    "iter": iter,
    "contains": lambda x: 1 in x,
    "setitem": lambda x: operator.setitem(x, 0, 1),
    "format": lambda x: f"{x:.2f}",
    "unpack": lambda x: [*x],
    "getitem": lambda x: x[0],
    "jax add": lambda x: jnp.ones(2) + x,
    "in if": lambda x: 1 if x else 2,
    "iadd": lambda x: operator.iadd(x, 1),
    "variable add": lambda x: dj.Variable(1.0) + x,
}


SUBJECTS = {
    "float": "float(x)",
    "int": "int(x)",
    "complex": "complex(x)",
    "round": "round(x)",
    "index": "a length or an index",
    "bool": "a condition",
    "in if": "a condition",
    "iter": "a loop or unpacking",
    "unpack": "a loop or unpacking",
    "contains": "`in`",
    "setitem": "x[...]",
    "getitem": "x[...]",
    "format": "a number format",
}


@pytest.mark.parametrize("name", REFUSED)
def test_r257_arithmetic_is_refused(pair, name):
    x = per_replica(pair, [np.int32([1, 2]), np.int32([3, 4])])
    with pytest.raises(TypeError) as info:
        REFUSED[name](x)
    text, of_dataset = str(info.value), "; [(x, y)] is a dataset of one batch, (x, y) of two"
    assert text == (
        f"{SUBJECTS.get(name, 'an operator')} needs one value, not one value per replica.\n"
        "  Got: a PerReplica of 2 values of shape (2,).\n"
        "  Why: it holds a value for each replica, and nothing says which is meant or how to "
        "combine them.\n"
        "  Fix: strategy.reduce('mean', x) for a loss ('sum' for counts); "
        "strategy.local_results(x) for each of them; or use it inside strategy.run(fn, args=(x,))"
        + of_dataset
        * (name in ("iter", "unpack"))
    )


@pytest.mark.parametrize("name", ["mean", "item", "block_until_ready", "ndim", "sharding"])
def test_an_attribute_of_an_array_is_refused_by_name(pair, name):
    x = ids(pair)
    with pytest.raises(AttributeError) as info:
        getattr(x, name)
    assert str(info.value) == (
        f"'PerReplica' object has no attribute '{name}': it is one value per replica.\n"
        "  Got: a PerReplica of 2 values of shape ().\n"
        "  Why: it holds a value for each replica, and nothing says which is meant or how to "
        "combine them.\n"
        "  Fix: strategy.reduce('mean', x) for a loss ('sum' for counts); x.stacked, the array "
        f"[R, ...] of all of them, has '{name}'"
    )
    assert hasattr(x.stacked, name) and not hasattr(x, name)


@pytest.mark.parametrize("name", ["__jax_array__", "_cache", "aval_of", "stackd"])
def test_other_attributes_are_missing_as_in_any_object(pair, name):
    with pytest.raises(AttributeError, match=f"^'PerReplica' object has no attribute '{name}'$"):
        getattr(ids(pair), name)
    with pytest.raises(AttributeError, match="^'PerReplica' object has no attribute 'aux'$"):
        _ = object.__new__(dj.PerReplica).aux  # as `copy` and `pickle` make it


def test_a_length_is_one_of_three(pair):
    x = per_replica(pair, [np.int32([1, 2]), np.int32([3, 4])])
    with pytest.raises(TypeError) as info:
        len(x)
    assert str(info.value) == (
        "len(x) needs one value, not one value per replica.\n"
        "  Got: a PerReplica of 2 values of shape (2,).\n"
        "  Why: it may mean the rows of a replica, the rows of the global batch, or the "
        "replicas.\n"
        "  Fix: x.shape[0], the rows of each replica; x.num_replicas * x.shape[0], those of the "
        "global batch; x.num_replicas, the replicas"
    )
    assert (x.shape[0], x.num_replicas * x.shape[0], x.num_replicas) == (2, 4, 2)
    with pytest.raises(TypeError, match=r"^len\(x\) needs one value(.|\n)*strategy.reduce"):
        len(ids(pair))


JAX_FUNCTIONS = {
    "mean": jnp.mean,
    "exp": jnp.exp,
    "stack": lambda x: jnp.stack([x, x]),
    "where": lambda x: jnp.where(x, 1, 2),
    "relu": jax.nn.relu,
    "in jit": jax.jit(jnp.sum),
}


@pytest.mark.parametrize("name", JAX_FUNCTIONS)
def test_a_function_of_jax_is_told_what_to_do(pair, name):
    x = per_replica(pair, [np.int32([1, 2]), np.int32([3, 4])])
    with pytest.raises(TypeError) as info:
        JAX_FUNCTIONS[name](x)
    assert str(info.value) == (
        "a function of JAX needs one value, not one value per replica.\n"
        "  Got: a PerReplica of 2 values of shape (2,).\n"
        "  Why: the values may be rows of one batch, or may have to be combined.\n"
        "  Fix: strategy.run(fn, args=(x,)), where fn sees the value of its replica; "
        "x.map(jnp.exp) for the value of each; strategy.reduce('mean', x) for one value; x.stacked "
        "for all, [R, ...]"
    )
    assert jax.tree.map(jnp.sum, x) == 10 and jnp.sum(x.stacked) == 10


@pytest.mark.parametrize("fn", [np.asarray, np.array, np.sin, lambda x: np.ones(2) + x])
def test_numpy_is_told_of_the_rows(pair, fn):
    x = per_replica(pair, [np.int32([1, 2]), np.int32([3, 4])])
    with pytest.raises(TypeError, match="^numpy needs one value, not one value per repl") as info:
        fn(x)
    assert "x.stacked" in str(info.value) and "strategy.gather(x, axis=0)" in str(info.value)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), x)
    with pytest.raises(TypeError, match=r"^numpy needs one array \[R, \.\.\.\] of a value per"):
        fn(shapes)


@pytest.mark.parametrize("equal", [np.array_equal, np.array_equiv, np.allclose])
def test_numpy_does_not_take_it_for_unequal(pair, equal):
    x = ids(pair)
    for values in ((x, x), (x, np.ones(2)), (np.ones(2), x)):
        with pytest.raises(TypeError, match="^numpy needs one value, not one value per repl"):
            equal(*values)
    assert np.shape(x) == () and not np.iscomplexobj(x)  # these ask for attributes


@pytest.mark.parametrize("fn", [jnp.sin, jnp.asarray, jnp.sum, jax.lax.exp])
def test_jax_functions_refuse_it(pair, fn):
    with pytest.raises(TypeError):
        fn(ids(pair))


def test_two_per_replica_values_do_not_add(pair):
    x = ids(pair)
    with pytest.raises(TypeError, match="^an operator needs one value"):
        x + x


def test_it_has_identity_as_a_dictionary_key(pair):
    x, y = ids(pair), ids(pair)
    table = {x: "x", y: "y"}
    assert table[x] == "x" and table[y] == "y"


# -- as a tree -----------------------------------------------------------------


def test_r259_map_applies_per_replica(pair, how):
    first = per_replica(pair, [np.float32(1), np.float32(5)])
    tree = {"a": first, "b": [per_replica(pair, [np.float32([5, 6]), np.float32([7, 8])])]}
    out = how(
        lambda t: jax.tree.map(
            lambda x: x.map(lambda v: v + 10), t, is_leaf=lambda x: isinstance(x, dj.PerReplica)
        )
    )(tree)
    assert local(pair, out["a"]) == [11.0, 15.0]
    assert local(pair, out["b"][0]) == [[15.0, 16.0], [17.0, 18.0]]


def test_map_sees_one_value_and_may_return_a_tree(pair):
    x = per_replica(pair, [np.float32([1, 2]), np.float32([3, 5])])
    shapes = []
    out = x.map(lambda v: shapes.append(v.shape) or {"sum": v.sum(), "two": (v[0], v[1])})
    assert shapes == [(2,)]
    assert local(pair, out["sum"]) == [3.0, 8.0]
    assert local(pair, out["two"][1]) == [2.0, 5.0]


def test_tree_map_sees_the_stacked_array(pair):
    x = ids(pair)
    leaves = jax.tree.leaves(x)
    assert len(leaves) == 1 and leaves[0].shape == (2,)
    doubled = jax.tree.map(lambda stacked: stacked * 2, x)
    assert isinstance(doubled, dj.PerReplica) and local(pair, doubled) == [0.0, 2.0]


def test_it_passes_through_jax_transformations(pair):
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    out = jax.jit(lambda x: jax.tree.map(lambda s: s + 1, x))(x)
    assert isinstance(out, dj.PerReplica) and local(pair, out) == [2.0, 3.0]


def test_r261_new_values_do_not_retrace(pair, how):
    traces = []

    def fn(x):
        traces.append(1)
        return x * 2

    step = how(lambda x: pair.run(fn, args=(x,)))
    for start in range(4):
        x = per_replica(pair, [np.float32(start), np.float32(start + 1)])
        assert local(pair, step(x)) == [2.0 * start, 2.0 * start + 2]
    assert len(traces) == 1


def test_r261_in_jax_jit(pair):
    traces = []
    step = jax.jit(lambda x: traces.append(1) or x.stacked.sum())
    for start in range(3):
        step(per_replica(pair, [np.float32(start), np.float32(0)]))
    assert traces == [1]


# -- making --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (2.5, 2.5),
        (np.array([1, 2, 3]), [1, 2, 3]),
        (jnp.array([1.0, 2.0]), [1.0, 2.0]),
        (np.float32(4), 4.0),
        (True, True),
    ],
)
def test_r265_a_constant_from_every_replica(pair, value, expected):
    x = pair.distribute_values_from_function(lambda ctx: value)
    assert isinstance(x, dj.PerReplica)
    assert local(pair, x) == [expected, expected]


def test_r265_tuples_give_a_tuple_of_per_replica(pair):
    x = pair.distribute_values_from_function(lambda ctx: (1.0, 2.0, {"r": np.float32(3)}))
    assert type(x) is tuple
    assert local(pair, x[1]) == [2.0, 2.0] and local(pair, x[2]["r"]) == [3.0, 3.0]


def test_r265_one_replica_is_wrapped_where_the_strategy_wraps():
    """TF wraps always, but for the default and the one-device strategy."""
    make = lambda s: s.distribute_values_from_function(lambda ctx: np.float32(7))
    assert isinstance(make(dj.MirroredStrategy(jax.devices()[:1])), dj.PerReplica)
    assert isinstance(make(dj.VirtualStrategy(1)), dj.PerReplica)
    assert make(dj.OneDeviceStrategy()) == 7.0
    assert make(dj.get_strategy()) == 7.0


def test_the_function_is_called_once_per_replica_in_order(pair):
    seen = []
    pair.distribute_values_from_function(lambda ctx: seen.append(ctx) or 0)
    assert seen == [dj.ValueContext(0, 2), dj.ValueContext(1, 2)]
    assert str(seen[1]) == ("tf.distribute.ValueContext(replica id 1,  total replicas in sync: 2)")
    assert (dj.ValueContext().replica_id_in_sync_group, dj.ValueContext().num_replicas_in_sync) == (
        0,
        1,
    )


def test_values_may_be_made_in_any_context(pair, how):
    """Values made in a trace belong to it."""

    def merge(strategy):
        return strategy.reduce("sum", ids(strategy))

    total = how(lambda: pair.run(lambda: dj.get_replica_context().merge_call(merge)))()
    assert float(total) == 1.0
    with pair.scope():
        assert local(pair, ids(pair)) == [0.0, 1.0]


UNEQUAL = {
    "shapes": lambda r: np.ones(r + 1),
    "trees": lambda r: [1] * (r + 1),
    "keys": lambda r: {str(r): 1},
    "strings": lambda r: "text",
    "objects": lambda r: object(),
    "ragged": lambda r: np.array([[1], [1, 2]], dtype=object),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_r145_r147_values_that_make_no_array_are_refused(pair, name):
    """Decision 16: equal shapes; TF allows unequal ones and any Python object."""
    with pytest.raises(LocalityError, match="^distribute_values_from_function needs arrays or"):
        pair.distribute_values_from_function(
            lambda ctx: UNEQUAL[name](ctx.replica_id_in_sync_group)
        )


# -- looks ---------------------------------------------------------------------


def test_repr_shows_each_value_and_where_it_lives():
    strategy = dj.MirroredStrategy(jax.devices()[2:4])
    x = per_replica(strategy, [np.float32([1, 2]), np.float32([3, 4])])
    assert repr(x) == "PerReplica({\n  0 on cpu:2: [1. 2.]\n  1 on cpu:3: [3. 4.]\n})".replace(
        "cpu:2", str(jax.devices()[2])
    ).replace("cpu:3", str(jax.devices()[3]))
    assert (x.shape, x.dtype, x.num_replicas) == ((2,), np.float32, 2)


def test_repr_in_a_trace_and_of_large_values(pair):
    seen = []
    dj.jit(lambda x: seen.append((repr(x), x._repr_html_())))(ids(pair))
    assert seen[0][0].startswith("PerReplica(R=2, ") and seen[0][1].startswith("<code>")
    assert len(repr(per_replica(pair, [np.zeros((300, 300))] * 2))) < 2000


def test_repr_of_keys(pair):
    keys = pair.run(lambda: dj.get_replica_context().fold_in(jax.random.key(0)))
    assert "0 on" in repr(keys) and "<table>" in keys._repr_html_()


def test_html_shows_each_value_and_escapes():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    page = per_replica(strategy, [np.float32(1), np.float32(2)])._repr_html_()
    for part in ("<table>", "float32", "<td>0</td>", "<td>1</td>", "1.0", "2.0"):
        assert part in page
    assert str(jax.devices()[1]) in page


# -- locality ------------------------------------------------------------------


def test_localities(mirrored):
    ON_READ, SUM = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM
    with mirrored.scope():
        v, slot = dj.Variable(jnp.ones(3)), dj.Variable(jnp.zeros(()))
        c = dj.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    assert dj.locality(v).kind == "mirrored"
    assert dj.locality(slot) == dj.locality(v)
    assert dj.locality(c).kind == "per_replica"
    x = ids(mirrored)
    assert dj.locality(x).kind == "per_replica"
    assert dj.locality(mirrored.reduce("sum", x)) == dj.locality(v)
    for value in (1, np.ones(2), None, "a", jnp.ones(2)):
        assert dj.locality(value) == dj.Locality("unplaced")
    split = jax.device_put(jnp.ones(2), mirrored.extended.topology.per_replica)
    assert dj.locality(split).kind == "partitioned"
    other = dj.MirroredStrategy(jax.devices()[2:4])
    assert dj.locality(other.run(lambda: jnp.ones(()))) != dj.locality(v)
    host = jax.device_put(
        jnp.ones(2), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    assert dj.locality(host).kind == "host"


def test_locality_repr(mirrored):
    out = mirrored.run(lambda: jnp.ones(()))
    assert repr(dj.locality(out)) == "Locality(mirrored on 2 devices)"
    assert repr(dj.locality(3)) == "Locality(unplaced)"
    one = dj.locality(jax.device_put(1.0, jax.devices()[3]))
    assert repr(one) == f"Locality(mirrored on {jax.devices()[3]})"


# -- in another process, and copies ------------------------------------------------

COPIES = {"copy": copy.copy, "deepcopy": lambda x: copy.deepcopy({"x": [x]})["x"][0]}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_same_replicas(pair, name):
    values = ids(pair)
    copied = COPIES[name](values)
    assert dj.locality(copied) == dj.locality(values)
    assert local(pair, copied) == [0.0, 1.0] and float(pair.reduce("sum", copied)) == 1
    assert (copied.stacked is values.stacked) == (name == "copy")


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_keys(pair, name):
    keys = pair.distribute_values_from_function(
        lambda ctx: jax.random.key(ctx.replica_id_in_sync_group, impl="rbg")
    )
    found = COPIES[name](keys)
    assert found.dtype == keys.dtype
    before, after = (jax.random.key_data(x.stacked).tolist() for x in (keys, found))
    assert before == after


def test_pickle_is_refused(pair):
    values = ids(pair)
    with pytest.raises(LocalityError) as info:
        pickle.dumps({"x": values})
    assert str(info.value) == (
        "a PerReplica needs to stay in its process.\n"
        "  Got: pickle of 2 values of shape ().\n"
        "  Why: its replicas are on the devices of a strategy, which belong to this process.\n"
        "  Fix: pickle strategy.local_results(x), the values of this process, and stack them "
        "there: strategy.per_replica(np.stack(values)); or dj.checkpoint.Checkpointer(directory)"
    )
    sent = pickle.loads(pickle.dumps(pair.local_results(values)))
    assert local(pair, pair.per_replica(np.stack(sent))) == [0.0, 1.0]


USES = {
    "local_results": lambda strategy, x: local(strategy, x),
    "reduce": lambda strategy, x: [0.0, float(strategy.reduce("sum", x))],
    "gather": lambda strategy, x: strategy.gather(x.map(jnp.atleast_1d), axis=0).tolist(),
    "run": lambda strategy, x: local(strategy, strategy.run(lambda x: x + 0, args=(x,))),
    "jit": lambda strategy, x: local(strategy, dj.jit(lambda x: x)(x)),
    "closure": lambda strategy, x: [0.0, float(dj.jit(lambda: strategy.reduce("sum", x))())],
    "lower": lambda strategy, x: local(
        strategy, strategy.jit(lambda x: x + 0).lower(x).compile()(x)
    ),
    "merge": lambda strategy, x: local(
        strategy,
        strategy.run(
            lambda: dj.get_replica_context().merge_call(lambda s: s.run(lambda x: x, args=(x,)))
        ),
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("device", [0, -1])
def test_what_device_put_moves_away_comes_back(pair, device, use):
    x = jax.device_put(ids(pair), jax.devices()[device])
    assert USES[use](pair, x) == [0.0, 1.0]
    assert float(pair.reduce("sum", x)) == 1
    assert x.stacked.sharding.device_set == {*pair.extended.worker_devices}


def test_a_large_value_is_shown_by_its_type(pair):
    x = per_replica(pair, [np.ones((10, 10), np.float32)] * 2)
    assert [line.split(": ")[1] for line in repr(x).splitlines()[1:-1]] == ["float32[10, 10]"] * 2
    assert "float32[10, 10]" in x._repr_html_()
