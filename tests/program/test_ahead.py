"""`lower(*args).compile()` gives what is called with the user's arguments, compiled once."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj

X = np.arange(2, dtype=np.float32)


def traced(calls, n, x):
    calls.append(n)
    return x * n


def of_pmap(pair, fn):
    return dj.pmap(fn, static_broadcasted_argnums=0, strategy=pair)


def of_jit(_, fn):
    return dj.jit(fn, static_argnums=0)


def of_strategy(pair, fn):
    return pair.jit(fn, static_argnums=0)


def by_name(_, fn):
    compiled = dj.jit(fn, static_argnames="n")
    compiled_lower = compiled.lower
    compiled.lower = lambda n, x: compiled_lower(n=n, x=x)
    return compiled


@pytest.mark.parametrize("make", [of_pmap, of_jit, of_strategy, by_name])
def test_a_compiled_program_takes_what_is_not_static(pair, make):
    calls = []
    fn = make(pair, lambda n, x: traced(calls, n, x))
    compiled = fn.lower(3, X).compile()
    num_traces = len(calls)
    result = compiled(x=X) if make is by_name else compiled(X)
    np.testing.assert_array_equal(result, 3 * X)
    assert len(calls) == num_traces, "the call found what was compiled"
    assert "HloModule" in compiled.as_text() and compiled.memory_analysis() is not None


def test_a_compiled_step_writes_its_variables(pair):
    with pair.scope():
        total = dj.Variable(0.0, name="total", aggregation=dj.VariableAggregation.SUM)
    step = pair.jit(lambda x: (total.assign_add(x), x + 1)[1])
    compiled = step.lower(pair.per_replica(X)).compile()
    assert float(total.value) == 0
    for _ in range(2):
        result = compiled(pair.per_replica(X))
    np.testing.assert_array_equal(result.stacked, X + 1)
    assert float(total.value) == 2 * X.sum()


def test_both_stages_can_be_copied():
    lowered = dj.jit(lambda x: 2 * x).lower(X)
    compiled = copy.copy(copy.copy(lowered).compile())
    np.testing.assert_array_equal(compiled(X), 2 * X)
    assert "HloModule" in compiled.as_text()


def test_options_are_for_looking_at():
    compiled = dj.jit(jnp.sin).lower(X).compile({"xla_cpu_enable_fast_math": False})
    assert isinstance(compiled.as_text(), str)
    with pytest.raises(ValueError) as caught:
        compiled(X)
    assert str(caught.value) == (
        "a compiled program that is called needs the default compiler options.\n"
        "  Got: lower(...).compile({'xla_cpu_enable_fast_math': False}).\n"
        "  Why: calling it calls the function itself, which takes no options; with options it can "
        "only be looked at.\n"
        "  Fix: lower(...).compile(); options for all programs by XLA_FLAGS"
    )


def test_a_loop_compiled_ahead_is_that_of_jax():
    """As published loops have it: time to compile apart from time to train."""

    def train(w, xs):
        def step(w, x):
            return w - jax.lax.pmean(w - x, "i"), w

        return jax.lax.scan(step, w, xs)

    w, xs = np.zeros((2, 3), np.float32), np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    ours, theirs = (
        pmap(train, axis_name="i").lower(w, xs).compile()(w, xs) for pmap in (dj.pmap, jax.pmap)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_compiled_program_stays_with_the_strategy_it_was_lowered_under(pair):
    fn = dj.jit(lambda x: dj.get_strategy().num_replicas_in_sync * x)
    with pair.scope():
        compiled = fn.lower(X).compile()
    np.testing.assert_array_equal(compiled(X), 2 * X)
    np.testing.assert_array_equal(fn(X), X)
    with dj.VirtualStrategy(3).scope():
        np.testing.assert_array_equal(compiled(X), 2 * X)


# -- structs -------------------------------------------------------------------


def struct_of(x, is_placed=False):
    x = jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if is_placed else None)


def drawn(state, x, scale):
    state["w"] += scale * jax.random.normal(state["key"], state["w"].shape)
    return state, dj.get_replica_context().all_reduce("mean", x) + x


LOWERED = {
    "dj.jit": lambda strategy: dj.jit(lambda *args: strategy.run(drawn, args)),
    "strategy.jit": lambda strategy: strategy.jit(drawn),
    "dj.pmap": lambda strategy: dj.pmap(drawn, in_axes=(None, 0, None), strategy=strategy),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("name", LOWERED)
def test_a_struct_stands_for_an_array(pair, name, is_placed):
    """As in `jax.jit(f).lower`; in a tree, as a key, as a PerReplica; what is static stays."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {"w": jnp.ones(3), "key": jax.random.key(0), "name": "a state"}
    x = x if name == "dj.pmap" else pair.per_replica(x)
    structs = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, str) else struct_of(leaf, is_placed), (state, x)
    )
    fn = LOWERED[name](pair)
    compiled = fn.lower(*structs, 2.0).compile()
    found, expected = compiled(state, x, 2.0), LOWERED[name](pair)(state, x, 2.0)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    values = lambda results: jax.tree.leaves((results[0]["w"], results[1]))
    for one, other in zip(values(found), values(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "HloModule" in compiled.as_text()


def test_what_was_lowered_for_structs_is_found_by_arrays(pair):
    calls = []
    step = pair.jit(lambda x: traced(calls, 3, x))
    x = pair.per_replica(X)
    compiled = step.lower(jax.tree.map(lambda x: struct_of(x, True), x)).compile()
    np.testing.assert_array_equal(compiled(x).stacked, 3 * X)
    assert len(calls) == 1
    weak = jax.ShapeDtypeStruct((), np.float32, weak_type=True)
    product = dj.jit(lambda x: x * jnp.bfloat16(1)).lower(weak).compile()(2.0)
    assert product.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", LOWERED)
def test_a_struct_says_where_its_array_is(name):
    devices = jax.devices()
    strategy = dj.MirroredStrategy(devices[:2])
    elsewhere = jax.sharding.SingleDeviceSharding(devices[3])
    far = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=elsewhere)
    state, x = {"w": jnp.ones(2), "key": jax.random.key(0)}, np.ones((2, 2), np.float32)
    compiled = LOWERED[name](strategy).lower(*jax.tree.map(far, (state, x)), 2.0).compile()
    for leaf in jax.tree.leaves(compiled.input_shardings):
        assert leaf.device_set == set(devices[:2])
    split = jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=strategy.per_replica(x).stacked.sharding
    )
    lower = LOWERED[name](strategy).lower
    if name == "strategy.jit":
        wants = "(?s)argument x of drawn.*ShapeDtypeStruct"
        with pytest.raises(dj.errors.LocalityError, match=wants):
            lower(state, split, 2.0)
    else:
        assert split.sharding in jax.tree.leaves(lower(state, split, 2.0).compile().input_shardings)


def test_where_a_function_is_called_a_struct_is_a_python_object(pair):
    spec = jax.ShapeDtypeStruct((2,), np.float32)
    call_back = lambda spec, x: jax.pure_callback(lambda x: 2 * np.asarray(x), spec, x)
    np.testing.assert_array_equal(dj.jit(call_back)(spec, X), 2 * X)
    on_replicas = lambda x: pair.run(lambda x: -x, args=(x,))
    for call in (dj.jit(jnp.negative), pair.jit(jnp.negative), on_replicas):
        with pytest.raises(TypeError, match="ShapeDtypeStruct") as caught:
            call(spec)
        [note] = [note for note in caught.value.__notes__ if "jax.ShapeDtypeStruct" in note]
        assert note == (
            "A jax.ShapeDtypeStruct stands for an array where a step is lowered, explained or "
            "checked; a call treats it as a Python object, such as the result shape of a "
            "jax.pure_callback.\n"
            "  Fix: step.lower(struct).compile(); an array where the step is called"
        )


def test_flax_modules_of_structs(pair):
    make = lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = pair.jit(lambda model, x: model(x))
    x = np.ones((2, 3), np.float32)
    compiled = step.lower(nnx.eval_shape(make), struct_of(x)).compile()
    np.testing.assert_allclose(compiled(make(), x), step(make(), x), rtol=1e-6)


def test_equinox_modules_of_structs(pair):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 1, 4, 2, key=jax.random.key(0))
    structs = eqx.filter_eval_shape(lambda model: model, model)
    step = pair.jit(lambda model, x: jax.vmap(model)(x))
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(
        step.lower(structs, struct_of(x)).compile()(model, x), step(model, x)
    )


@pytest.mark.parametrize("jit", [dj.jit, jax.jit])
def test_static_arguments_before_and_behind_others(jit):
    """Ours takes more than JAX's, which wants each argument as it was lowered."""
    behind = jit(lambda x, n, y=1.0: x * n + y, static_argnums=1)
    lowered = {
        "by position": behind.lower(X, 3),
        "by keyword": behind.lower(x=X, n=3),
        "mixed": behind.lower(X, n=3),
    }
    np.testing.assert_array_equal(lowered["by position"].compile()(X), 3 * X + 1)
    np.testing.assert_array_equal(lowered["by keyword"].compile()(x=X), 3 * X + 1)
    np.testing.assert_array_equal(lowered["mixed"].compile()(X), 3 * X + 1)
    if jit is dj.jit:
        np.testing.assert_array_equal(lowered["by position"].compile()(x=X), 3 * X + 1)
        np.testing.assert_array_equal(lowered["by position"].compile()(X, 2.0), 3 * X + 2)
        np.testing.assert_array_equal(lowered["by keyword"].compile()(X), 3 * X + 1)
    else:
        with pytest.raises(TypeError, match="does not match"):
            lowered["by position"].compile()(x=X)
