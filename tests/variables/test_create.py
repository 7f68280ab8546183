"""Making variables outside of replica functions: modes, dtypes, names, defaults."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import ContextError, LocalityError, StrategyMismatchError, TraceLeakError
from tests.replicas import local, per_replica

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


def first_line(caught):
    return str(caught.value).splitlines()[0]


# -- tests/cases.md, "Variables: creation" ----------------------------------


@pytest.mark.api_row("variable created in a replica function", "mirrored variable")
def test_r157_single_variable(pair):
    made = []

    def fn():
        if not made:
            made.append(dj.Variable(1.0, name="foo"))
        return dj.get_replica_context().merge_call(lambda strategy: made[0].value)

    pair.run(fn)
    (v,) = made
    assert isinstance(v, dj.Variable) and v.name == "foo" and v.strategy is pair
    components = v.local_results()
    assert [float(c) for c in components] == [1, 1]
    assert all(pair.extended.value_container(c) is v for c in components)


def test_r159_multiple_variables(pair):
    model = {}

    def fn():
        for i in range(5):
            if i not in model:
                model[i] = dj.Variable(float(i), name=f"foo{i}")
        return tuple(model[i].value for i in range(5))

    values = pair.run(fn)
    assert [float(x) for x in values] == [0, 1, 2, 3, 4]
    assert [model[i].name for i in range(5)] == [f"foo{i}" for i in range(5)]
    assert len({id(v) for v in model.values()}) == 5
    assert [float(x) for x in pair.run(fn)] == [0, 1, 2, 3, 4]


@pytest.mark.api_row("VariableSynchronization", "VariableAggregation")
def test_r163_modes_of_variables_made_in_a_replica(pair):
    made = {}

    def fn():
        if not made:
            made["a"] = dj.Variable(1.0, synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
            made["b"] = dj.Variable(1.0, synchronization=SYNC.ON_WRITE, aggregation=AGG.MEAN)
        return made["a"].value + made["b"].value

    pair.run(fn)
    a, b = made["a"], made["b"]
    assert (a.synchronization, a.aggregation) == (SYNC.ON_READ, AGG.SUM)
    assert (b.synchronization, b.aggregation) == (SYNC.ON_WRITE, AGG.MEAN)
    assert dj.locality(a).kind == "per_replica" and dj.locality(b).kind == "mirrored"


@pytest.mark.parametrize("mode", ["Invalid", None, 3])
def test_r165_invalid_synchronization(pair, mode):
    with pytest.raises(ValueError) as caught:
        make(pair, 1.0, name="v", synchronization=mode)
    assert first_line(caught) == (f"Invalid variable synchronization mode: {mode} for variable: v.")


@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_r169_random_initial_value_is_equal_everywhere(pair, sync):
    made = []

    def fn():
        if not made:
            key = dj.get_replica_context().fold_in(jax.random.key(0))
            initial = jax.random.normal(key, (3,))
            made.append(dj.Variable(initial, synchronization=sync, aggregation=AGG.MEAN))
        return made[0].value

    first, second = local(pair, pair.run(fn))
    assert first == second
    of_replica_0 = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), (3,))
    np.testing.assert_allclose(first, of_replica_0, rtol=1e-6)


def test_r173_three_devices():
    strategy = dj.MirroredStrategy(jax.devices()[:3])
    made = []

    def fn():
        if not made:
            made.append(dj.Variable(2.0, name="foo"))
        return made[0].value

    strategy.run(fn)
    (v,) = made
    assert v.name == "foo" and dj.locality(v).kind == "mirrored"
    assert [c.devices() for c in v.local_results()] == [{d} for d in jax.devices()[:3]]


def test_r177_colocate_vars_with_outside_of_a_scope(pair):
    v = make(pair, 1.0)
    with pytest.raises(ContextError):
        with pair.extended.colocate_vars_with(v):
            pass


def test_r179_devices_given_twice():
    with pytest.raises(ValueError, match="No duplicates allowed"):
        dj.MirroredStrategy([jax.devices()[0]] * 2)


# -- synchronization and aggregation ------------------------------------------


def test_auto_is_on_write_and_none_is_refused(pair):
    assert make(pair, 1.0).synchronization is SYNC.ON_WRITE
    with pytest.raises(ValueError) as caught:
        make(pair, 1.0, name="v", synchronization=SYNC.NONE)
    assert first_line(caught) == (
        "`NONE` variable synchronization mode is not supported for variable 'v'."
    )


def test_aggregation_none_the_object(pair):
    assert make(pair, 1.0, aggregation=None).aggregation is AGG.NONE


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, None])
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_mean_of_a_dtype_that_is_not_floating(pair, dtype, sync):
    initial = jax.random.key(0) if dtype is None else True
    with pytest.raises(ValueError) as caught:
        make(pair, initial, name="v", dtype=dtype, synchronization=sync, aggregation=AGG.MEAN)
    assert first_line(caught) == "variable 'v' needs a floating dtype for aggregation MEAN."


def test_one_device_takes_every_mode():
    strategy = dj.OneDeviceStrategy()
    v = make(strategy, 1, synchronization=SYNC.ON_READ, aggregation=AGG.MEAN)
    assert v.aggregation is AGG.MEAN and len(v.local_results()) == 1


# -- initial values -----------------------------------------------------------

INITIAL_VALUES = {
    "python float": (lambda: 1.5, np.float32(1.5)),
    "python int": (lambda: 3, np.int32(3)),
    "python bool": (lambda: True, np.bool_(True)),
    "python complex": (lambda: 1j, np.complex64(1j)),
    "list": (lambda: [1.0, 2.0], np.array([1, 2], np.float32)),
    "numpy float64": (lambda: np.array([1.0, 2.0]), np.array([1, 2], np.float32)),
    "numpy scalar": (lambda: np.float16(2), np.float16(2)),
    "jax": (lambda: jnp.arange(3, dtype=jnp.uint8), np.arange(3, dtype=np.uint8)),
    "bfloat16": (lambda: jnp.ones(2, jnp.bfloat16), np.ones(2, jnp.bfloat16)),
    "weak": (lambda: jnp.asarray(2.0), np.float32(2)),
    "callable array": (lambda: nnx.Param(jnp.arange(3)), np.arange(3, dtype=np.int32)),
    "empty": (lambda: np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", list(INITIAL_VALUES))
@pytest.mark.parametrize("as_function", [False, True], ids=["value", "function"])
def test_initial_value(pair, kind, as_function):
    initial, expected = INITIAL_VALUES[kind]
    v = make(pair, initial if as_function else initial())
    r = make(pair, initial if as_function else initial(), synchronization=SYNC.ON_READ)
    for variable in (v, r):
        assert variable.shape == expected.shape and variable.dtype == expected.dtype
        assert len(variable.local_results()) == 2
        for component in variable.local_results():
            assert component.dtype == expected.dtype
            np.testing.assert_array_equal(component, expected)
    assert not v.value.weak_type


def test_a_variable_as_initial_value_is_copied(pair):
    w = make(pair, 3.0)
    v = make(pair, w)
    w.assign(5.0)
    assert float(v.value) == 3


def test_a_parameter_as_initial_value_keeps_its_array(pair):
    parameter = nnx.Param(jnp.arange(3.0))
    v = make(pair, parameter)
    step = dj.jit(lambda: v.assign_add(jnp.ones(3)))
    for _ in range(2):
        step()  # donates the variable's array
    assert parameter.get_value().tolist() == [0, 1, 2] and v.value.tolist() == [2, 3, 4]


@pytest.mark.pairwise
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
@pytest.mark.parametrize("as_function", [False, True], ids=["value", "function"])
def test_a_key_as_initial_value(pair, how, sync, as_function):
    initial = (lambda: jax.random.key(7)) if as_function else jax.random.key(7)
    v = make(pair, initial, synchronization=sync, aggregation=AGG.ONLY_FIRST_REPLICA)
    assert v.dtype == jax.random.key(7).dtype and v.shape == ()

    def draw():
        new, key = jax.random.split(dj.get_replica_context().fold_in(v.value))
        v.assign(new)
        return jax.random.uniform(key)

    step = how(lambda: pair.run(draw))
    key = jax.random.key(7)
    news = []
    for replica in range(2):
        new, used = jax.random.split(jax.random.fold_in(key, replica))
        news.append(new)
        if replica == 0:
            first_draw = float(jax.random.uniform(used))
    assert np.isclose(local(pair, step())[0], first_draw)
    expected = [news[0], news[0 if sync is SYNC.ON_WRITE else 1]]
    for component, new in zip(v.local_results(), expected, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(component), jax.random.key_data(new))


def test_a_per_replica_initial_value_is_refused(pair):
    with pytest.raises(LocalityError) as caught:
        make(pair, per_replica(pair, [np.float32(1), np.float32(2)]), name="v")
    assert first_line(caught) == "variable 'v' needs one initial value."


@pytest.mark.parametrize("wrong", [None, "text", {"a": 1}, [[1], [1, 2]], lambda: None])
def test_an_initial_value_that_is_no_array(pair, wrong):
    with (
        pair.scope(),
        pytest.raises(ValueError, match="^variable 'w' needs an initial value of nu"),
    ):
        dj.Variable(wrong, name="w")
    with pair.scope(), pytest.raises(ValueError, match="(?s)^variable 'w'.*for dtype nonsense"):
        dj.Variable(1.0, name="w", dtype="nonsense")


def test_an_initial_value_is_cast_as_an_assigned_one(pair):
    """tf.Variable(3.7, dtype=tf.int32) is a TypeError too."""
    for value, dtype, error in [
        (3.7, jnp.int32, TypeError),
        (jnp.float32(3), jnp.int32, TypeError),
        (lambda: jnp.ones(3), jnp.bool_, TypeError),
        (300, jnp.int8, OverflowError),
        (np.array([1, 300]), jnp.int8, OverflowError),
        (lambda: np.array(70000.0), jnp.float16, OverflowError),
        (2**40, None, OverflowError),
    ]:
        with pytest.raises(error, match="^the initial value of variable 'w' needs ") as caught:
            make(pair, value, name="w", dtype=dtype)
        if error is TypeError:
            fix = f"dj.Variable(jnp.asarray(x).astype(jnp.{jnp.dtype(dtype)}))"
            assert str(caught.value).endswith(f"Fix: {fix}")
    with pytest.raises(TypeError, match="^the initial value of variable 'w' needs a value of dty"):
        pair.run(lambda x: dj.Variable(x, name="w", dtype=jnp.int32), args=(1.5,))
    wide = make(pair, np.array([1, 2]), dtype=jnp.bfloat16)
    assert wide.dtype == jnp.bfloat16 and wide.value.tolist() == [1, 2]


def test_a_function_is_compiled_onto_the_devices(mirrored):
    calls = []

    def initial():
        calls.append(jnp.zeros(()) + 0)
        assert isinstance(calls[-1], jax.core.Tracer)
        return jnp.ones((4, 2))

    v = make(mirrored, initial)
    assert v.value.sharding == mirrored.extended.topology.mirrored
    r = make(mirrored, initial, synchronization=SYNC.ON_READ)
    assert dj.locality(r).sharding == mirrored.extended.topology.per_replica
    assert [c.devices() for c in r.local_results()] == [{d} for d in jax.devices()[:2]]


def test_on_read_starts_with_the_value_in_each_component(pair):
    r = make(pair, 1.0, synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    assert [float(c) for c in r.local_results()] == [1, 1] and float(r.value) == 2


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "scan"])
def test_creation_inside_a_trace_of_the_users(pair, transform):
    run = {
        "jit": lambda fn: jax.jit(fn)(1.0),
        "vmap": lambda fn: jax.vmap(fn)(jnp.ones(2)),
        "grad": lambda fn: jax.grad(fn)(1.0),
        "scan": lambda fn: jax.lax.scan(lambda c, x: (fn(c), x), 1.0, jnp.ones(2)),
    }[transform]

    def create(x):
        return make(pair, 1.0, name="v").value * x

    with pytest.raises(TraceLeakError) as caught:
        run(create)
    assert first_line(caught) == "variable 'v' needs to be created outside of inner traces."


# -- copies -------------------------------------------------------------------


def test_deepcopy_copies_every_component(pair):
    r = make(pair, 1.0, name="r", synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    w = make(pair, jnp.ones(2), trainable=False)
    pair.run(lambda x: r.assign(x), args=(per_replica(pair, [np.float32(1), np.float32(2)]),))
    tree = {"r": r, "w": w, "again": r}
    copied = copy.deepcopy(tree)
    assert copied["again"] is copied["r"] and copied["r"] is not r
    for old, new in ((r, copied["r"]), (w, copied["w"])):
        for field in ("name", "shape", "dtype", "trainable", "synchronization", "aggregation"):
            assert getattr(old, field) == getattr(new, field)
        assert new.strategy is pair and pair.extended.variable_created_in_scope(new)
    step = dj.jit(lambda: pair.run(lambda: (copied["r"].assign_add(1.0), None)[1]))
    step()
    step()
    assert [float(c) for c in copied["r"].local_results()] == [3, 4]
    assert [float(c) for c in r.local_results()] == [1, 2]
    w.assign(jnp.zeros(2))
    assert copied["w"].value.tolist() == [1, 1]


# -- variables of another strategy --------------------------------------------


def test_r213_variable_of_another_strategy(pair):
    other = dj.VirtualStrategy(2)
    v = make(pair, 1.0, name="v")
    for action, fn in (("read", lambda: v.value), ("write", lambda: v.assign(2.0))):
        for call in (lambda fn=fn: other.run(fn), lambda fn=fn: _in_scope(other, fn)):
            with pytest.raises(StrategyMismatchError) as caught:
                call()
            assert first_line(caught) == (
                f"a {action} of variable 'v' needs its own strategy, {pair!r}, to be active."
            )
            assert "Mixing different tf.distribute.Strategy objects" in str(caught.value)
    assert float(v.value) == 1


def _in_scope(strategy, fn):
    with strategy.scope():
        return fn()


def test_a_default_variable_in_another_strategy_is_read_only(pair, how):
    """Decision 23."""
    v = dj.Variable(3.0, name="plain")
    assert local(pair, how(lambda: pair.run(lambda: v.value * 2))()) == [6, 6]
    with pytest.raises(StrategyMismatchError) as caught:
        how(lambda: pair.run(lambda: v.assign_add(1.0)))()
    assert first_line(caught).startswith("a write of variable 'plain' needs its own strategy")
    assert "with strategy.scope()" in str(caught.value)
    assert float(v.value) == 3
    v.assign(4.0)
    assert local(pair, how(lambda: pair.run(lambda: v.value * 2))()) == [8, 8]


def test_a_default_variable_beside_a_step(pair):
    """A counter made before any scope, written by the step around `run`."""
    count = dj.Variable(0, name="count")
    w = make(pair, 1.0, aggregation=AGG.SUM)

    @dj.jit
    def step(x):
        pair.run(lambda x: w.assign_add(x), args=(x,))
        count.assign_add(1)

    for _ in range(3):
        step(jnp.float32(1))
    count.assign_add(1)
    assert int(count.value) == 4 and float(w.value) == 7


def test_default_variables_are_plain(how):
    v = dj.Variable(1.0, synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    assert v.strategy is dj.get_strategy()
    assert float(how(lambda: v.assign_add(2.0))()) == 3
    assert float(dj.get_strategy().run(lambda: v.assign_sub(1.0))) == 2
    assert [float(x) for x in v.local_results()] == [2]


def test_an_initial_value_that_is_a_function_of_another_variable(pair):
    with pair.scope():
        other = dj.Variable(2.0, name="other")
        with pytest.raises(
            TraceLeakError, match="^the function that makes the initial value of"
        ) as e:
            dj.Variable(lambda: other.value * 2, name="v")
        assert "a read of variable 'other'" in str(e.value)
        assert float(dj.Variable(other.value * 2).value) == 4  # as it says
