"""`lower(*args).compile()` gives what is called with the user's arguments, compiled once."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

X = np.arange(2, dtype=np.float32)


def traced(calls, n, x):
    calls.append(n)
    return x * n


def of_pmap(pair, fn):
    return dj.pmap(fn, static_broadcasted_argnums=0, strategy=pair)


def of_jit(_, fn):
    return dj.jit(fn, static_argnums=0)


def by_name(_, fn):
    compiled = dj.jit(fn, static_argnames="n")
    compiled_lower = compiled.lower
    compiled.lower = lambda n, x: compiled_lower(n=n, x=x)
    return compiled


@pytest.mark.parametrize("make", [of_pmap, of_jit, by_name])
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
        "  Why: a call is one of the function itself, which knows no options: this program is to "
        "be looked at.\n"
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
