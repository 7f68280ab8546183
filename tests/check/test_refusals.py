"""What dj.check refuses, and its options."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

import distjax as dj
from distjax.errors import CheckError, ContextError, UnsupportedError
from tests.check.problem import (
    R,
    X,
    Y,
    batch_of,
    descend,
    finding_of,
    findings_of,
    is_right,
    loss_of,
    params,
)

AXIS = "replica"


def right(params, x, y):
    return descend(params, lax.pmean(jax.grad(loss_of)(params, x, y), AXIS))


def wrong(params, x, y):
    return descend(params, lax.psum(jax.grad(loss_of)(params, x, y), AXIS))


# -- what is refused --------------------------------------------------------------


def test_a_struct_has_no_values(strategy):
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    with pytest.raises(UnsupportedError) as caught:
        dj.check(lambda x: x.mean(), struct, strategy=strategy)
    assert str(caught.value).splitlines() == [
        "dj.check needs arrays with values.",
        "  Got: a jax.ShapeDtypeStruct among the arguments.",
        "  Why: it runs the step, for R replicas and for one.",
        "  Fix: dj.check(step, *args, strategy=strategy, rules_only=True); or an array of zeros",
    ]
    assert dj.check(lambda x: x.mean(), struct, strategy=strategy, rules_only=True) is None


def test_rows_that_the_replicas_cannot_share(strategy):
    with pytest.raises(UnsupportedError) as caught:
        dj.check(right, params(), X[:7], Y[:7], strategy=strategy, batch_argnums=(1, 2))
    assert str(caught.value).splitlines() == [
        "dj.check needs a batch that 4 replicas can share.",
        "  Got: 7 rows in x.",
        "  Why: the step is run on the same rows for one replica and for several.",
        "  Fix: a batch of 8 rows",
    ]


def test_it_is_called_outside_of_traces(strategy):
    batch = batch_of(strategy)
    wants = "^dj.check needs to be called outside of run, dj.jit and other traces"
    with pytest.raises(ContextError, match=wants):
        dj.jit(lambda *batch: dj.check(right, params(), *batch, strategy=strategy))(*batch)
    with pytest.raises(ContextError, match=wants):
        strategy.run(lambda *batch: dj.check(right, params(), *batch), args=batch)
    with pytest.raises(ContextError, match=wants):
        jax.jit(lambda x: dj.check(lambda x: x.mean(), x, strategy=strategy))(X)


def test_a_step_that_makes_variables(strategy):
    made = []

    def step(x, y):
        if not made:
            made.append(dj.Variable(0.0))
        return lax.pmean(x.mean(), AXIS) + made[0].value

    batch = batch_of(strategy)
    with pytest.raises(ContextError, match="need a function whose variables exist"):
        dj.check(step, *batch, strategy=strategy)
    assert not made
    strategy.run(step, args=batch)
    assert is_right(step, *batch, strategy=strategy)


@pytest.mark.parametrize("numbers", ["x", 1.5, True, (1, "y"), 3, -1, None], ids=str)
def test_numbers_that_are_no_arguments(strategy, numbers):
    with pytest.raises(ValueError, match="^dj.check: batch_argnums needs numbers of the") as caught:
        dj.check(right, params(), *batch_of(strategy), strategy=strategy, batch_argnums=numbers)
    lines = str(caught.value).splitlines()
    assert lines[0] == "dj.check: batch_argnums needs numbers of the 3 positional arguments."
    assert lines[1].startswith("  Got: ")
    assert lines[2:] == [
        "  Why: these arguments are parts of the batch, whose rows one replica gets together.",
        "  Fix: dj.check(step, state, batch, strategy=strategy, batch_argnums=1)",
    ]


@pytest.mark.parametrize("tolerance", ["small", -1e-3, 0, float("nan"), True], ids=str)
def test_a_tolerance_that_is_none(strategy, tolerance):
    with pytest.raises(ValueError, match="^dj.check: tolerance needs a number above 0") as caught:
        dj.check(right, params(), *batch_of(strategy), strategy=strategy, tolerance=tolerance)
    lines = str(caught.value).splitlines()
    assert lines[0] == "dj.check: tolerance needs a number above 0, or None."
    assert lines[1].startswith("  Got: ")
    assert lines[2:] == [
        "  Why: it is how much of a change of state, or of a result, is rounding.",
        "  Fix: dj.check(step, *args, strategy=strategy, tolerance=1e-2)",
    ]


def test_what_is_no_function(strategy):
    with pytest.raises(TypeError, match="^check needs a function"):
        dj.check(3, X, strategy=strategy)


def test_an_array_of_several_processes(strategy):
    """No array of one process is so: a stand-in for one."""
    array = mock.Mock(spec=jax.Array, dtype=jnp.dtype("float32"), shape=(8, 3), ndim=2)
    array.is_fully_addressable = False
    with pytest.raises(UnsupportedError) as caught:
        dj.check(lambda x: x.mean(), array, strategy=strategy)
    assert str(caught.value).splitlines() == [
        "dj.check needs arrays of this process.",
        "  Got: an array on devices of several processes.",
        "  Why: the step is run on one device, for R replicas and for one.",
        "  Fix: dj.check(step, *args, strategy=strategy, rules_only=True); or the step in one "
        "process",
    ]


def test_a_shape_that_is_written_into_the_step(strategy):
    step = lambda x, y: x.reshape(2, 3).mean()
    with pytest.raises(UnsupportedError) as caught:
        dj.check(step, *batch_of(strategy), strategy=strategy)
    name = "test_a_shape_that_is_written_into_the_step.<locals>.<lambda>"
    assert str(caught.value).splitlines() == [
        f"{name} needs to run for one replica as for 4, to be compared.",
        "  Got: TypeError: cannot reshape array of shape (8, 3) (size 24) into shape (2, 3) (size "
        "6).",
        "  Why: with one replica the batch has the rows of all; a number of rows, or of replicas, "
        "that is written into the step does not fit.",
        "  Fix: x.shape[0], or ctx.num_replicas_in_sync, in its place; batch_argnums=... if other "
        "arguments are the batch; or rules_only=True",
    ]
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_error_of_the_step_comes_out_as_it_is(strategy):
    def step(x, y):
        raise ZeroDivisionError("of the step")

    with pytest.raises(ZeroDivisionError, match="of the step"):
        dj.check(step, *batch_of(strategy), strategy=strategy)


def test_a_strategy_that_traces_nothing():
    with pytest.raises(UnsupportedError, match="^dj.check needs a strategy that compiles its st"):
        dj.check(lambda x: x, X, strategy=dj.testing.ReferenceStrategy(2))


# -- the batch ------------------------------------------------------------------------


def test_rows_that_are_given_by_number(strategy):
    """As global arrays, of which each replica gets its part, or as parts of the replicas."""
    parts = strategy.per_replica(X.reshape(R, -1, 3)), strategy.per_replica(Y.reshape(R, -1))
    for rows in ((X, Y), parts):
        assert is_right(right, params(), *rows, strategy=strategy, batch_argnums=(1, 2))
        found = finding_of(wrong, params(), *rows, strategy=strategy, batch_argnums=(1, 2))
        assert "by the factor 4" in found.text


def test_one_number(strategy):
    step = lambda x: lax.psum(x.mean(), AXIS)
    assert is_right(lambda x: lax.pmean(x.mean(), AXIS), X, strategy=strategy, batch_argnums=0)
    assert finding_of(step, X, strategy=strategy, batch_argnums=0)


def test_without_numbers_all_values_per_replica_are_rows(strategy):
    parts = strategy.per_replica(X.reshape(R, -1, 3)), strategy.per_replica(Y.reshape(R, -1))
    assert is_right(right, params(), *parts, strategy=strategy)
    assert finding_of(wrong, params(), *parts, strategy=strategy)


def test_beside_a_batch_other_values_per_replica_are_each_replica_s_own(strategy):
    """What depends on them is not compared."""
    own = strategy.per_replica(jnp.arange(1.0, R + 1))
    step = lambda params, own, x, y: (right(params, x, y), own * x.mean())
    assert is_right(step, params(), own, *batch_of(strategy), strategy=strategy)
    step = lambda params, own, x, y: (wrong(params, x, y), own * x.mean())
    found = findings_of(step, params(), own, *batch_of(strategy), strategy=strategy)
    assert [f.level for f in found] == ["error", "note"]
    assert found[1].rule == "values that are not compared" and "[1]" in found[1].text


def test_rows_in_a_tree(strategy):
    batch = next(iter(strategy.distribute_dataset([{"x": X, "more": (Y, None)}])))
    step = lambda params, batch: wrong(params, batch["x"], batch["more"][0])
    assert finding_of(step, params(), batch, strategy=strategy)


def test_a_step_without_a_batch(strategy):
    assert is_right(lambda p: descend(p, p), params(), strategy=strategy)


# -- the rules alone -------------------------------------------------------------------


def test_rules_only_runs_nothing(strategy):
    calls = []

    def step(params, x, y):
        jax.debug.callback(lambda: calls.append(None))
        return wrong(params, x, y)

    [finding] = findings_of(step, params(), *batch_of(strategy), strategy=strategy, rules_only=True)
    assert (finding.rule, finding.level) == ("a sum of local means", "warning")
    assert not calls


def test_rules_only_does_not_see_what_only_running_shows(strategy):
    """A variance about the local mean, in two passes, added into state."""

    def step(total, x, y):
        return total + lax.pmean(jnp.mean((x - x.mean()) ** 2), AXIS)

    args = jnp.float32(0), *batch_of(strategy)
    assert is_right(step, *args, strategy=strategy, rules_only=True)
    assert finding_of(step, *args, strategy=strategy)


# -- how much is rounding ---------------------------------------------------------------


def slightly_wrong(params, x, y):
    """Half a percent of the change is not that of one replica."""
    grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
    count = lax.psum(jnp.float32(1), AXIS)
    return descend(params, jax.tree.map(lambda g: g * (1 + 0.002 * count), grads))


def test_a_tolerance_of_one_s_own(strategy):
    args = params(), *batch_of(strategy)
    assert findings_of(slightly_wrong, *args, strategy=strategy)
    assert is_right(slightly_wrong, *args, strategy=strategy, tolerance=0.02)
    assert findings_of(wrong, *args, strategy=strategy, tolerance=0.02)


def test_state_counts_by_its_change(strategy):
    """A rate of 1e-6 moves weights by less than their rounding would matter elsewhere."""

    def step(params, x, y):
        grads = lax.psum(jax.grad(loss_of)(params, x, y), AXIS)
        return jax.tree.map(lambda p, g: p - 1e-5 * g, params, grads)

    assert findings_of(step, params(), *batch_of(strategy), strategy=strategy)


def test_findings_are_in_the_error(strategy):
    with pytest.raises(CheckError) as caught:
        dj.check(wrong, params(), *batch_of(strategy), strategy=strategy)
    [finding] = caught.value.findings
    assert finding.level == "error" and finding.expected is None
    assert finding.text.splitlines()[0] in str(caught.value)


# -- other numbers of replicas --------------------------------------------------------------


def test_several_numbers_of_replicas(strategy):
    args = params(), *batch_of(strategy)
    assert_invariant = dj.testing.assert_replica_invariant
    assert assert_invariant(right, *args, strategy=strategy) is None
    assert assert_invariant(wrong, *args, strategy=strategy, counts=(1,)) is None
    with pytest.raises(CheckError, match="for 2 replicas as for one") as caught:
        assert_invariant(wrong, *args, strategy=strategy)
    assert "by the factor 2" in str(caught.value)


def test_a_row_for_each_replica(strategy):
    args = params(), *batch_of(strategy)
    with pytest.raises(CheckError, match="for 8 replicas as for one"):
        dj.testing.assert_replica_invariant(wrong, *args, strategy=strategy, counts=(8,))


def test_as_many_outputs_as_replicas(strategy):
    def step(w, x, y):
        loss = lambda w: jnp.mean(jnp.mean((x @ w - y[:, None]) ** 2, axis=-1))
        return w - 0.1 * lax.psum(jax.grad(loss)(w), AXIS)

    assert findings_of(step, jnp.ones((3, R)), *batch_of(strategy), strategy=strategy)


def test_what_is_right_for_one_number_of_replicas_only(strategy):
    """R is written into the step: `dj.check` excuses it, other numbers do not."""

    def step(params, x, y):
        grads = lax.psum(jax.grad(loss_of)(params, x, y), AXIS)
        return descend(params, jax.tree.map(lambda g: g / 4, grads))

    args = params(), *batch_of(strategy)
    assert is_right(step, *args, strategy=strategy)
    with pytest.raises(CheckError):
        dj.testing.assert_replica_invariant(step, *args, strategy=strategy)


def test_numbers_of_replicas_that_do_not_divide_the_rows(strategy):
    args = params(), *batch_of(strategy)
    with pytest.raises(UnsupportedError, match="^dj.check needs a batch that 3 replicas can share"):
        dj.testing.assert_replica_invariant(right, *args, strategy=strategy, counts=(3,))


# -- what a step calls on the host -----------------------------------------------------------


def test_callbacks_of_the_step(strategy):
    """A callback without effects is called as often as a run needs it; a print is made once."""
    seen = []

    def step(x, y):
        jax.debug.callback(lambda mean: seen.append(float(mean)), x.mean())
        return lax.pmean(x.mean(), AXIS)

    assert is_right(step, *batch_of(strategy), strategy=strategy)
    assert len(seen) <= R


def test_a_callback_with_effects_in_a_loop(strategy):
    struct = jax.ShapeDtypeStruct((), jnp.float32)

    def step(x, y):
        body = lambda total, row: (total + io_callback(lambda a: a, struct, row.mean()), None)
        return lax.pmean(lax.scan(body, jnp.float32(0), x)[0], AXIS)

    with pytest.raises(UnsupportedError) as caught:
        dj.check(step, *batch_of(strategy), strategy=strategy)
    text = str(caught.value)
    assert text.startswith("dj.check needs an io_callback that returns values to be outside of")
    assert "  Why: it is called once, and its results are used again in other runs." in text
    assert "  Fix: jax.pure_callback, if it has no effect; or rules_only=True" in text
