"""Every wrong program is found at its level, its right version is silent."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import LocalityWarning, ReductionWarning
from tests.drill_mark import first_of_each
from tests.wrong_programs import (  # noqa: F401
    batches,
    between_runs,
    measurements,
    merges,
    reductions,
    state,
    variables,
)
from tests.wrong_programs.program import (
    ERROR,
    SILENT,
    TABLE,
    WARNING,
    check,
    gradient,
    mean,
    require_silence,
    run_plainly,
    total,
)

ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
INSIDE = [row for row in TABLE if not row.is_outside]
#: A check runs a program several times, and is no other code for two mistakes of one kind.
CHECKED = pytest.mark.parametrize(
    "row",
    first_of_each(lambda row: (row.level, row.rule, row.unseen, row.unequal), INSIDE),
    ids=lambda row: row.name,
)


@pytest.fixture(scope="module")
def three():
    """No number in the programs is R, or a part of it."""
    return dj.VirtualStrategy(3)


@ROWS
def test_what_a_plain_run_says_of_a_wrong_program(three, row):
    level, text = run_plainly(three, row.build(three, False))
    assert level == row.level, text
    if level != SILENT:
        is_found = re.search(row.rule, text) if level == ERROR else "Fix: " in text
        assert is_found or row.rule == "state that comes back different", text


@CHECKED
def test_a_wrong_program_is_checked(three, row):
    if row.level == ERROR and row.rule != "state that comes back different":
        with pytest.raises((ValueError, RuntimeError), match=row.rule):
            check(three, row.build(three, False))
        return
    found = check(three, row.build(three, False))
    assert bool(found) != bool(row.unseen), found
    assert all("\n  Fix: " in finding.text for finding in found)


@ROWS
def test_a_plain_run_of_the_right_version_is_silent(three, row):
    assert run_plainly(three, row.build(three, True)) == (SILENT, "")


@CHECKED
def test_the_right_version_is_checked(three, row):
    assert bool(check(three, row.build(three, True))) == bool(row.unequal)


def test_how_many_are_found():
    loud = sum(row.level in (ERROR, WARNING) for row in TABLE)
    checked = sum(not row.unseen for row in TABLE)
    assert len(TABLE) >= 141
    assert loud / len(TABLE) >= 0.7
    assert checked / len(TABLE) >= 0.9
    assert all(row.why for row in TABLE if row.level != ERROR)


# -- one replica ----------------------------------------------------------------

#: What the trace of one replica cannot tell: a total divided by a number may be divided by the
#: local or by the global batch, which are of one size; a batch from the host is its own; and a
#: factor of 1, as that of a clip by norm 1, may be 1/R.
UNKNOWN_ALONE = frozenset(
    "sum_of_means_with_equal_noise sum_of_means_with_noise_of_each_replica "
    "sum_over_the_local_batch_size sum_by_example_over_the_local_batch_size "
    "sum_of_what_was_divided_by_the_local_batch_size mean_loss_into_an_optimizer_that_sums "
    "mean_over_a_global_batch sum_of_what_was_made_for_a_mean one_batch_for_all "
    "sum_for_mean_in_adam".split()
)
#: Shares are not told from means, either.
SHARE = "a share averaged"
#: What is an error with several replicas, and works with one: a bare value, or a Flax TrainState.
LEGAL_ALONE = frozenset("number_of_a_value_per_replica truth_of_a_value_per_replica".split())


@pytest.fixture(scope="module")
def alone():
    return dj.VirtualStrategy(1)


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if not row.is_outside and row.level == WARNING],
    ids=lambda row: row.name,
)
def test_one_replica_hides_no_mistake_that_its_trace_shows(alone, row):
    rules = [f.rule for f in check(alone, row.build(alone, False), rules_only=True)]
    assert (row.rule in rules) == (row.name not in UNKNOWN_ALONE and row.rule != SHARE), rules


@pytest.mark.parametrize("row", INSIDE, ids=lambda row: row.name)
def test_a_plain_run_of_the_right_version_is_silent_on_one_replica(alone, row):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        assert check(alone, row.build(alone, True), rules_only=True) == ()


@pytest.mark.parametrize("row", [row for row in TABLE if row.is_outside], ids=lambda row: row.name)
def test_between_runs_of_one_replica(alone, row):
    level, text = run_plainly(alone, row.build(alone, False))
    assert level == (SILENT if row.name in LEGAL_ALONE else row.level), text
    assert run_plainly(alone, row.build(alone, True)) == (SILENT, "")


ALONE = {
    "OneDevice": dj.OneDeviceStrategy,
    "Mirrored": lambda: dj.MirroredStrategy(jax.devices()[:1]),
    "Sharded": lambda: dj.ShardedStrategy(jax.devices()[:1], min_split_bytes=0),
    "Virtual": lambda: dj.VirtualStrategy(1),
    "CentralStorage": lambda: dj.CentralStorageStrategy(jax.devices()[:1]),
}


@pytest.mark.parametrize("make", ALONE.values(), ids=list(ALONE))
def test_a_plain_run_on_one_replica_tells(make):
    strategy = make()
    (x,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    w = np.ones(3, np.float32)
    steps = {
        "its sum, which updates": lambda w, x: w - 0.1 * total(gradient(w, x)),
        "differ per replica at w": lambda w, x: w - 0.1 * gradient(w, x),
    }
    for text, step in steps.items():
        with pytest.warns((ReductionWarning, LocalityWarning), match=text) as caught:
            strategy.run(step, args=(strategy.run(step, args=(w, x)), x))
        assert "one replica hides it; with more," in str(caught[0].message)
    require_silence(strategy, lambda w, x: w - 0.1 * mean(gradient(w, x)), w, x)


def test_flax_on_one_replica_tells_of_a_missing_reduction():
    strategy = dj.OneDeviceStrategy()
    (x,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    loss = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    wrong = lambda model, optimizer, x: optimizer.update(model, loss(model, x)[1])
    right = lambda model, optimizer, x: dj.flax.apply_gradients(optimizer, model, loss(model, x)[1])
    with pytest.warns(LocalityWarning, match="computed from one replica's own examples"):
        strategy.run(wrong, args=(model, optimizer, x))
    require_silence(strategy, right, model, optimizer, x)


def test_the_default_strategy_stays_silent(recwarn):
    step = dj.jit(lambda w, x: w - 0.1 * total(gradient(w, x)))
    (x,) = dj.get_strategy().distribute_dataset([np.ones((4, 3), np.float32)])
    w = np.ones(3, np.float32)
    step(step(w, x), x)
    assert dj.check(step, w, x, rules_only=True) is None
    assert [w for w in recwarn if issubclass(w.category, (LocalityWarning, ReductionWarning))] == []
