"""While a function is traced, what refers to its modules refers to the user's own objects.

Another thread that looks at a closure cell, a global or an attribute meanwhile sees
what the user put there. Only the modules themselves are written.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


class Watch:
    """Looks at a place from another thread; without ``__dict__``, so that nothing finds it."""

    __slots__ = ("look", "module", "seen")

    def __init__(self):
        self.seen = []

    def here(self):
        """Called by the function that is traced."""
        thread = threading.Thread(target=self._look)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    def _look(self):
        self.seen.append(self.look() is self.module)


#: What the functions refer to by name; each test has its own.
WATCH = GLOBAL = None


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setitem(globals(), "WATCH", Watch())
    monkeypatch.setitem(globals(), "GLOBAL", None)
    return WATCH


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(2))

    def add(self, x):
        self.count[...] += x
        WATCH.here()


class Holder:
    """An object of the user's that holds whatever it is given, and may step it."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def step(self, x):
        self.counter.add(x)


def cell_of(fn, name):
    return fn.__closure__[fn.__code__.co_freevars.index(name)]


def in_a_closure(counter):
    def step(x):
        counter.add(x)

    cell = cell_of(step, "counter")
    return step, lambda: cell.cell_contents


def add_to_global(x):
    GLOBAL.add(x)


def in_a_global(counter):
    globals()["GLOBAL"] = counter
    return add_to_global, lambda: globals()["GLOBAL"]


def in_a_default(counter):
    def step(x, counter=counter):
        counter.add(x)

    return step, lambda: step.__defaults__[0]


def in_a_keyword_default(counter):
    def step(x, *, counter=counter):
        counter.add(x)

    return step, lambda: step.__kwdefaults__["counter"]


def in_a_partial(counter):
    step = functools.partial(Counter.add, counter)
    return step, lambda: step.args[0]


def in_a_partial_in_a_closure(counter):
    add = functools.partial(Counter.add, counter)

    def step(x):
        add(x)

    cell = cell_of(step, "add")
    return step, lambda: cell.cell_contents is add and add.args[0]


def in_a_method_of_a_module(counter):
    return counter.add, lambda: counter


def in_the_object_of_a_method(counter):
    holder = Holder(counter=counter)
    return holder.step, lambda: holder.counter


def in_an_attribute(counter):
    holder = Holder(counter=counter)
    return lambda x: holder.counter.add(x), lambda: holder.counter


def two_attributes_deep(counter):
    holder = Holder(inner=Holder(counter=counter))
    return lambda x: holder.inner.counter.add(x), lambda: holder.inner.counter


def in_a_list(counter):
    counters = [Counter(), counter]

    def step(x):
        counters[1].add(x)

    cell = cell_of(step, "counters")
    return step, lambda: cell.cell_contents is counters and counters[1]


def in_a_dict_of_an_attribute(counter):
    counters = {"first": counter}
    holder = Holder(counters=counters)
    return (
        lambda x: holder.counters["first"].add(x),
        lambda: holder.counters is counters and counters["first"],
    )


#: What no place of the user's holds: nothing had to be written there.
UNWRITTEN = (in_a_partial, in_a_method_of_a_module)
WAYS = (
    in_a_closure,
    in_a_global,
    in_a_default,
    in_a_keyword_default,
    in_a_partial_in_a_closure,
    in_the_object_of_a_method,
    in_an_attribute,
    two_attributes_deep,
    in_a_list,
    in_a_dict_of_an_attribute,
)


def cases():
    for way in (*UNWRITTEN, *WAYS):
        yield pytest.param(way, id=way.__name__)


@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("way", list(cases()))
def test_the_place_holds_the_users_object_during_the_trace(owner, watch, how, way):
    counter = Counter()
    fn, watch.look = way(counter)
    watch.module = counter

    def step():
        owner.run(fn, args=(jnp.ones(2),))

    call = dj.jit(step) if how == "jit" else step
    call()
    call()
    assert counter.count[...].tolist() == [2, 2]
    assert set(watch.seen) == {True}
    assert watch.look() is counter
