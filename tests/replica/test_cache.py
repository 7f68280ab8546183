"""The cache of programs: what it may not confuse, and how often functions are traced."""

import functools
import gc
import sys
import threading
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from replicas import everywhere, ids, local, per_replica

import distjax as dj
from distjax.errors import RecompilationWarning
from distjax.replica.function_cache import FunctionCache

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


def counted(fn):
    """Returns a function that counts how often Python runs it."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


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


# -- threads ------------------------------------------------------------------


@pytest.fixture
def switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*works):
    """Runs functions at once, each in a thread; raises what they raise."""
    start, errors = threading.Barrier(len(works)), []

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("first", ["cold", "warm"])
def test_two_threads_call_one_program(pair, first, switch_often):
    v = make(pair, jnp.zeros(4), aggregation=AGG.SUM)

    def fn(x):
        v.assign_add(x)
        return dj.get_replica_context().all_reduce("sum", x)

    x = jnp.ones(4)
    if first == "warm":
        pair.run(fn, args=(x,))
    results = []

    def work():
        for _ in range(50):
            results.append(pair.run(fn, args=(x,)))

    in_threads(work, work)
    assert [r.tolist() for r in results] == [[2] * 4] * 100
    assert v.value.tolist() == [200 + 2 * (first == "warm")] * 4


@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_one_thread_reads_while_another_writes(pair, sync, switch_often):
    """What is read is never an array that is being donated."""
    v = make(pair, jnp.zeros(4), synchronization=sync, aggregation=AGG.MEAN)
    fn = lambda: (v.assign_add(jnp.ones(4)), None)[1]
    read = lambda: v.value + 0
    done = threading.Event()

    def write():
        try:
            for _ in range(200):
                pair.run(fn)
        finally:
            done.set()

    seen = []

    def watch():
        while not done.is_set():
            seen.append(np.asarray(v.value)[0])
            local(pair, pair.run(read))

    in_threads(write, watch)
    assert seen == sorted(seen) and v.value.tolist() == [200] * 4


def test_two_threads_with_two_strategies(switch_often):
    """Each thread has contexts of its own; programs and variables do not mix."""
    works = []
    for count in (2, 3):
        strategy = dj.VirtualStrategy(count)
        v = make(strategy, 0.0, aggregation=AGG.SUM)

        def work(strategy=strategy, v=v):
            with strategy.scope():
                for i in range(20):
                    strategy.run(shared_step, args=(v, jnp.ones(i % 3)))
            assert float(v.value) == 20 * strategy.num_replicas_in_sync

        works.append(work)
    in_threads(*works)


def shared_step(v, x):
    v.assign_add(jnp.float32(1) + 0 * jnp.sum(x))


# -- functions that come and go -----------------------------------------------


def test_a_collected_function_is_forgotten(pair):
    def fn(x):
        return x + 1

    cache = pair.extended._runner._programs
    before = len(cache)
    pair.run(fn, args=(jnp.float32(1),))
    assert len(cache) == before + 1
    alive = weakref.ref(fn)
    del fn
    gc.collect()
    assert alive() is None and len(cache) == before


@pytest.mark.parametrize("context", ["run", "jit", "merge"])
def test_a_collected_variable_is_forgotten(pair, context):
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
    gc.collect()
    assert alive() is None


def test_a_new_function_at_the_same_address(pair):
    for i in range(50):
        fn = eval(f"lambda x: x + {i}")  # the last one is collected: its address is free
        assert float(pair.run(fn, args=(jnp.float32(0),))) == i


def test_the_cache_by_itself():
    cache = FunctionCache()
    make_value = lambda resolve: resolve

    def f():
        pass

    resolve = cache.get(f, make_value)
    assert resolve() is f and cache.get(f, make_value) is resolve
    unweakable = np.sin  # not every callable takes a weak reference
    assert cache.get(unweakable, make_value)() is unweakable
    assert len(cache) == 2
    owner = Trainer(None, 0)
    resolve = cache.get(owner.step, make_value)
    assert cache.get(owner.step, make_value) is resolve and resolve() == owner.step
    del owner, f
    gc.collect()
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


# -- signatures ---------------------------------------------------------------


def test_shapes_a_b_a_with_python_results(pair, how):
    """A Python result belongs to its signature, also at a hit that runs no Python."""

    @counted
    def fn(x):
        return {"size": x.shape[0], "total": jnp.sum(x), "name": f"n{x.shape[0]}", "none": None}

    step = how(lambda x: pair.run(fn, args=(x,)))
    for n in (2, 3, 2, 3, 2):
        got = step(jnp.ones(n))
        assert (got["size"], got["name"], got["none"]) == (n, f"n{n}", None)
        assert float(got["total"]) == n
    assert fn.calls == 2


def test_dj_jit_traces_once_per_signature(pair):
    @counted
    def step(x):
        return pair.run(replica, args=(x,))

    @counted
    def replica(x):
        return x + 1

    compiled = dj.jit(step)
    for n in (1, 2, 1, 2):
        compiled(jnp.ones(n))
    assert step.calls == replica.calls == 2


def test_an_unknown_variable_costs_one_trace(pair):
    known, late = make(pair, 1.0), make(pair, 2.0)

    @counted
    def fn(x, which):
        return x * (known if which == "known" else late).value

    for which, expected in [("known", 1), ("late", 2), ("known", 1), ("late", 2)]:
        assert local(pair, pair.run(fn, args=(jnp.float32(1), which))) == [expected] * 2
    assert fn.calls <= 4


def test_static_arguments_are_part_of_the_signature(pair):
    @counted
    def fn(x, mode, *, scale="one"):
        x = x + 1 if mode == "train" else x - 1
        return (x * 10 if scale == "ten" else x), mode

    for _ in range(2):
        for mode, scale, expected in [
            ("train", "one", 3),
            ("eval", "one", 1),
            ("train", "ten", 30),
        ]:
            y, seen = pair.run(fn, args=(jnp.float32(2), mode), kwargs={"scale": scale})
            assert local(pair, y) == [expected] * 2 and seen == mode
    assert fn.calls == 3


def test_a_bool_is_static_by_name(pair):
    @counted
    def step(x, training):
        return pair.run(lambda x: x + 1 if training else x - 1, args=(x,))

    compiled = dj.jit(step, static_argnames="training")
    for _ in range(2):
        assert float(compiled(jnp.float32(1), True)) == 2
        assert float(compiled(jnp.float32(1), training=False)) == 0
    assert step.calls == 2
    assert float(compiled(jnp.float32(1), training=1)) == 2  # 1 == True, another program
    assert step.calls == 3


class Flag:
    def __init__(self, on):
        self.on = on

    def __eq__(self, other):
        return isinstance(other, Flag) and self.on == other.on

    def __hash__(self):
        return hash(self.on)


def test_equal_objects_share_a_program(pair):
    fn = counted(lambda x, flag: x + flag.on)
    for on in (1, 2, 1, 2):
        assert float(pair.run(fn, args=(jnp.float32(1), Flag(on)))) == 1 + on
    assert fn.calls == 2


def test_keys_and_none(pair, how):
    def fn(key, nothing, tree):
        assert nothing is None and tree["b"] is None
        drawn = jax.random.uniform(dj.get_replica_context().fold_in(key))
        return drawn, key, nothing, {"b": None}

    step = how(lambda *args: pair.run(fn, args=args))
    key = jax.random.key(1)
    for _ in range(2):
        drawn, same, nothing, tree = step(key, None, {"a": jnp.ones(2), "b": None})
        expected = [float(jax.random.uniform(jax.random.fold_in(key, r))) for r in range(2)]
        np.testing.assert_allclose(local(pair, drawn), expected, rtol=1e-6)
        assert nothing is None and tree == {"b": None}
        np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(key))


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_an_argument_that_cannot_be_hashed(pair, first):
    def fn(x, options, *, more=None):
        return x

    if not first:
        pair.run(fn, args=(jnp.float32(1), jnp.float32(1)))
    for args, kwargs, name in [
        ((jnp.float32(1), set()), {}, "options"),
        ((jnp.float32(1), {"a": [set()]}), {}, "options['a'][0]"),
        ((jnp.float32(1), 1.0), {"more": set()}, "more"),
    ]:
        with pytest.raises(ValueError) as caught:
            pair.run(fn, args=args, kwargs=kwargs)
        assert str(caught.value).splitlines()[0] == (
            f"argument {name} needs an array, a number or a hashable object."
        )


def test_a_static_argument_that_cannot_be_hashed():
    """It could change, and a program made for what it was would be found."""
    step = dj.jit(lambda x, options: x + len(options), static_argnames="options")
    assert float(step(jnp.float32(1), (1, 2))) == 3
    for call in (lambda: step(jnp.float32(1), [1]), lambda: step(jnp.float32(1), options=[1])):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).splitlines()[0] == (
            "argument options needs an array, a number or a hashable object."
        )


def test_a_static_name_that_is_no_parameter():
    with pytest.raises(ValueError) as caught:
        dj.jit(lambda x: x, static_argnames=("training",))
    assert "static_argnames needs names of parameters of" in str(caught.value).splitlines()[0]


# -- the warning --------------------------------------------------------------


def test_a_warning_names_function_and_argument(pair):
    def train_step(images, labels):
        return images, labels

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(1, 9):
            pair.run(train_step, args=({"x": jnp.ones(n)}, jnp.float32(1)))
    (warning,) = caught
    assert warning.category is RecompilationWarning and warning.filename == __file__
    text = str(warning.message).splitlines()
    assert text[0].endswith(
        "train_step is compiled for the 8th time and needs arguments of steady shape."
    )
    assert text[1].strip() == "Got: a change of argument images['x']: float32[7] -> float32[8]."


def test_a_warning_about_a_python_value(pair):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn = lambda x, epoch: x
        for n in range(17):
            pair.run(fn, args=(ids(pair), f"epoch {n}"))
    assert [w.category for w in caught] == [RecompilationWarning] * 2  # at 8, and at 16
    assert "a change of argument epoch: 'epoch 6' -> 'epoch 7'" in str(caught[0].message)


def test_steady_calls_do_not_warn(pair):
    fn = lambda x, i: x + i
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(20):
            pair.run(fn, args=(ids(pair), i))
            pair.run(lambda x: x, args=(ids(pair),))  # a new function each time


ARGUMENTS = {
    "numpy scalar": (np.float32(2), 4),
    "numpy float64": (np.float64(2), 4),
    "numpy int64": (np.int64(2), 4),
    "numpy bool": (np.bool_(True), 2),
    "python int": (2, 4),
    "python float": (2.0, 4),
    "numpy array": (np.full((), 2, np.int32), 4),
    "jax array": (jnp.int32(2), 4),
}


def test_numbers_of_every_kind(strategy):
    """Each alone, since what one call is given decides how the next is compiled."""
    for kind, (value, expected) in ARGUMENTS.items():
        fn = lambda x, kind=kind: x + x * 1 if kind != "numpy bool" else x * 2
        for _ in range(2):
            out = strategy.run(fn, args=(value,))
            assert local(strategy, out) == everywhere(strategy, expected), kind
