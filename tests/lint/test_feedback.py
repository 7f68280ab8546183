"""State that a loop feeds back: found at the second call, whatever its tree is made of."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityWarning
from tests.diagnostics.lines import line_of
from tests.replicas import ids

START = np.ones(2, np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: object
    count: object


def lone(w, x):
    return w - x


def pair_of_results(w, x):
    return w - x, x


def flattened(leaves, x):
    return tuple(leaf - x for leaf in leaves)


def dataclass_to_dict(state, x):
    return {"w": state.w - x, "count": state.count}


FORGETFUL = {
    "lone array": (lone, START, lambda out: out),
    "first of a tuple": (pair_of_results, START, lambda out: out[0]),
    "flattened": (flattened, [START, START], list),
    "repacked": (dataclass_to_dict, State(START, np.int32(0)), lambda out: State(**out)),
    "a number": (lone, 1.0, lambda out: out),
}


def loop(run, start, unpack, x, times=3):
    state = start
    for _ in range(times):
        state = unpack(run(state, x))  # the loop
    return state


@pytest.mark.parametrize("name", FORGETFUL)
@pytest.mark.parametrize("wrap", [lambda f: f, dj.jit], ids=["run", "jit"])
def test_state_that_comes_back_different_warns_at_the_second_call(pair, name, wrap):
    fn, start, unpack = FORGETFUL[name]
    run = wrap(lambda state, x: pair.run(fn, args=(state, x)))
    with pytest.warns(LocalityWarning) as caught:
        loop(run, start, unpack, ids(pair))
    text = str(caught[0].message)
    assert "takes state that is equal on every replica" in text.splitlines()[0]
    assert "in its second call values that differ per replica at " in text
    assert "its result" in text and "dj.expect(reason, differs=" in text
    assert f"{caught[0].filename}:{caught[0].lineno}" in (
        line_of(__file__, "the loop"),
        f"{__file__}:{fn_line()}",
    )
    assert len(caught) == 1


def fn_line():
    source = test_state_that_comes_back_different_warns_at_the_second_call.__code__
    return source.co_firstlineno + 4


def test_two_runs_of_one_trace(pair):
    def step(w, x):
        return loop(lambda w, x: pair.run(lone, args=(w, x)), w, lambda out: out, x, times=2)

    with pytest.warns(LocalityWarning, match="lone takes state.*\n.*at w .which is its result."):
        dj.jit(step)(START, ids(pair))


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        yield


def test_other_data_of_the_same_shape_is_no_state(pair, silent):
    double = lambda x: x * 2
    pair.run(double, args=(np.float32(1),))
    pair.run(double, args=(ids(pair),))
    pair.run(double, args=(pair.run(lambda x: x + 1, args=(ids(pair),)),))


def test_state_that_differs_from_the_start_is_meant(pair, silent):
    loop(lambda w, x: pair.run(lone, args=(w, x)), ids(pair), lambda out: out, ids(pair))


def test_state_that_is_reduced_stays_equal(pair, silent):
    def right(w, x):
        return w - dj.get_replica_context().all_reduce("mean", x)

    loop(lambda w, x: pair.run(right, args=(w, x)), START, lambda out: out, ids(pair))


def test_integers_and_keys_may_differ(pair, silent):
    def sample(key, count, x):
        return dj.get_replica_context().fold_in(key), count + x.astype(jnp.int32)

    key, count = jax.random.key(0), np.int32(0)
    for _ in range(2):
        key, count = pair.run(sample, args=(key, count, ids(pair)))


def test_what_is_meant_to_differ_is_silent(pair, silent):
    env = dj.expect("each replica has a game of its own", differs=START)
    out = pair.run(lone, args=(env, ids(pair)))
    pair.run(lone, args=(dj.expect("each replica has a game", differs=out), ids(pair)))


@pytest.mark.usefixtures("collect_garbage")
def test_nothing_is_kept_alive(pair):
    import gc
    import weakref

    run = lambda w, x: w - x
    large = np.ones(300, np.float32)  # a small result may be asked for the end of its program
    out = pair.run(run, args=(large, ids(pair)))
    kept = weakref.ref(out.stacked)
    del out
    gc.collect()
    assert kept() is None


def test_a_lone_array_is_meant_to_differ_from_the_first_call_on(pair, silent):
    w = pair.run(lone, args=(dj.expect("local training", differs=START), ids(pair)))
    loop(lambda w, x: pair.run(lone, args=(w, x)), w, lambda out: out, ids(pair))
