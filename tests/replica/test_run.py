"""run: arguments in, results out, one trace (decisions 1 to 3 and 24)."""

import collections
import concurrent.futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import LocalityError, RecompilationWarning
from tests.replicas import ids, local, per_replica

Point = collections.namedtuple("Point", "x y")


def rid():
    return dj.get_replica_context().replica_id_in_sync_group


def test_r043_nested_results_of_per_replica_arguments(pair, how):
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    out = how(lambda x: pair.run(lambda x: {"a": 2 * x, "b": x * x}, args=(x,)))(x)
    assert local(pair, out["a"]) == [2.0, 4.0]
    assert local(pair, out["b"]) == [1.0, 4.0]
    again = how(lambda x: pair.run(lambda a, b: [a + b], kwargs=x))(out)
    assert local(pair, again[0]) == [3.0, 8.0]


def test_r045_one_replica_is_never_wrapped(how):
    """Decision 3."""
    for strategy in (dj.MirroredStrategy(jax.devices()[:1]), dj.OneDeviceStrategy()):

        def steps(x, strategy=strategy):
            first = strategy.run(lambda x: [x], args=(x,))
            second = strategy.run(lambda x: {"a": 2 * x, "b": x * x + rid()}, args=first)
            third = strategy.run(lambda x: [x["a"] + x["b"] + 10], args=(second,))
            return first, second, third

        out = how(steps)(jnp.float32(4))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))
        chex.assert_trees_all_equal(out, ([4.0], {"a": 8.0, "b": 16.0}, [34.0]))


def raiser(*args):
    raise KeyError("mine")


def test_r047_exceptions_keep_their_type(pair, how):
    def merging(fn):
        return lambda: dj.get_replica_context().merge_call(fn)

    steps = [
        raiser,
        merging(raiser),
        merging(lambda s: s.run(raiser)),
        merging(lambda s: s.run(merging(raiser))),
        merging(lambda s: s.extended.call_for_each_replica(raiser)),
    ]
    for fn in steps:
        with pytest.raises(KeyError, match="mine"):
            how(lambda fn=fn: pair.run(fn))()
        assert not dj.has_strategy()
        assert not dj.in_cross_replica_context()


def test_an_exception_under_a_jax_transformation_keeps_its_type(pair):
    def fn(x):
        return jax.grad(lambda x: dj.get_replica_context().merge_call(raiser, args=(x,)))(x)

    with pytest.raises(KeyError, match="mine"):
        pair.run(fn, args=(jnp.float32(1),))
    assert not dj.in_cross_replica_context()


def test_r051_nested_results_invert_to_what_each_replica_made(pair):
    """TF regroups trees of letters; here leaves are arrays."""

    def make(r):
        return ([r + 1.0, (r + 2.0, {"k": r + 3.0})], Point(r + 4.0, [r + 5.0]))

    out = pair.run(lambda: make(rid().astype(jnp.float32)))
    assert isinstance(out[0][1][1]["k"], dj.PerReplica)
    for replica, tree in enumerate(pair.local_results(out)):
        chex.assert_trees_all_equal(tree, make(np.float32(replica)))


def test_r053_tuples_and_lists_keep_their_kind(pair):
    out = pair.run(lambda: [(rid() + 1, rid() + 2), [rid() + 3]])
    assert type(out) is list and type(out[0]) is tuple and type(out[1]) is list
    assert [local(pair, leaf) for leaf in (*out[0], *out[1])] == [[1, 2], [2, 3], [3, 4]]


def test_r055_mappings_keep_their_class(pair):
    @jax.tree_util.register_pytree_with_keys_class
    class Config(collections.abc.Mapping):
        def __init__(self, data):
            self.data = data

        def __getitem__(self, key):
            return self.data[key]

        def __iter__(self):
            return iter(self.data)

        def __len__(self):
            return len(self.data)

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.DictKey(k), v) for k, v in self.data.items()], tuple(self.data)

        @classmethod
        def tree_unflatten(cls, keys, values):
            return cls(dict(zip(keys, values, strict=True)))

    out = pair.run(
        lambda c: Config({k + "c": v + rid() for k, v in c.items()}), (Config({"b": 1}),)
    )
    assert type(out) is Config and local(pair, out["bc"]) == [1, 2]
    ordered = pair.run(lambda: collections.OrderedDict(b=rid(), a=1))
    assert type(ordered) is collections.OrderedDict and list(ordered) == ["b", "a"]


def test_r057_one_replica_gives_back_the_nest():
    strategy = dj.MirroredStrategy(jax.devices()[:1])
    out = strategy.run(lambda: ([rid()], {"a": (None, "s", 2)}))
    assert out == ([0], {"a": (None, "s", 2)})


def test_r065_a_per_replica_of_other_replicas_is_refused(pair):
    """Decision 24 (TF: IndexError, or silence where it is too long)."""
    for other in (dj.VirtualStrategy(3), dj.MirroredStrategy(jax.devices()[4:6])):
        x = ids(other)
        with pytest.raises(LocalityError) as info:
            pair.run(lambda batch: batch, args=({"a": x},))
        first = str(info.value).splitlines()[0]
        assert first.startswith("argument batch['a'] of test_r065"), first
        assert "needs a PerReplica over 2 replicas" in first
        assert f"over {other.num_replicas_in_sync} replicas" in str(info.value)
        calls = (
            lambda x: pair.reduce("sum", x),
            lambda x: pair.gather(x, 0),
            lambda x: pair.local_results(x),
            lambda x: pair.extended.reduce_to("sum", x, None),
            lambda x: pair.run(lambda **k: k, kwargs={"batch": x}),
        )
        for call in calls:
            with pytest.raises(LocalityError, match="needs a PerReplica over 2 replicas"):
                call(x)


def test_per_replica_of_an_equal_strategy_is_taken(pair):
    """Equal devices and axis: the same replicas, whichever strategy object made the value."""
    for a, b in [
        (dj.VirtualStrategy(2), dj.VirtualStrategy(2)),
        (dj.MirroredStrategy(jax.devices()[:2]), dj.MirroredStrategy(jax.devices()[:2])),
    ]:
        assert float(b.reduce("sum", a.run(lambda: rid() + 1.0))) == 3.0


def test_r067_namedtuples_keep_their_class(pair):
    out = pair.run(lambda: Point(rid(), 2))
    assert type(out) is Point and local(pair, out.x) == [0, 1] and out.y == 2


def test_r069_nested_output_of_a_batch(pair, how):
    x = per_replica(pair, [np.array([0]), np.array([1])])
    step = how(lambda x: pair.run(lambda x: [{"a": x - 1, "b": x + 1}], args=(x,)))
    out = step(x)
    assert local(pair, out[0]["a"]) == [[-1], [0]]
    assert local(pair, out[0]["b"]) == [[1], [2]]


def test_r073_a_function_is_traced_once_per_signature(pair, how):
    traces = []

    def fn(x):
        traces.append(x.shape)
        return x + rid()

    step = how(lambda x: pair.run(fn, args=(x,)))
    for value in (1, 2, 3):
        assert local(pair, step(np.float32(value))) == [value, value + 1]
    assert traces == [()]
    step(np.ones(2, np.float32))
    assert traces == [(), (2,)]


def test_python_side_effects_happen_once(pair):
    """Decision 1."""
    seen = []

    def fn(x):
        seen.append(type(rid()))
        return x

    for _ in range(3):
        pair.run(fn, args=(jnp.float32(1),))
    assert len(seen) == 1 and issubclass(seen[0], jax.core.Tracer)


def test_replica_id_is_an_int32_scalar(pair):
    def fn():
        assert rid().shape == () and rid().dtype == jnp.int32
        assert jax.eval_shape(lambda: rid() + 1).dtype == jnp.int32

    pair.run(fn)


def test_r075_local_results_of_mixed_trees(pair):
    out = pair.run(lambda: {"d": [rid(), "plain"], "n": 7})
    first, second = pair.local_results(out)
    assert first == {"d": [0, "plain"], "n": 7}
    assert second == {"d": [1, "plain"], "n": 7}


def test_r077_local_results_of_one_device_are_one_tuple():
    strategy = dj.OneDeviceStrategy()
    assert strategy.local_results([1, 2]) == ([1, 2],)
    assert strategy.local_results(None) == (None,)


def test_local_results_of_a_plain_list_on_two_replicas(pair):
    assert pair.local_results([1, 2]) == ([1, 2], [1, 2])
    assert pair.local_results(3.0) == (3.0,)
    assert pair.local_results(None) == (None,)
    assert pair.local_results("text") == ("text",)


# -- localities of results: decision 2 ----------------------------------------


def is_per_replica(x):
    return isinstance(x, dj.PerReplica)


@pytest.mark.api_row("merging: values that differ")
def test_results_proved_equal_are_arrays_the_rest_per_replica(pair, how):
    def fn(equal, differs):
        context = dj.get_replica_context()
        return {
            "argument": equal,
            "computed": equal * 2 + 1,
            "reduced": context.all_reduce("sum", differs),
            "gathered": context.all_gather(differs[None], 0),
            "differs": differs,
            "mixed": equal + differs,
            "id": rid(),
            "constant": jnp.zeros(3),
            "pmax": lax.pmax(differs, "replica"),
        }

    out = how(lambda e, d: pair.run(fn, args=(e, d)))(np.float32(2), ids(pair))
    t_names = {name for name, value in out.items() if is_per_replica(value)}
    assert t_names == {"differs", "mixed", "id"}
    assert float(out["reduced"]) == 1.0
    np.testing.assert_array_equal(out["gathered"], [0, 1])
    assert all(isinstance(out[n], jax.Array) for n in set(out) - t_names)


@pytest.mark.api_row("merging: the members of a mirrored variable")
def test_variables_come_back_as_the_variable(pair, how):
    with pair.scope():
        v = dj.Variable(1.0)
    assert how(lambda: pair.run(lambda: (v, [v])))() == (v, [v])


def test_a_host_array_returned_unchanged_is_placed(mirrored):
    host = np.arange(3.0, dtype=np.float32)
    out = mirrored.run(lambda x: x, args=(host,))
    assert isinstance(out, jax.Array)
    assert out.sharding.device_set == set(jax.devices()[:2])
    np.testing.assert_array_equal(out, host)
    on_host = mirrored.run(lambda: host)
    assert on_host.sharding.device_set == set(jax.devices()[:2])


def test_closed_over_per_replica_is_refused_as_a_result(pair):
    x = ids(pair)
    with pytest.raises(LocalityError, match="needs to return values of one replica"):
        pair.run(lambda: x)
    with pytest.raises(LocalityError, match="^all_reduce needs this replica's value"):
        pair.run(lambda: dj.get_replica_context().all_reduce("sum", x))
    with pytest.raises(LocalityError, match="^all_gather needs this replica's value"):
        pair.run(lambda: dj.get_replica_context().all_gather(x, 0))


# -- arguments ----------------------------------------------------------------


def test_python_objects_need_a_hash(pair):
    class Unhashable:
        __hash__ = None

    with pytest.raises(ValueError) as caught:
        pair.run(lambda x: 1, args=(Unhashable(),))
    lines = str(caught.value).splitlines()
    assert lines[0] == "argument x needs an array, a number or a hashable object."
    assert lines[2:] == [
        "  Why: a Python object is part of the key under which a compiled program is cached.",
        "  Fix: @jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; "
        "without arrays: make it hashable",
    ]


def test_a_mirrored_array_goes_in_as_one_value(pair):
    mirrored = pair.run(lambda: jnp.arange(2.0))
    out = pair.run(lambda x: x + rid(), args=(mirrored,))
    assert local(pair, out) == [[0.0, 1.0], [1.0, 2.0]]


def test_arrays_on_other_devices_are_brought_in(mirrored):
    elsewhere = jax.device_put(jnp.float32(5), jax.devices()[7])
    out = mirrored.run(lambda x, y: x + y, args=(elsewhere, ids(mirrored)))
    assert local(mirrored, out) == [5.0, 6.0]


def test_jit_refuses_unknown_static_names():
    def step(x):
        return x

    with pytest.raises(ValueError, match="^jit: static_argnames needs names of parameters of"):
        dj.jit(step, static_argnames=("y",))


def test_a_function_compiled_again_and_again_warns(pair):
    def fn(batch):
        return batch * 2

    with pytest.warns(RecompilationWarning, match="is compiled for the 8th time") as caught:
        for size in range(1, 9):
            pair.run(fn, args=(np.ones(size, np.float32),))
        for size in range(9, 33):
            pair.run(fn, args=(np.ones(size, np.float32),))
    assert "float32[7] -> float32[8]" in str(caught[0].message)
    assert [str(c.message).split()[5] for c in caught] == ["8th", "16th", "32nd"]


def test_one_function_under_two_strategies_of_the_same_shape():
    def fn(x):
        context = dj.get_replica_context()
        return context.merge_call(lambda s, x: (repr(s), s.reduce("sum", x)), args=(x,))

    a, b = dj.VirtualStrategy(2), dj.MirroredStrategy(jax.devices()[:2])
    for strategy in (a, b, a, b):
        name, total = strategy.run(fn, args=(ids(strategy),))
        assert name == repr(strategy) and float(total) == 1.0


def test_r333_a_per_replica_factor(pair, how):
    factor = per_replica(pair, [np.float32(5), np.float32(3)])
    out = how(lambda x: pair.run(lambda x: x * 1.25, args=(x,)))(factor)
    assert local(pair, out) == [6.25, 3.75]


def test_trees_as_deep_as_jit_takes_them(pair):
    def deep(leaf):
        for _ in range(900):
            leaf = [leaf]
        return leaf

    def bottom(tree):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dj.PerReplica))[0]

    x = ids(pair)
    context = dj.get_replica_context
    calls = {
        "run": lambda tree: pair.run(lambda tree: tree, args=(tree,)),
        "all_reduce": lambda tree: pair.run(
            lambda tree: context().all_reduce("sum", tree), args=(tree,)
        ),
        "merge_call": lambda tree: pair.run(
            lambda tree: context().merge_call(lambda s, t: t, args=(tree,)), args=(tree,)
        ),
        "jit": dj.jit(lambda tree: tree),
        "reduce": lambda tree: pair.reduce("sum", tree),
    }
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # as deep as a program of its own
        found = {
            name: thread.submit(lambda call=call: bottom(call(deep(x)))).result()
            for name, call in calls.items()
        }
    for name in ("run", "merge_call", "jit"):
        assert local(pair, found[name]) == [0, 1]
    assert [float(found[name]) for name in ("all_reduce", "reduce")] == [1, 1]
