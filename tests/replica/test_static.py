"""dj.static: arguments that Python code of a step can see."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import counted


def padded(x, length, train):
    return jnp.zeros(length) + x if train else x


MAKE_STEP = {
    "run": lambda strategy: lambda *args, **kwargs: strategy.run(padded, args, kwargs),
    "strategy.jit": lambda strategy: strategy.jit(padded),
    "strategy.jit in dj.jit": lambda strategy: dj.jit(
        lambda x, *args, **kwargs: strategy.jit(padded)(
            x, *map(dj.static, args), **{k: dj.static(v) for k, v in kwargs.items()}
        )
    ),
}


@pytest.mark.parametrize("how", MAKE_STEP)
def test_the_function_sees_the_value(strategy, how):
    x, step = jnp.float32(1), MAKE_STEP[how](strategy)
    assert step(x, dj.static(3), dj.static(True)).shape == (3,)
    assert step(x, dj.static(4), train=dj.static(True)).shape == (4,)
    assert step(x, dj.static(3), dj.static(False)).shape == ()


def test_deep_in_arguments_and_by_keyword(pair):
    step = lambda x, config: jnp.zeros(config["sizes"][0]) + x
    out = pair.run(step, args=(1.0,), kwargs={"config": {"sizes": [dj.static(3), 7]}})
    assert out.shape == (3,)


def test_the_reference_interpreter_sees_it_too():
    strategy = dj.testing.ReferenceStrategy(2)
    assert strategy.run(padded, args=(1.0, dj.static(3), dj.static(True))).shape == (3,)


def test_in_jit_and_nested(pair):
    assert dj.jit(padded)(1.0, dj.static(3), dj.static(True)).shape == (3,)
    step = dj.jit(lambda x, n: pair.run(padded, (x, dj.static(n), dj.static(True))))
    assert step(1.0, dj.static(2)).shape == (2,)
    assert dj.static(dj.static(3)) == dj.static(3)


def test_it_is_compiled_for_each_value(pair):
    step = counted(lambda x, n: x * n)
    values = (2, 3, 2, 2.0, True, 1, np.float32(2), math.nan, math.nan)
    for n in values:
        pair.run(step, args=(1.0, dj.static(n)))
    assert step.calls == 7  # 2 and nan come twice; 2, 2.0 and float32(2), True and 1 are two each


def test_numbers_elsewhere_are_inputs(pair):
    step = counted(lambda x, n: x * n)
    for n in (2, 3, 4):
        assert float(pair.run(step, args=(1.0, n))) == n
    assert step.calls == 1


@pytest.mark.parametrize("value", [[1], jnp.ones(2), {"a": 1}])
def test_what_cannot_be_hashed(value):
    with pytest.raises(ValueError) as info:
        dj.static(value)
    lines = str(info.value).splitlines()
    assert lines[0] == "dj.static needs a hashable value."
    kind = "jax.Array" if isinstance(value, jax.Array) else type(value).__name__
    assert lines[1].startswith(f"  Got: {kind} ")
    assert lines[2:] == [
        "  Why: it is part of the key under which a compiled program is cached.",
        "  Fix: pass arrays as they are: they are inputs of the program; a list as a tuple: "
        "dj.static(tuple(x))",
    ]


NEEDS_A_VALUE = {
    "if": lambda n: 1 if n else 2,
    "range": lambda n: list(range(n)),
    "shape": lambda n: jnp.zeros(n),
    "int": lambda n: int(n),
}


START = "Python needs the value of a traced array: "
STATIC = "  Fix: dj.static(n) in place of n, where the step is called"


def value_notes(error):
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(START)]


@pytest.mark.parametrize("name", NEEDS_A_VALUE)
def test_the_error_of_a_traced_number_names_it(pair, how, name):
    with pytest.raises(TypeError) as info:
        how(lambda n: pair.run(NEEDS_A_VALUE[name], args=(n,)))(3)
    why = "argument n of <lambda> may change from call to call"
    assert value_notes(info.value) == [f"{START}{why}.\n{STATIC}"]


def trained(x, options):
    return x if options["train"] else -x


def test_the_error_of_a_number_in_cross_replica_code_names_it():
    with pytest.raises(TypeError) as info:
        dj.jit(trained)(jnp.ones(2), {"train": True})
    path = "options['train']"
    assert value_notes(info.value) == [
        f"{START}argument {path} of trained may change from call to call.\n"
        f"  Fix: dj.static({path}) in place of {path}, where the step is called"
    ]


def repeated(x, n):
    return x + sum(range(n))


def test_under_pmap_the_error_names_its_own_argument(pair):
    with pytest.raises(TypeError) as info:
        dj.pmap(repeated, in_axes=(0, None), strategy=pair)(np.ones(2), 3)
    (note,) = value_notes(info.value)
    assert note.endswith(STATIC)


BRANCH = (
    "`if`, `while`, `and` decide once, and one trace serves all calls and replicas.\n"
    "  Fix: jnp.where(condition, a, b), or jax.lax.cond (dj.lax.cond where it writes variables)"
)
SHAPE = (
    "shapes, lengths and indices of lists are part of the program.\n"
    "  Fix: a number from x.shape; jax.lax.fori_loop for a loop, jnp.take for an index"
)
LATER = (
    "it is known only when the program runs, after float(x), x.item() or NumPy asked.\n"
    "  Fix: return it, and read it outside of the step; jax.debug.print('{}', x) to print it"
)
ASKS_FOR_AN_ARRAY = {
    "if": (lambda x: x if x.mean() < 1 else -x, BRANCH),
    "id": (lambda x: x if dj.get_replica_context().replica_id_in_sync_group else -x, BRANCH),
    "range": (lambda x: list(range(x.sum().astype(int))), SHAPE),
    "float": (lambda x: float(x.mean()), LATER),
    "item": (lambda x: x.mean().item(), LATER),
    "numpy": (lambda x: np.asarray(x), LATER),
}


@pytest.mark.parametrize("name", ASKS_FOR_AN_ARRAY)
def test_the_error_of_an_array_says_what_to_use_in_place(pair, how, name):
    fn, rest = ASKS_FOR_AN_ARRAY[name]
    with pytest.raises(TypeError) as info:
        how(lambda x: pair.run(fn, args=(x,)))(jnp.ones(2))
    assert value_notes(info.value) == [START + rest]


def test_other_errors_have_no_such_note(pair):
    with pytest.raises(TypeError) as info:
        pair.run(lambda: jnp.zeros("text"))
    assert not any(note.startswith(START) for note in getattr(info.value, "__notes__", ()))
    with pytest.raises(jax.errors.TracerBoolConversionError) as info:
        jax.jit(lambda x: 1 if x else 2)(True)
    assert not any(note.startswith(START) for note in getattr(info.value, "__notes__", ()))
