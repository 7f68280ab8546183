"""Steps that write variables follow the JAX settings of the thread that calls them, like `jit`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError

SETTINGS = {
    "enable_x64": lambda: jax.enable_x64(True),
    "threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "default_matmul_precision": lambda: jax.default_matmul_precision("float32"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
}


def outputs():
    """Values, and what was traced, under the settings of now."""
    numbers = jax.random.normal(jax.random.key(0), (8,), "float32")
    config = jax.config
    marks = [config.jax_numpy_dtype_promotion == "strict", config.jax_default_matmul_precision]
    return jnp.arange(2), numbers, jnp.asarray([mark in (True, "float32") for mark in marks])


def described(out):
    return [(x.dtype, np.asarray(x).tolist()) for x in out]


@pytest.mark.pairwise
@pytest.mark.parametrize("wrap", [False, True], ids=["run", "jit"])
@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_law_settings_of_a_block_count(pair, setting, wrap):
    """In any order, and each time: what a step without variables gives."""
    with pair.scope():
        v = dj.Variable(jnp.float32(0), aggregation=dj.VariableAggregation.MEAN)

    def step():
        v.assign_add(jnp.float32(1))
        return outputs()

    call = lambda: pair.run(step)
    call = dj.jit(call) if wrap else call
    plain = jax.jit(lambda: outputs())  # a function of its own
    outside = described(plain())
    with SETTINGS[setting]():
        inside = described(plain())
    assert inside != outside
    for number, is_inside in enumerate([False, True, True, False, True]):
        if is_inside:
            with SETTINGS[setting]():
                assert described(call()) == inside, number
        else:
            assert described(call()) == outside, number
    assert float(v.value) == 5


def test_another_thread_has_its_own(pair):
    with pair.scope():
        v = dj.Variable(jnp.float32(0), aggregation=dj.VariableAggregation.MEAN)

    def step():
        v.assign_add(jnp.float32(1))
        return jnp.arange(2) * 1.0

    dtypes = {}

    def work(is_wide):
        with jax.enable_x64(is_wide):
            dtypes[is_wide] = {str(pair.run(step).dtype) for _ in range(10)}

    threads = [threading.Thread(target=work, args=(is_wide,)) for is_wide in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == {True: {"float64"}, False: {"float32"}} and float(v.value) == 20


@pytest.mark.parametrize("is_donated", [False, True])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["jit", "pmap"])
def test_a_nan_in_a_step_that_writes_no_variable(pair, is_mapped, is_donated):
    def step(w, x):
        return w - jax.lax.pmean(jnp.log(x).mean(), "replica")

    numbers = 0 if is_donated else ()
    call = pair.jit(step, donate_argnums=numbers)
    if is_mapped:
        call = dj.pmap(
            step, strategy=pair, in_axes=(None, 0), out_axes=None, donate_argnums=numbers
        )
    good = np.ones((2, 2)) if is_mapped else pair.per_replica(np.ones((2, 2)))
    w = pair.extended.broadcast_to(jnp.ones(3))
    with jax.debug_nans(True):
        for _ in range(3):
            w = call(w, good)
        with pytest.raises(FloatingPointError) as caught:
            call(w, jax.tree.map(lambda x: -x, good))
    assert is_donated or not w.is_deleted()
    gone = ", and arguments named in donate_argnums are gone" if w.is_deleted() else ""
    assert str(caught.value) == (
        f"{step.__qualname__} needs finite values while jax.debug_nans or jax.debug_infs is on.\n"
        "  Got: nan or inf in a result.\n"
        f"  Why: the step has run: JAX looks at its results{gone}.\n"
        "  Fix: jax.jit(part)(rows of one replica) for a part of the step without reductions: JAX "
        "then names the operation"
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("check", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("wrap", [False, True], ids=["run", "jit"])
def test_nan_is_an_error_where_it_is_looked_for(pair, check, is_warm, wrap):
    with pair.scope():
        v = dj.Variable(jnp.float32(0), name="v", aggregation=dj.VariableAggregation.MEAN)

    def step(x):
        v.assign_add(1.0)
        return 1 / x if check is jax.debug_infs else jnp.log(x)

    call = lambda x: pair.run(step, args=(x,))
    call = dj.jit(call) if wrap else call
    bad = 0.0 if check is jax.debug_infs else -1.0
    if is_warm:
        call(1.0)
    with check(True):
        call(2.0)
        with pytest.raises(FloatingPointError) as caught:
            call(bad)
    text, fixes = str(caught.value), ("strategy.jit(step)(...)", "assign them")
    if "values from before" in text:
        assert float(v.value) == 1 + is_warm and fixes[0] in text
        with check(True), pytest.raises(FloatingPointError, match="encountered in (log|div)"):
            pair.jit(step)(bad)
        assert float(v.value) == 1 + is_warm
    else:
        assert "have no value now" in text and fixes[1] in text
        with pytest.raises(ContextError, match="^variable 'v' needs a value"):
            _ = v.value
    v.assign(3.0)  # as it says
    with check(True):
        call(2.0)
    assert float(v.value) == 4


@pytest.mark.parametrize(
    "make",
    [
        dj.get_strategy,
        lambda: dj.OneDeviceStrategy(jax.devices()[0]),
        lambda: dj.VirtualStrategy(2),
        lambda: dj.MirroredStrategy(jax.devices()[:2]),
    ],
    ids=["default", "one device", "virtual", "mirrored"],
)
def test_nan_in_a_first_call_is_searched_for(make):
    """JAX runs the program once more then, operation by operation."""
    with make().scope():
        v = dj.Variable(1.0)

    @dj.jit
    def step(x):
        v.assign(x.sum())
        return jnp.log(v.value - 1000)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        step(jnp.arange(6.0))
    assert float(v.value) == 1
