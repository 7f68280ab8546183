"""A step of one thread while another thread's call takes a new variable into the program.

The compiled program, the variables that it reads and those that it writes belong
together: whatever moment another thread picks, a step is applied once and returns,
and no error of the rebuild reaches the user.
"""

import functools
import sys
import threading

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

import distjax as dj

MEAN = dj.VariableAggregation.MEAN
PACKAGE = dj.__file__.removesuffix("__init__.py")

#: What is waited for comes at once, or only when the thread that waits goes on: it may hold a lock.
A_MOMENT = 0.2
#: The same for a call that compiles.
A_CALL = 2

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def make_variables(owner, count):
    with owner.scope():
        return [dj.Variable(0.0, name=f"v{i}", aggregation=MEAN) for i in range(count)]


def one(x):
    return 0 * jnp.sum(x) + 1


@jax.tree_util.register_pytree_node_class
class Gate:
    """An argument without arrays, at which a call stops while JAX takes it apart."""

    def __init__(self, stop=lambda: None):
        self.stop = stop

    def tree_flatten(self):
        self.stop()
        return (), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


class Caller:
    """Calls in a thread of its own: what returned is counted, what was raised is kept."""

    def __init__(self, call):
        self.returned, self.errors = 0, []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)

    def _run(self, call):
        try:
            call(self)
        except Exception as error:
            self.errors.append(error)

    def start(self):
        self._thread.start()
        return self

    def is_alive(self):
        return self._thread.is_alive()

    def wait(self, seconds):
        self._thread.join(seconds)

    def join(self):
        self.wait(60)
        assert not self._thread.is_alive()


class Steps:
    """Steps of this thread, each of which begins at one line of another and ends at the next.

    Args:
      step: called with the gate at which it stops.
    """

    def __init__(self, step):
        self._step = step
        self._stopped, self._go = threading.Event(), threading.Event()
        self._thread = threading.get_ident()
        self.gate = Gate(self._stop)

    def _stop(self):
        if threading.get_ident() == self._thread:
            self._go.clear()
            self._stopped.set()
            self._go.wait(A_MOMENT)

    def between_lines(self):
        """Ends the step that has begun and waits for the next one, in the other thread."""
        self._stopped.clear()
        self._go.set()
        self._stopped.wait(A_MOMENT)

    def while_alive(self, other):
        """Returns how many steps returned until `other` is done, and what they raised."""
        returned, errors = 0, []
        while other.is_alive():
            try:
                self._step(self.gate)
                returned += 1
            except Exception as error:
                errors.append(error)
        return returned, errors


def tracing_lines(at_line, depth):
    """Returns a trace function that calls `at_line` between lines of the package.

    Frames of the package deeper than `depth` of its frames are passed over: a trace
    of the user's function is long, and nothing of the program changes in it.
    """

    def depth_of(frame):
        found = 0
        while frame is not None:
            found += frame.f_code.co_filename.startswith(PACKAGE)
            frame = frame.f_back
        return found

    def on_line(frame, event, _):
        if event == "line":
            at_line()
        return on_line

    def on_call(frame, event, _):
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        return on_line if is_ours and depth_of(frame) <= depth else None

    return on_call


def test_a_step_at_each_line_of_another_threads_rebuild(owner):
    used = make_variables(owner, 2)
    later, is_traced = used.pop(), threading.Event()

    def step(x, gate):
        for v in list(used):
            v.assign_add(one(x))
        if x.shape == (3,):
            is_traced.set()

    steps = Steps(lambda gate: owner.run(step, args=(jnp.ones(2), gate)))
    owner.run(step, args=(jnp.ones(2), Gate()))

    def rebuild(caller):
        used.append(later)
        # Six frames: down to where the program and its variables are exchanged.
        sys.settrace(tracing_lines(lambda: is_traced.is_set() and steps.between_lines(), 6))
        try:
            owner.run(step, args=(jnp.ones(3), Gate()))
        finally:
            sys.settrace(None)
        caller.returned += 1

    other = Caller(rebuild).start()
    returned, errors = steps.while_alive(other)
    other.join()
    assert [*errors, *other.errors] == []
    assert float(used[0].value) == 1 + returned + other.returned


def test_another_thread_brings_variables_at_each_line_of_a_rebuild(owner):
    """The program changes under a call that is about to try again, more than once."""
    used, unused = make_variables(owner, 1), make_variables(owner, 9)
    is_traced, calls = threading.Event(), []

    def step(x):
        for v in list(used):
            v.assign_add(one(x))
        if x.shape == (3,):
            is_traced.set()

    def bring_variables():
        if calls:
            calls[-1].wait(A_MOMENT)
        if not is_traced.is_set() or not unused or (calls and calls[-1].is_alive()):
            return
        used.append(unused.pop())
        x = jnp.ones(4 + len(calls))
        calls.append(Caller(lambda _: owner.run(step, args=(x,))).start())
        calls[-1].wait(A_CALL)
        used.append(unused.pop())

    def rebuild(_):
        # Five frames: down to where a call is tried, and tried again.
        sys.settrace(tracing_lines(bring_variables, 5))
        try:
            owner.run(step, args=(jnp.ones(3),))
        finally:
            sys.settrace(None)

    owner.run(step, args=(jnp.ones(2),))
    used.append(unused.pop())
    first = Caller(rebuild).start()
    first.join()
    for call in calls:
        call.join()
    assert [error for caller in (first, *calls) for error in caller.errors] == []
    assert float(used[0].value) == 2 + len(calls)


waits_p = jax.extend.core.Primitive("waits_while_it_is_compiled")
waits_p.def_abstract_eval(lambda x, *, wait: x)


@functools.partial(mlir.register_lowering, waits_p)
def _wait(context, x, *, wait):
    wait()
    return [x]


def test_a_step_while_the_initial_value_of_a_variable_is_made(owner):
    """It is made of a variable that the step writes, and whose array it donates."""
    v = make_variables(owner, 1)[0]
    held, steps = {}, []

    @dj.jit
    def step(x):
        owner.run(lambda: v.assign_add(one(x)))
        return v.value * 1

    def step_meanwhile():
        if not steps:
            steps.append(Caller(lambda _: step(jnp.ones(2))).start())
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
