"""The cache of programs: what it may not confuse, and how often functions are traced."""

import functools
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax._src.program.functions import FunctionCache
from tests.replicas import ids, local, per_replica

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


# -- strategies ---------------------------------------------------------------


def test_one_function_under_two_strategies(how):
    strategies = [dj.VirtualStrategy(2), dj.MirroredStrategy(jax.devices()[:2])]
    strategies += [dj.VirtualStrategy(2), dj.VirtualStrategy(3), dj.OneDeviceStrategy()]

    def fn(x):
        ctx = dj.get_replica_context()
        assert ctx.strategy is dj.get_strategy()
        return ctx.num_replicas_in_sync, ctx.all_reduce("sum", x)

    steps = [how(lambda x, s=s: s.run(fn, args=(x,))) for s in strategies]
    for _ in range(2):
        for strategy, step in zip(strategies, steps, strict=True):
            count = strategy.num_replicas_in_sync
            number, total = step(jnp.float32(2))
            assert number == count and float(total) == 2 * count


# The caches of JAX, of inner functions by function and avals, know no contexts.


@jax.jit
def jitted_global(x):
    ctx = dj.get_replica_context()
    total = ctx.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(x,))
    return total * ctx.num_replicas_in_sync + CURRENT[dj.get_strategy()].value


def scan_body(carry, x):
    ctx = dj.get_replica_context()
    return carry + ctx.all_reduce("sum", x) + CURRENT[ctx.strategy].value, None


@jax.checkpoint
def checkpointed(x):
    ctx = dj.get_replica_context()
    v = CURRENT[ctx.strategy]
    return ctx.merge_call(lambda strategy, x: strategy.reduce("mean", x) * v.value, args=(x,))


def branch(x):
    return x * CURRENT[dj.get_replica_context().strategy].value


CURRENT = weakref.WeakKeyDictionary()

INNER = {
    "jit": (jitted_global, lambda v: 3 * 2 + v),
    "scan": (
        lambda x: lax.scan(scan_body, jnp.float32(0), jnp.stack([x, x]))[0],
        lambda v: 6 + 2 * v,
    ),
    "checkpoint": (checkpointed, lambda v: 1.5 * v),
    "cond": (lambda x: lax.cond(True, branch, lambda x: x, jnp.float32(1)), lambda v: v),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("inner", list(INNER))
@pytest.mark.parametrize("order", ["aabb", "abab", "abba"])
def test_module_level_functions_under_two_strategies(how, inner, order):
    fn, expected = INNER[inner]
    strategies = {"a": dj.VirtualStrategy(2), "b": dj.VirtualStrategy(2)}
    values = {"a": 10.0, "b": 20.0}
    variables = {k: make(s, values[k]) for k, s in strategies.items()}
    CURRENT.update({strategies[k]: v for k, v in variables.items()})
    steps = {
        k: how(lambda x, s=s: s.run(lambda x: fn(x), args=(x,))) for k, s in strategies.items()
    }
    for k in order:
        x = per_replica(strategies[k], [np.float32(1), np.float32(2)])
        assert local(strategies[k], steps[k](x)) == [expected(values[k])] * 2
        values[k] += 1
        variables[k].assign(values[k])


def test_a_jitted_function_inside_and_outside_of_run():
    """Traced first in another context, it is traced again in this one."""

    @jax.jit
    def number(x):
        return x + dj.get_replica_context().num_replicas_in_sync

    strategy = dj.VirtualStrategy(2)
    assert int(number(0)) == 1
    assert int(strategy.run(lambda: number(0))) == 2
    assert int(number(0)) == 1
    assert int(dj.VirtualStrategy(3).run(lambda: number(0))) == 3


# -- functions that come and go -----------------------------------------------


def test_a_collected_function_is_forgotten(pair, collect_garbage):
    def fn(x):
        return x + 1

    cache = pair.extended._run_programs
    before = len(cache)
    pair.run(fn, args=(jnp.float32(1),))
    assert len(cache) == before + 1
    alive = weakref.ref(fn)
    del fn
    collect_garbage()
    assert alive() is None and len(cache) == before


@pytest.mark.parametrize("context", ["run", "jit", "merge"])
def test_a_collected_variable_is_forgotten(pair, context, collect_garbage):
    """Its arrays are freed: no program and no cache of JAX keeps them."""

    def use():
        v = make(pair, jnp.zeros(4), aggregation=AGG.SUM)
        add = lambda strategy, v, x: (v.assign_add(x), None)[1]
        fn = lambda x: add(None, v, x)
        if context == "merge":
            fn = lambda x: dj.get_replica_context().merge_call(add, args=(v, x))
        step = dj.jit(fn) if context == "jit" else lambda x: pair.run(fn, args=(x,))
        step(jnp.ones(4))
        step(jnp.ones(4))
        return weakref.ref(v)

    alive = use()
    collect_garbage()
    assert alive() is None


def test_a_new_function_at_the_same_address(pair):
    for i in range(10):
        fn = eval(f"lambda x: x + {i}")  # the last one is collected: its address is free
        assert float(pair.run(fn, args=(jnp.float32(0),))) == i


def test_the_cache_by_itself(collect_garbage):
    cache = FunctionCache(lambda resolve: resolve)

    def f():
        pass

    resolve = cache.get(f)
    assert resolve() is f and cache.get(f) is resolve
    unweakable = np.sin  # not every callable takes a weak reference
    assert cache.get(unweakable)() is unweakable
    assert len(cache) == 2
    owner = Trainer(None, 0)
    resolve = cache.get(owner.step)
    assert cache.get(owner.step) is resolve and resolve() == owner.step
    del owner, f
    collect_garbage()
    assert resolve() is None and len(cache) == 1


class Trainer:
    def __init__(self, strategy, scale):
        self.strategy, self.scale, self.calls = strategy, scale, 0

    def step(self, x):
        self.calls += 1
        merge = lambda strategy, x: strategy.reduce("sum", x) * self.scale
        return dj.get_replica_context().merge_call(merge, args=(x,))

    @dj.jit
    def compiled(self, x):
        self.calls += 1
        return self.strategy.run(self.step, args=(x,))


def test_bound_methods(pair):
    """Keyed by (object, function): each access makes a new method object."""
    first, second = Trainer(pair, 1.0), Trainer(pair, 10.0)
    for _ in range(3):
        assert float(pair.run(first.step, args=(ids(pair),))) == 1
        assert float(pair.run(second.step, args=(ids(pair),))) == 10
    assert first.calls == second.calls == 1
    assert float(first.compiled(ids(pair))) == 1 and float(second.compiled(ids(pair))) == 10
    calls = first.calls
    assert float(first.compiled(ids(pair))) == 1 and first.calls == calls


def test_a_method_put_on_an_object(pair):
    first = Trainer(pair, 1.0)
    first.step = types.MethodType(lambda self, x: x * 5, first)
    assert local(pair, pair.run(first.step, args=(ids(pair),))) == [0, 5]
    del first.step
    assert float(pair.run(first.step, args=(ids(pair),))) == 1


@pytest.mark.parametrize("kind", ["partial", "callable object", "builtin", "jitted"])
def test_other_callables(pair, kind):
    class Callable:
        def __call__(self, x):
            return x + 1

    fn = {
        "partial": functools.partial(jnp.add, 1.0),
        "callable object": Callable(),
        "builtin": np.sum,
        "jitted": jax.jit(lambda x: x + 1),
    }[kind]
    x = jnp.float32(2)
    fn = (lambda x: jnp.sum(x) + 1) if kind == "builtin" else fn
    for _ in range(2):
        assert local(pair, pair.run(fn, args=(x,))) == [3, 3]


SOURCE = """
def step(x):
    return x * {0}

def steps(context, x):
    context.set_last_step_output("x", x * {0})

class Model:
    def step(self, x):
        return x * {0}
"""


def test_code_that_autoreload_replaces_is_traced_anew(pair):
    """IPython's autoreload puts the code of an edited file into the functions that there are."""
    old, new = {}, {}
    exec(SOURCE.format(2), old)
    exec(SOURCE.format(5), new)
    model, one = old["Model"](), jnp.float32(1)

    def call():
        elements = iter([one])
        outputs = pair.extended.run_steps_on_iterator(old["steps"], elements).last_step_outputs
        return [pair.run(old["step"], (one,)), pair.run(model.step, (one,)), outputs["x"]]

    assert call() == call() == [2, 2, 2]
    for name in ("step", "steps"):
        old[name].__code__ = new[name].__code__
    old["Model"].step.__code__ = new["Model"].step.__code__
    assert call() == call() == [5, 5, 5]
