"""Objects among the arguments that JAX does not know as pytrees, and the arrays they hold."""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax._src.objects import walk
from distjax.errors import TraceLeakError

ONE = jnp.float32(1)


class State:
    def __init__(self):
        self.w = jnp.ones(3)
        self.rates = np.ones(3)
        self.itself = self
        self.losses = []

    def scaled(self, x):
        return self.w * x


class Slotted:
    __slots__ = ("w",)

    def __init__(self):
        self.w = jnp.ones(3)


class Private:
    __slots__ = ("__w",)

    def put(self, x):
        self.__w = x


@dataclasses.dataclass(eq=False)
class Record:
    w: object


@pytest.fixture(scope="module")
def pair():
    return dj.VirtualStrategy(2)


def plain_jit(strategy):
    return lambda fn, args: dj.jit(fn)(*args)


def run(strategy):
    return lambda fn, args: strategy.run(fn, args=args)


def run_in_jit(strategy):
    return lambda fn, args: dj.jit(lambda s, x: strategy.run(fn, args=(s, x)))(*args)


def strategy_jit(strategy):
    return lambda fn, args: strategy.jit(fn)(*args)


@pytest.fixture(params=[plain_jit, run, run_in_jit, strategy_jit])
def call(request, pair):
    return request.param(pair)


def test_arrays_that_the_function_reads_of_an_object_are_refused(pair):
    """They would be constants of the program: a loop that sets new ones trained wrong."""
    with pytest.raises(ValueError) as caught:
        pair.run(lambda state, x: state.w + x, args=(State(), ONE))
    assert str(caught.value).splitlines() == [
        "argument state needs to be a pytree, since the function reads arrays of it.",
        "  Got: State, with arrays at state.w.",
        "  Why: JAX does not know its class, so the object is part of the compiled program, its "
        "arrays would be constants there, and later ones would never be read.",
        "  Fix: @jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; "
        "dj.static(state) if constants are meant",
    ]


@pytest.mark.parametrize(
    ("argument", "read", "path"),
    [
        (Slotted(), lambda s: s.w, "s.w"),
        (Record([{"a": ONE}]), lambda s: s.w[0]["a"], "s.w[0]['a']"),
        ({"a": Record(Slotted())}, lambda s: s["a"].w.w, "s['a'].w.w"),
        (State().scaled, lambda s: s(2.0), "s.__self__.w"),
        (State(), lambda s: jax.jit(lambda x: x * s.w)(2.0), "s.w"),
        (State(), lambda s: jax.lax.cond(s.w[0] > 0, lambda: s.w, lambda: -s.w), "s.w"),
    ],
)
def test_wherever_the_object_holds_them(call, argument, read, path):
    with pytest.raises(ValueError) as caught:
        call(lambda s, x: read(s) + x, (argument, ONE))
    assert str(caught.value).splitlines()[1].endswith(f"with arrays at {path}.")


@pytest.mark.parametrize(
    "read",
    [lambda state: state.rates, lambda state: state.w.size, lambda state: len(state.losses)],
)
def test_what_is_no_array_of_jax_may_be_read(call, read):
    call(lambda state, x: read(state) + x, (State(), ONE))


def test_constants_may_be_meant(call):
    out = call(lambda state, x: state.w + x, (dj.static(State()), ONE))
    assert np.array_equal(out, [2, 2, 2])
    step = dj.jit(lambda state, x: state.w + x, static_argnames="state")
    assert np.array_equal(step(State(), ONE), [2, 2, 2])


def test_variables_of_an_object_are_followed(call, pair):
    with pair.scope():
        model = Record(dj.Variable(1.0))
    step = lambda model, x: model.w + x
    assert float(call(step, (model, ONE))) == 2
    model.w.assign(2.0)
    assert float(call(step, (model, ONE))) == 3


def test_a_traced_value_left_in_an_object(pair):
    def step(state, x):
        state.w = state.w + x
        return x

    with pytest.raises(TraceLeakError) as caught:
        pair.run(step, args=(State(), ONE))
    assert str(caught.value).splitlines() == [
        "test_a_traced_value_left_in_an_object.<locals>.step needs to return what it computes, or "
        "to assign it to variables.",
        "  Got: a traced value of type float32[3] in state.w.",
        "  Why: the Python code of a compiled step does not run again, so "
        "nothing would be written at later calls, and a traced value is useless"
        " outside of its trace.",
        "  Fix: pass the value and return the new one, or make it a variable: "
        "state.w = dj.Variable(...), and state.w.assign(...) in the step",
    ]


def test_a_traced_value_left_in_a_container(call):
    def step(s, x):
        s.losses.append(x + 1)
        return x

    with pytest.raises(TraceLeakError, match=r"Got: .* in s.losses\[0\]\.\n"):
        call(step, (dj.static(State()), ONE))


def test_a_traced_value_left_in_a_private_slot(call):
    def step(s, x):
        s.put(x + 1)
        return x

    with pytest.raises(TraceLeakError, match=r"Got: .* in s\._Private__w\.\n"):
        call(step, (dj.static(Private()), ONE))


def test_a_method_that_writes_an_attribute():
    class Trainer:
        table = jnp.ones(3)

        def __init__(self):
            self.w = jnp.ones(3)

        @dj.jit
        def read(self, x):
            return self.w * self.table * x

        @dj.jit
        def write(self, x):
            self.w = self.w * x

    assert np.array_equal(Trainer().read(ONE), [1, 1, 1])
    with pytest.raises(TraceLeakError, match=r"Trainer\.write needs .*\n  Got: .* in self\.w\."):
        Trainer().write(ONE)


class Trainer:
    """Its steps leave traced values behind, or none."""

    def __init__(self):
        self.params, self.losses, self.count = {"w": ONE}, [], 0
        self.model, self.former = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), None

    def update(self, scale, x):
        self.params = {"w": self.params["w"] + x}
        return x

    def append(self, scale, x):
        self.losses.append(x + 1)

    def replace(self, scale, x):
        self.model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def merge(self, model, x):
        self.model, self.last = nnx.merge(*nnx.split(self.model)), model

    def create(self, scale, x):
        self.head = {"linear": nnx.Linear(3, 3, rngs=nnx.Rngs(0))}

    def right(self, scale, x):
        self.count += 1
        self.model, self.former = self.former or self.model, self.model
        self.scratch = x + self.params["w"]
        self.model.kernel[...] = self.model.kernel[...] + self.scratch.mean()
        del self.scratch
        return {"w": self.params["w"] + x}


@pytest.mark.parametrize(
    ("step", "path"), [(Trainer.update, "self.params['w']"), (Trainer.append, "self.losses[0]")]
)
@pytest.mark.parametrize("wrap", [lambda method: method, functools.partial])
def test_a_traced_value_left_in_the_object_of_a_method(call, step, path, wrap):
    """`self` is no argument of a bound method; the program would read its first values for ever."""
    with pytest.raises(TraceLeakError) as caught:
        call(wrap(step.__get__(Trainer())), (ONE, ONE))
    first, got, *_ = str(caught.value).splitlines()
    assert first.startswith(f"Trainer.{step.__name__} needs to return what it computes, or to ")
    assert got == f"  Got: a traced value of type float32[] in {path}."


@pytest.mark.parametrize("make_call", [plain_jit, run])
@pytest.mark.parametrize(
    ("step", "path"), [(Trainer.replace, "self.model"), (Trainer.create, "self.head['linear']")]
)
def test_a_new_module_left_in_the_object_of_a_method(pair, make_call, step, path):
    """The loop went on with the module that was there before, the user with traced values."""
    with pytest.raises(TraceLeakError) as caught:
        make_call(pair)(step.__get__(Trainer()), (ONE, ONE))
    first, got, _, fix = str(caught.value).splitlines()
    assert re.fullmatch(rf"  Got: a traced value of type float32\[.*\] in {re.escape(path)}\.", got)
    assert fix.endswith(f"and update the one that is there: nnx.update({path}, state)")


def test_a_module_of_the_program_left_in_the_object_of_a_method(call):
    """In another module, too, its variables get their values back."""
    trainer = Trainer()
    kernel = trainer.model.kernel
    for _ in range(2):
        call(trainer.merge, (nnx.Linear(3, 3, rngs=nnx.Rngs(0)), ONE))
    assert trainer.model.kernel is kernel
    for module in (trainer.model, trainer.last):
        assert not isinstance(module.kernel[...], jax.core.Tracer)


TOTAL = ONE


def make_leaks(where):
    """Returns a step that updates an array outside, and what shows the array as it is."""
    total, state, shown, number = ONE, {"total": np.float32(1)}, [], 1.0

    def rebind(scale, x):
        nonlocal total
        total = total + x
        return total

    def rebind_within(scale, x):
        def add(y):
            nonlocal total
            total = total + y

        add(x)
        return total

    def rebind_global(scale, x):
        global TOTAL
        TOTAL = TOTAL + x
        return x

    def rebind_number(scale, x):
        nonlocal number
        number += x

    def set_item(scale, x):
        state["total"] = state["total"] + x

    def show(scale, x):
        shown.append(x + total + state["total"])
        return x + 1

    def restore(scale, x):
        nonlocal total
        kept, total = total, total + x
        try:
            return total
        finally:
            total = kept

    return locals()[where]


@pytest.mark.parametrize(
    ("where", "path"),
    [
        ("rebind", "total"),
        ("rebind_within", "total"),
        ("rebind_global", "TOTAL"),
        ("rebind_number", "number"),
        ("set_item", "state['total']"),
    ],
)
def test_a_traced_value_left_in_what_a_function_captures(call, where, path, monkeypatch):
    """A loop over such a step computed the same at each call, from the first values."""
    monkeypatch.setattr(sys.modules[__name__], "TOTAL", ONE)
    with pytest.raises(TraceLeakError) as caught:
        call(make_leaks(where), (ONE, ONE))
    assert f"{where} needs to return what it computes, or to" in str(caught.value)
    assert f"  Got: a traced value of type float32[] in {path}." in str(caught.value)


def test_little_of_large_data_that_a_function_captures_is_looked_at():
    """A table of a million numbers cost seconds at each trace."""
    table = [[1.0] * 1000 for _ in range(1000)]
    assert len(walk.find_arrays(table, "table", (float,))) < 10_000
    assert "table[0][999]" in walk.find_arrays(table, "table", (float,))


@pytest.mark.parametrize("where", ["show", "restore"])
def test_a_function_that_updates_nothing_that_it_captures(call, where):
    step = make_leaks(where)
    for x in (ONE, jnp.ones(3), ONE):
        assert np.all(call(step, (ONE, x)) == 2)


def test_a_method_that_leaves_none(call):
    trainer = Trainer()
    for _ in range(2):
        assert np.array_equal(call(trainer.right, (ONE, ONE))["w"], 2)
    assert not isinstance(trainer.model.kernel[...], jax.core.Tracer)


def test_a_traced_value_in_an_object_among_the_results(pair):
    with pytest.raises(TraceLeakError) as caught:
        pair.run(lambda record: Record(record.w + 1), args=(Record(jnp.ones(3)),))
    assert str(caught.value).splitlines()[0].endswith("needs to return arrays, or pytrees of them.")
    assert str(caught.value).splitlines()[1:] == [
        "  Got: an object with a traced value of type float32[3] in Record.w.",
        "  Why: JAX does not know its class, so its arrays are not results of the compiled "
        "program.",
        "  Fix: @jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays",
    ]
