"""Objects that a function refers to are passed as its arguments are."""

import contextlib
import functools
import itertools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import StrategyMismatchError, TraceLeakError


class Counter(nnx.Module):
    """Counts calls."""

    def __init__(self):
        self.count = nnx.Variable(jnp.int32(0))

    def tick(self, by=1):
        self.count[...] += by
        return self.count[...]


GLOBAL = Counter()


def tick_global(by):
    return GLOBAL.tick(by)


def tick_through_another(by):
    return tick_global(by)


class Trainer:
    """A user's object that holds modules."""

    def __init__(self, counter):
        self.counter = counter
        self.inner = {"counters": [counter]}

    def step(self, by):
        self.inner["counters"][0].tick(by)
        return self.counter.tick(by)

    @dj.jit
    def jitted_step(self, by):
        return self.step(by)


def closure(counter):
    return lambda by: counter.tick(by)


def default_argument(counter):
    def fn(by, counter=counter):
        return counter.tick(by)

    return fn


def nested(counter):
    inner = closure(counter)
    return lambda by: inner(by)


def in_a_container(counter):
    held = {"counters": (counter,)}
    return lambda by: held["counters"][0].tick(by)


WAYS = {
    "closure": closure,
    "default_argument": default_argument,
    "nested": nested,
    "container": in_a_container,
    "partial": lambda counter: functools.partial(Counter.tick, counter),
    "partial_in_closure": lambda counter: closure(Trainer(counter)) and nested(counter),
    "method": lambda counter: counter.tick,
    "jitted": lambda counter: nnx.jit(closure(counter)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("way", list(WAYS))
def test_each_way_to_refer_to_a_module(pair, how, way):
    counter = Counter()
    fn = WAYS[way](counter)
    step = how(lambda by: pair.run(fn, args=(by,)))
    assert [int(step(by)) for by in (1, 2, 3)] == [1, 3, 6]
    assert int(counter.count[...]) == 6
    counter.count[...] = jnp.int32(10)
    assert int(step(1)) == 11


@pytest.mark.parametrize("fn", [tick_global, tick_through_another])
def test_globals_that_the_code_names(pair, how, fn, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL", Counter())  # a module of its own for each strategy
    step = how(lambda by: pair.run(fn, args=(by,)))
    before = int(GLOBAL.count[...])
    assert [int(step(by)) - before for by in (1, 2)] == [1, 3]


def test_attributes_of_the_users_objects(pair, how):
    counter = Counter()
    trainer = Trainer(counter)
    step = how(lambda by: pair.run(trainer.step, args=(by,)))
    assert [int(step(by)) for by in (1, 2)] == [2, 6]
    assert int(counter.count[...]) == 6


def test_a_method_that_is_jitted():
    trainer = Trainer(Counter())
    assert [int(trainer.jitted_step(by)) for by in (1, 2)] == [2, 6]


def test_an_object_that_is_an_argument_and_captured_is_one(pair):
    counter = Counter()

    def step(same):
        assert same is counter
        same.tick()
        return counter.tick()

    assert int(pair.run(step, args=(counter,))) == 2
    assert int(counter.count[...]) == 2


class Namespace:
    """Holds what the user gives it."""


def take_out_and_put_back(held):
    held["a"] = held.pop("a")


def exchange_keys(held):
    """Order and number of the modules stay the same."""
    held["a"], held["b"] = held["b"], held["a"]


def rename(held):
    """The second module is now at the name of the first."""
    first, second = held.values()
    held.clear()
    held.update(z=first, a=second)


@pytest.mark.pairwise
@pytest.mark.parametrize("change", [take_out_and_put_back, exchange_keys, rename])
@pytest.mark.parametrize("where", ["dict", "attributes", "method"])
def test_modules_that_move_among_names_are_found_by_name(pair, how, where, change):
    """A program that was compiled for other places would write to the wrong module."""
    holder = Namespace()
    held = vars(holder) if where != "dict" else {}
    held.update(a=Counter(), b=Counter())
    held["b"].count[...] = jnp.int32(10)
    step = {
        "dict": lambda by: held["a"].tick(by),
        "attributes": lambda by: holder.a.tick(by),
        "method": types.MethodType(lambda self, by: self.a.tick(by), holder),
    }[where]
    program = how(lambda by: pair.run(step, args=(by,)))
    assert int(program(1)) == 1
    change(held)
    expected = int(held["a"].count[...]) + 1
    assert int(program(1)) == expected
    assert int(held["a"].count[...]) == expected


def test_another_module_at_the_same_place_is_no_new_trace(pair):
    held, traces = {"a": Counter(), "b": [Counter()]}, []

    def step(by):
        traces.append(by)
        return held["b"][0].tick(by)

    assert int(pair.run(step, args=(1,))) == 1
    held["a"], held["b"] = Counter(), [Counter()]
    held["b"][0].count[...] = jnp.int32(5)
    assert int(pair.run(step, args=(1,))) == 6
    assert len(traces) == 1


def test_the_function_is_left_as_it_was(pair):
    counter = Counter()

    def fail():
        counter.tick()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.run(fail)
    assert fail.__closure__[0].cell_contents is counter
    assert int(counter.count[...]) == 0


def test_a_module_that_appears_later_is_found_when_it_is_traced(pair):
    held = {}

    def step(x):
        return held["counter"].tick() + x if "counter" in held else x

    assert int(pair.run(step, args=(jnp.int32(1),))) == 1
    held["counter"] = Counter()
    shapes = jnp.zeros(2, jnp.int32)
    assert np.asarray(pair.run(step, args=(shapes,))).tolist() == [1, 1]
    assert np.asarray(pair.run(step, args=(shapes,))).tolist() == [2, 2]


def test_a_module_that_is_not_found_is_no_constant(pair, how):
    hidden = itertools.repeat(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # nothing looks in there
    step = how(lambda x: pair.run(lambda x: next(hidden)(x), args=(x,)))
    with pytest.raises(TraceLeakError, match=r"an nnx\.Param of shape .* needs to be an argument"):
        step(jnp.ones((1, 2)))


class Holder(nnx.Module):
    def __init__(self, part):
        self.shadow = part


shadow = None  # a global of the name that `Holder` has for its module


def test_an_attribute_is_no_global_of_its_name(pair):
    """A module that the step never uses may be placed for another strategy."""
    global shadow
    shadow = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    dj.MirroredStrategy(jax.devices()[:3]).run(lambda m: m(jnp.ones((1, 2))), args=(shadow,))
    step = lambda holder: [(lambda: holder.shadow(jnp.ones((1, 2))))() for _ in range(1)][0]
    try:
        out = pair.run(step, args=(Holder(nnx.Linear(2, 3, rngs=nnx.Rngs(1))),))
        assert out.shape == (1, 3)
        with pytest.raises(StrategyMismatchError):
            pair.run(lambda: (lambda: shadow(jnp.ones((1, 2))))())
    finally:
        shadow = None


def test_two_threads_trace_functions_of_one_module(pair):
    """One thread at a time has its traced objects in the places that both functions refer to."""
    counter, meeting, results = Counter(), threading.Barrier(2), []

    def first():
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.1)  # in the trace
        return counter.count[...] + 1

    def second():
        return first()

    works = [lambda f=f: results.append(int(pair.run(f))) for f in (first, second)]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1, 1]
    assert first.__closure__[0].cell_contents is counter
    assert int(counter.tick()) == 1
