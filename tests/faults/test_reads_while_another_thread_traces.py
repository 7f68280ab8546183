"""Reading a variable waits for no trace and no compilation of another thread.

A thread that plots, logs or saves goes on while another one traces or compiles: the
values are there, and nothing has been launched yet that could replace them.
"""

import functools
import threading

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.interpreters import mlir

import distjax as dj

MEAN = dj.VariableAggregation.MEAN

#: What does not wait takes milliseconds; what does is found out after this many seconds.
PATIENCE = 2

waits_p = jax.extend.core.Primitive("waits_while_it_is_compiled")
waits_p.def_abstract_eval(lambda x, *, wait: x)


@functools.partial(mlir.register_lowering, waits_p)
def _wait(context, x, *, wait):
    wait()
    return [x]


class Stop:
    """A place where one thread stops until another lets it go on."""

    def __init__(self):
        self._is_armed = False
        self._reached, self._released = threading.Event(), threading.Event()

    def here(self):
        if self._is_armed:
            self._reached.set()
            assert self._released.wait(60)

    def run(self, call, meanwhile):
        """Returns what `meanwhile` returns while `call` stands still in a thread."""
        self._is_armed = True
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            assert self._reached.wait(60)
            return meanwhile()
        finally:
            self._released.set()
            thread.join(60)
            assert not thread.is_alive()


def names_of_those_that_wait(works):
    """Returns the names of the functions that are not done soon, each in a thread."""
    threads = {name: threading.Thread(target=work, daemon=True) for name, work in works.items()}
    for thread in threads.values():
        thread.start()
    threads["a read"].join(PATIENCE)  # if one waits, so have the others, for as long
    for thread in threads.values():
        thread.join(PATIENCE if not threads["a read"].is_alive() else 0)
    return [name for name, thread in threads.items() if thread.is_alive()]


class Case:
    """Variables of a step, and others; programs that are compiled."""

    def __init__(self, strategy):
        self.strategy, self.stop, self.seen = strategy, Stop(), {}
        with strategy.scope():
            make = functools.partial(dj.Variable, 0.0, aggregation=MEAN)
            self.written, self.read, self.other = make(), make(), make()
        self.other_step()

    def other_step(self):
        self.strategy.run(self._other_step)

    def _other_step(self):
        self.other.assign_add(1.0)

    def step(self, x):
        """The step at whose trace the thread stops."""
        self.written.assign_add(self.read.value + jnp.sum(x))
        self.stop.here()

    def look(self, name):
        self.seen[name] = float(getattr(self, name).value)

    def names_of_those_that_wait(self, call):
        """Returns what waits while `call` stands still."""
        works = {
            "a read": lambda: self.look("other"),
            "a read of a variable that the step reads": lambda: self.look("read"),
            "a read of a variable that the step writes": lambda: self.look("written"),
            "a compiled step": self.other_step,
        }
        return self.stop.run(call, lambda: names_of_those_that_wait(works))


@pytest.fixture(params=["mirrored", "virtual"])
def case(request):
    devices = jax.devices()[:2]
    is_mirrored = request.param == "mirrored"
    return Case(dj.MirroredStrategy(devices) if is_mirrored else dj.VirtualStrategy(2))


def test_while_a_first_call_is_traced(case):
    call = lambda: case.strategy.run(case.step, args=(jnp.ones(2),))
    assert case.names_of_those_that_wait(call) == []
    assert case.seen == {"other": 1, "read": 0, "written": 0}
    assert float(case.written.value) == 2


def test_while_a_call_of_new_shapes_is_traced(case):
    case.strategy.run(case.step, args=(jnp.ones(2),))
    call = lambda: case.strategy.run(case.step, args=(jnp.ones(3),))
    assert case.names_of_those_that_wait(call) == []
    assert case.seen == {"other": 1, "read": 0, "written": 2}
    assert float(case.written.value) == 5


@pytest.mark.parametrize("first", ["first_call", "new_shape"])
def test_while_a_program_is_compiled(case, first):
    @dj.jit
    def step(x):
        x = waits_p.bind(x, wait=case.stop.here)
        case.strategy.run(lambda: case.written.assign_add(case.read.value + jnp.sum(x)))

    if first == "new_shape":
        step(jnp.zeros(2))
    assert case.names_of_those_that_wait(lambda: step(jnp.ones(3))) == []
    assert case.seen == {"other": 1, "read": 0, "written": 0}
    assert float(case.written.value) == 3


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.float32(0))


def test_while_a_function_that_captures_a_module_is_traced(case):
    counter = Counter()

    def step(x):
        counter.count[...] += jnp.sum(x)
        case.step(x)

    call = lambda: case.strategy.run(step, args=(jnp.ones(2),))
    assert case.names_of_those_that_wait(call) == []
    assert float(case.written.value) == float(counter.count[...]) == 2
