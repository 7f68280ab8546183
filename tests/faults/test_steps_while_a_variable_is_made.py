"""A step of one thread while another thread's call makes the initial value of a variable."""

import functools
import threading

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

import distjax as dj

MEAN = dj.VariableAggregation.MEAN
#: What is waited for comes at once, or only when the thread that waits goes on: it may hold a lock.
A_CALL = 2

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def one(x):
    return 0 * jnp.sum(x) + 1


class Caller:
    """Calls in a thread of its own; what was raised is kept."""

    def __init__(self, call):
        self.errors = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            call()
        except Exception as error:
            self.errors.append(error)

    def wait(self, seconds):
        self._thread.join(seconds)

    def join(self):
        self.wait(60)
        assert not self._thread.is_alive()


waits_p = jax.extend.core.Primitive("waits_while_it_is_compiled")
waits_p.def_abstract_eval(lambda x, *, wait: x)


@functools.partial(mlir.register_lowering, waits_p)
def _wait(context, x, *, wait):
    wait()
    return [x]


def test_a_step_while_the_initial_value_of_a_variable_is_made(owner):
    """It is made of a variable that the step writes, and whose array it donates."""
    with owner.scope():
        v = dj.Variable(0.0, aggregation=MEAN)
    held, steps = {}, []

    @dj.jit
    def step(x):
        owner.run(lambda: v.assign_add(one(x)))
        return v.value * 1

    def step_meanwhile():
        if not steps:
            steps.append(Caller(lambda: step(jnp.ones(2))))
            steps[0].wait(A_CALL)

    @dj.jit
    def other_step(x):
        if "made" not in held:
            with owner.scope():
                initial = waits_p.bind(v.value * 0 + 5, wait=step_meanwhile)
                held["made"] = dj.Variable(initial, name="made", aggregation=MEAN)
        held["made"].assign_add(one(x))

    step(jnp.ones(2))
    other_step(jnp.ones(3))
    steps[0].join()
    assert steps[0].errors == []
    assert (float(v.value), float(held["made"].value)) == (2, 6)
