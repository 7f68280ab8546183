"""What a step reached is compared before each call: where it lies, and what replaces it."""

import argparse
import collections
import functools
import gc
import importlib
import os
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import distjax as dj
from distjax._src import user_lines
from distjax._src.objects import reached
from distjax._src.objects.reached import Reached

pytestmark = pytest.mark.filterwarnings("ignore::distjax.errors.ReductionWarning")
THERE = None


def use_global():
    return THERE.value


def through_a_helper():
    return use_global()


class Trainer:
    """Holds an object in several ways."""

    shared = None
    __slots__ = ("__dict__", "__weakref__", "slot")

    def __init__(self):
        self.items, self.list, self.keyed = {}, [None], {}

    @property
    def hidden(self):
        return self.items["a"]

    def of_property(self):
        return self.hidden.value

    def of_list(self):
        return sum(v.value for v in self.list if v is not None)

    def of_slot(self):
        return self.slot.value

    def of_class(self):
        return type(self).shared.value

    def of_method(self):
        return self.of_property()

    def of_key(self):
        return sum(v.value for v in self.keyed.values())


def _set_global(value):
    global THERE
    THERE = value


def places():
    """Yields (name, a function that reads what is there, how to put something there)."""
    yield "global", use_global, _set_global
    yield "helper", through_a_helper, _set_global
    yield "partial", functools.partial(through_a_helper), _set_global
    t = Trainer()
    yield "property", t.of_property, lambda v: t.items.update(a=v)
    yield "method", t.of_method, lambda v: t.items.update(a=v)
    yield "slot", t.of_slot, lambda v: setattr(t, "slot", v)
    yield "class", t.of_class, lambda v: setattr(Trainer, "shared", v)
    yield "list", t.of_list, lambda v: t.list.__setitem__(0, v)
    yield "appended", (u := Trainer()).of_list, lambda v: u.list.append(v)
    yield "new key", t.of_key, lambda v: t.keyed.update({len(t.keyed): v})
    held = types.SimpleNamespace()
    yield "namespace", lambda: held.a.value, lambda v: setattr(held, "a", v)
    chain = collections.ChainMap({}, {})
    yield "chain", lambda: chain["a"].value, lambda v: chain.maps[1].update(a=v)
    user = collections.UserDict()
    yield "user dict", lambda: user["a"].value, lambda v: user.update(a=v)
    options = argparse.Namespace()
    yield "options", lambda: options.a.value, lambda v: setattr(options, "a", v)
    seen = types.MappingProxyType(shown := {})
    yield "proxy", lambda: seen["a"].value, lambda v: shown.update(a=v)
    users = collections.UserList([None])
    yield "user list", lambda: users[0].value, lambda v: users.__setitem__(0, v)
    frozen = [None]
    yield "frozen", lambda: frozen[0]["a"].value, lambda v: frozen.__setitem__(0, FrozenDict(a=v))
    default = lambda v=None: v.value
    yield "default", default, lambda v: setattr(default, "__defaults__", (v,))
    jitted = dj.jit(use_global)
    yield "inner jit", lambda: jitted(), _set_global
    ones = {"a": {"b": [None]}}
    yield "nested", lambda: ones["a"]["b"][0].value, lambda v: ones["a"].update(b=[v])
    registry = lambda: ones
    yield "call", lambda: registry()["a"]["b"][0].value, lambda v: ones["a"].update(b=[v])


PLACES = {name: (fn, put) for name, fn, put in places()}


@pytest.mark.parametrize("name", PLACES)
def test_every_place_is_followed(name):
    fn, put = PLACES[name]
    strategy = dj.OneDeviceStrategy()
    with strategy.scope():
        one, two = dj.Variable(1.0), dj.Variable(2.0)
    put(one)
    step = dj.jit(lambda: fn() + 0)
    first = float(step())
    assert first == 1
    put(two)
    assert float(step()) == float(fn()) != first
    if name not in ("appended", "new key"):
        put(one)
        assert float(step()) == 1


@pytest.mark.parametrize("way", ["pmap", "steps", "merge", "server"])
def test_every_way_in_is_followed(way):
    held = types.SimpleNamespace()
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    batch = np.ones(4, np.float32)
    if way == "server":
        strategy = dj.ParameterServerStrategy(workers=1)
        call = lambda: strategy.run(lambda: held.v.assign_add(1.0))
    elif way == "pmap":
        step = dj.pmap(lambda x: held.v.assign_add(1.0), strategy=strategy)
        call = lambda: step(batch[:2])
    elif way == "steps":
        step = lambda context, x: strategy.run(lambda: held.v.assign_add(1.0))
        call = lambda: strategy.extended.run_steps_on_iterator(step, iter([batch]), 1)
    else:
        merge = lambda strategy: held.v.assign_add(1.0)
        step = lambda: dj.get_replica_context().merge_call(merge)
        call = lambda: strategy.run(step)
    values = []
    for _ in range(3):
        with strategy.scope():
            held.v = dj.Variable(0.0, aggregation=dj.VariableAggregation.MEAN)
        call()
        call()
        values.append(float(held.v.value))
    assert values == [2.0, 2.0, 2.0]


def test_an_optimizer_of_another_rate_and_one_that_begins_anew():
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        v, w = dj.Variable(0.0), dj.Variable(0.0)

    def make(rate):
        optimizer = dj.optim.Optimizer(optax.sgd(rate), "mean")
        optimizer.init([v])
        return optimizer

    optimizer = make(1.0)
    step = lambda: optimizer.apply_gradients([(1.0, x) for x in optimizer.variables])
    strategy.run(step)
    optimizer = make(10.0)
    strategy.run(step)
    optimizer.init([w])
    strategy.run(step)
    assert (float(v.value), float(w.value)) == (-11.0, -10.0)


def test_objects_that_come_back_are_not_compiled_again():
    held, traces = types.SimpleNamespace(), []
    one, two, three = (dj.Variable(float(i)) for i in range(3))
    step = dj.jit(lambda: traces.append(0) or held.v.value + 0)
    for held.v in (one, two, three, one, two, three, one):
        assert float(step()) == float(held.v.value)
    assert len(traces) == 3


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_variable_that_is_added_to_modules_is_seen(pair, kind):
    """Where there were modules only, nothing led to a variable."""
    held = types.SimpleNamespace(parts=[nnx.Param(jnp.ones(()))])
    held.parts = held.parts if kind == "list" else dict(enumerate(held.parts))

    def step():
        parts = held.parts.values() if kind == "dict" else held.parts
        return sum(p.value if isinstance(p, dj.Variable) else p[...] for p in parts)

    step = pair.jit(step)
    assert float(step()) == 1
    with pair.scope():
        added = dj.Variable(10.0)
    if kind == "list":
        held.parts.append(added)
    else:
        held.parts["added"] = added
    assert float(step()) == 11


def test_what_is_replaced_can_be_collected():
    held = types.SimpleNamespace()
    step = dj.jit(lambda: held.v.assign_add(1.0))
    gone = []
    for _ in range(4):
        held.v = dj.Variable(0.0)
        step()
        gone.append(weakref.ref(held.v))
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, True, False]


def test_a_step_keeps_no_object_alive():
    class Owner:
        def __init__(self):
            self.v, self.own = dj.Variable(0.0), self

        def step(self):
            return self.v.value

    strategy = dj.OneDeviceStrategy()
    with strategy.scope():
        owner = Owner()
    strategy.run(owner.step)
    ref = weakref.ref(owner)
    del owner
    gc.collect()
    assert ref() is None


def test_a_step_that_reaches_nothing_compares_nothing():
    reached = Reached()
    reached.record([lambda x: x + 1], [])
    assert reached.is_current is None
    assert reached.is_the_same()


def test_new_objects_again_and_again_are_warned_of():
    held = types.SimpleNamespace()

    def step():
        return held.v.value + 0

    step.__qualname__ = "step"
    step = dj.jit(step)
    with pytest.warns(dj.errors.RecompilationWarning) as caught:
        for _ in range(8):
            held.v = dj.Variable(0.0)
            step()
    assert str(caught[0].message) == (
        "step is compiled for the 8th time and needs the objects that it captures to stay the "
        "same.\n"
        "  Got: a new variable, metric, optimizer or layer in place of one that it used.\n"
        "  Why: a compiled program is made for the variables that it was traced with.\n"
        "  Fix: make it once and set it back: metric.reset(), v.assign(...), or a learning rate as "
        "a variable"
    )


INSTALLED = """
{imports}
registry = {{}}

def read():
    return registry["total"].value
"""


@pytest.mark.parametrize("imports", ["import distjax as dj", "from distjax import Variable"])
def test_a_package_of_the_user_may_be_installed(imports, tmp_path, monkeypatch, pair):
    """What an installed package names is followed if it has to do with distjax."""
    name = "installed_" + imports.split()[-1]
    (tmp_path / f"{name}.py").write_text(INSTALLED.format(imports=imports))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_lines, "INSTALLED", (f"{tmp_path}{os.sep}",))
    package = importlib.import_module(name)
    with pair.scope():
        first, second = dj.Variable(1.0), dj.Variable(2.0)
    package.registry["total"] = first
    assert [float(pair.run(lambda: package.read())) for _ in range(2)] == [1, 1]
    package.registry["total"] = second
    assert float(pair.run(package.read)) == 2


def test_what_other_packages_name_is_not_searched(pair):
    """An `assert` that pytest has rewritten names pytest, which names thousands of objects."""
    with pair.scope():
        total = dj.Variable(1.0)

    def step():
        assert total.value.shape == ()
        return total.value

    assert "@pytest_ar" in step.__code__.co_names
    assert len(reached._Search([weakref.ref(step)], [total])._values) < 100
