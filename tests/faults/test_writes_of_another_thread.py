"""What another thread sets while a function is traced stays set when the trace ends."""

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


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(2))


class Holder:
    """An object of the user's."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


GLOBAL = None


def in_an_attribute(counter):
    holder = Holder(counter=counter)
    return lambda: holder.counter, functools.partial(setattr, holder, "counter")


def two_attributes_deep(counter):
    holder = Holder(inner=Holder(counter=counter))
    return lambda: holder.inner.counter, functools.partial(setattr, holder.inner, "counter")


def in_a_dict_of_an_attribute(counter):
    holder = Holder(counters={"first": counter})

    def replace(new):
        holder.counters["first"] = new

    return lambda: holder.counters["first"], replace


def in_a_list(counter):
    counters = [counter]

    def replace(new):
        counters[0] = new

    return lambda: counters[0], replace


def in_a_closure(counter):
    def replace(new):
        nonlocal counter
        counter = new

    return lambda: counter, replace


def in_a_global(counter):
    def replace(new):
        globals()["GLOBAL"] = new

    replace(counter)
    return lambda: GLOBAL, replace


WAYS = (
    in_an_attribute,
    two_attributes_deep,
    in_a_dict_of_an_attribute,
    in_a_list,
    in_a_closure,
    in_a_global,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_module_that_is_replaced_during_a_trace(owner, way):
    old, new = Counter(), Counter()
    read, replace = way(old)
    is_stepped, is_replaced = threading.Event(), threading.Event()

    def step(x):
        read().count[...] += x
        is_stepped.set()
        assert is_replaced.wait(30)

    def write():
        assert is_stepped.wait(30)
        replace(new)
        is_replaced.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    owner.run(step, args=(jnp.ones(2),))
    writer.join(30)
    assert read() is new
    assert [x.count[...].tolist() for x in (old, new)] == [[1, 1], [0, 0]]
    owner.run(step, args=(jnp.ones(2),))
    assert [x.count[...].tolist() for x in (old, new)] == [[1, 1], [1, 1]]
