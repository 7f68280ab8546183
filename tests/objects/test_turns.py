"""Threads take turns with an object; nothing but the object is written while it is traced."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import TraceLeakError
from tests.own_threads import in_threads

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
}
NUM_STEPS = 15


class Counter(nnx.Module):
    """Counts calls."""

    def __init__(self):
        self.count = nnx.Param(jnp.zeros(2))

    def tick(self):
        self.count[...] += 1


class Holder:
    """A user's object around another."""

    def __init__(self, inner):
        self.inner = inner


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


@pytest.mark.parametrize("way", ["argument", "captured", "part_of_another"])
def test_two_threads_lose_no_step(owner, way):
    """Nor at the first call, where two traces of one object meet."""
    counter = Counter()
    around = nnx.List([counter, nnx.Param(jnp.zeros(2))])
    start = threading.Barrier(2)

    def captured():
        counter.tick()

    def steps(number):
        start.wait()
        for _ in range(NUM_STEPS):
            if way == "captured":
                owner.run(captured)
            elif way == "part_of_another" and number:
                owner.run(lambda around: around[0].tick(), args=(around,))
            else:
                owner.run(Counter.tick, args=(counter,))

    in_threads(lambda: steps(0), lambda: steps(1))
    assert np.asarray(counter.count[...]).tolist() == [2 * NUM_STEPS] * 2


def test_threads_that_take_two_objects_in_either_order(owner):
    one, two, start = Counter(), Counter(), threading.Barrier(2)

    def step(a, b):
        a.tick()
        b.tick()

    def steps(pair):
        owner.run(Counter.tick, args=(pair[0],))
        start.wait()
        for _ in range(NUM_STEPS):
            owner.run(step, args=pair)

    in_threads(lambda: steps((one, two)), lambda: steps((two, one)))
    for counter in (one, two):
        assert np.asarray(counter.count[...]).tolist() == [2 * NUM_STEPS + 1] * 2


MODULE = Counter()


def test_a_function_sees_the_users_own_objects(owner, monkeypatch):
    """Cells, globals, defaults and attributes hold what the user put there, and nothing else."""
    monkeypatch.setitem(globals(), "MODULE", Counter())  # a module of its own for each strategy
    counter, holder, seen = Counter(), Holder(Counter()), []

    def step(given, default=counter):
        for module in (given, counter, default, holder.inner, MODULE):
            seen.append(module)
            module.tick()

    given = Counter()
    before = step.__closure__, step.__defaults__, dict(vars(holder)), globals()["MODULE"]
    variables = [module.count for module in (given, counter, holder.inner, MODULE)]
    owner.run(step, args=(given,))
    assert [id(x) for x in seen] == [*map(id, (given, counter, counter, holder.inner, MODULE))]
    assert before == (step.__closure__, step.__defaults__, vars(holder), globals()["MODULE"])
    now = [module.count for module in (given, counter, holder.inner, MODULE)]
    assert all(a is b for a, b in zip(variables, now, strict=True))
    assert [float(v[...][0]) for v in now] == [1, 2, 1, 1]


def test_a_write_of_the_users_during_a_trace_stands(owner):
    """Another thread may give its own object another module meanwhile."""
    old, new = Counter(), Counter()
    trainer = Holder(old)

    def step():
        trainer.inner.tick()
        trainer.inner = new

    owner.run(step)
    assert trainer.inner is new
    assert float(old.count[...][0]) == 1
    owner.run(step)
    assert [float(x.count[...][0]) for x in (old, new)] == [1, 1]


@pytest.mark.pairwise
@pytest.mark.parametrize("how", [lambda fn: fn, dj.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("use", ["write", "read", "differentiate", "inner_run"])
def test_a_module_that_is_too_deep_is_refused(owner, how, use):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    holder = Holder(Holder(Holder(Holder(Holder(model)))))
    found = lambda: holder.inner.inner.inner.inner.inner

    def write(x):
        found().bias[...] += x[0]

    def read(x):
        return found()(x)

    def differentiate(x):
        return nnx.grad(lambda model: model(x).sum())(found())

    def inner_run(x):
        return owner.run(lambda model: model(x), args=(found(),))

    fn = {"write": write, "read": read, "differentiate": differentiate, "inner_run": inner_run}[use]
    step = how(lambda x: fn(x) if use == "inner_run" else owner.run(fn, args=(x,)))
    if use == "inner_run" and how is not dj.jit:
        np.asarray(step(jnp.ones((1, 2))))  # an argument of `run` is found where it is called
        return
    with pytest.raises(TraceLeakError, match="needs to be an argument, or captured") as caught:
        step(jnp.ones((1, 2)))
    for part in ("Got:", "Why:", "Fix: pass the object"):
        assert part in str(caught.value)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert np.asarray(model.bias[...]).tolist() == [0, 0]


def test_the_text_of_the_refusal(pair):
    counter = Counter()
    holder = Holder(Holder(Holder(Holder(counter))))
    with pytest.raises(TraceLeakError) as caught:
        pair.run(lambda: holder.inner.inner.inner.inner.tick())
    assert str(caught.value) == (
        "an nnx.Param that a step uses needs to be an argument, or captured where distjax can see "
        "it.\n"
        "  Got: one that was found neither among the arguments nor in what the function refers "
        "to.\n"
        "  Why: distjax searches arguments, closures, globals that the code names and attributes "
        "of your objects, 3 deep; what it does not find it cannot write back.\n"
        "  Fix: pass the object: strategy.run(step, args=(model, batch))"
    )


def test_after_an_error_in_the_users_function_others_take_their_turn(pair):
    counter = Counter()

    def fail(counter):
        counter.tick()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.run(fail, args=(counter,))
    in_threads(lambda: pair.run(Counter.tick, args=(counter,)))
    assert float(counter.count[...][0]) == 1
