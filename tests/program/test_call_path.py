"""A warm call of a program is short: what it passes of distjax, counted."""

import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.program import launch
from distjax._src.variables import storage

PACKAGE = str(Path(dj.__file__).parent)
JAX = str(Path(jax.__file__).parent)


def passed(call, package=PACKAGE):
    """Returns the files of a package whose functions one call of `call` runs, with repetitions."""
    found = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.append(frame.f_code.co_filename)

    gc.disable()  # finalizers of what other tests have left would be counted too
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.fixture(autouse=True)
def nothing_in_flight(monkeypatch):
    """Where programs in flight are limited, each is recorded, which would be counted."""
    monkeypatch.setattr(launch, "is_throttled", lambda: False)


@pytest.fixture
def total(pair):
    with pair.scope():
        return dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.SUM)


def step_of(total):
    def step(x):
        total.assign_add(x)
        return dj.get_replica_context().all_reduce("sum", x)

    return step


@pytest.mark.parametrize("results", ["mirrored", "per_replica"])
def test_run(pair, total, results):
    step = step_of(total)
    x = jnp.ones(3)
    if results == "per_replica":
        step = lambda x: total.assign_add(x) + dj.get_replica_context().replica_id_in_sync_group
    call = lambda: pair.run(step, args=(x,))
    for _ in range(3):
        call()
    files = passed(call)
    # On one shared device, arrays are asked whether they hold rows of replicas.
    is_shared = pair.mesh is None
    assert len(files) <= 13 + 32 * is_shared
    assert len(set(files)) <= 8 + 5 * is_shared + 2 * (results == "per_replica")


def test_jit_with_donated_state(pair, total, monkeypatch):
    # What is donated is searched for arrays of variables that somebody, an earlier test too, holds.
    monkeypatch.setattr(storage, "handed_out", {})
    fn = step_of(total)

    @dj.jit
    def step(x):
        return pair.run(fn, args=(x,))

    advance = dj.jit(lambda state, x: (state + x, x * 2), donate_argnums=0)
    state, x = jnp.zeros(3), jnp.ones(3)
    for _ in range(3):
        step(x)
        state, _ = advance(state, x)
    for call in (lambda: step(x), lambda: advance(state, x)):
        files = passed(call)
        assert len(files) <= 11
        assert len(set(files)) <= 6


@pytest.mark.parametrize("with_variable", [False, True])
def test_each_signature_takes_the_short_way_through_jax(pair, total, with_variable):
    """A signature whose first call raised inside of `jax.jit` never would."""
    step = step_of(total) if with_variable else (lambda x: x * 2)
    batches = [jnp.ones(3), jnp.ones(3, jnp.bfloat16), jnp.float32(1)]
    step_again = lambda x: step(jnp.float32(x) * jnp.ones(3))
    for _ in range(2):
        for batch in batches:
            pair.run(step_again, args=(batch,))
    for batch in batches:
        files = passed(lambda x=batch: pair.run(step_again, args=(x,)), JAX)
        assert not [file for file in files if "pjit" in file]


CALLS = {
    "run": lambda strategy, step: lambda state, x: strategy.run(step, args=(state, x)),
    "dj.jit": lambda strategy, step: dj.jit(lambda *args: strategy.run(step, args=args)),
    "donated": lambda strategy, step: dj.jit(
        lambda *args: strategy.run(step, args=args), donate_argnums=0
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("with_variable", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_results_passed_on_take_the_short_way_through_jax(strategy, call, with_variable):
    """A loop begins with an array that no strategy placed, and goes on with its results."""
    with strategy.scope():
        count = dj.Variable(0.0, aggregation=dj.VariableAggregation.MEAN)

    def step(state, x):
        if with_variable:
            count.assign_add(1.0)
        return state + dj.get_replica_context().all_reduce("mean", x)

    advance, x = CALLS[call](strategy, step), jnp.float32(1)
    states = [jnp.zeros(3)]
    again = lambda: states.append(advance(states[-1], x))
    for expected in (1, 2, 3, 4):
        files = passed(again, JAX)
        assert expected < 3 or not [file for file in files if "pjit" in file]
        assert states[-1].tolist() == [expected] * 3
    states.append(jnp.zeros(3))  # begun again, with what was made before
    for expected in (1, 2, 3):
        files = passed(again, JAX)
        assert expected < 3 or not [file for file in files if "pjit" in file]
        assert states[-1].tolist() == [expected] * 3
    if with_variable:
        assert float(count.value) == 7
