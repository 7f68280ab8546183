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
    assert lines[1].startswith(f"  Got: {type(value).__name__} ")
    assert lines[2:] == [
        "  Why: it is part of what a compiled program is looked up by.",
        "  Fix: pass arrays as they are: they are inputs of the program",
    ]


NEEDS_A_VALUE = {
    "if": lambda n: 1 if n else 2,
    "range": lambda n: list(range(n)),
    "shape": lambda n: jnp.zeros(n),
    "int": lambda n: int(n),
}


@pytest.mark.parametrize("name", NEEDS_A_VALUE)
def test_the_error_of_a_traced_number_names_it(pair, how, name):
    with pytest.raises(TypeError) as info:
        how(lambda n: pair.run(NEEDS_A_VALUE[name], args=(n,)))(3)
    notes = [note for note in info.value.__notes__ if "dj.static" in note]
    assert notes == [
        "A number or bool among the arguments is an input of the program: Python cannot see its "
        "value.\n"
        "  Fix: dj.static(x) in place of x, for an argument that is a shape, a length or a flag"
    ]


def test_other_errors_have_no_such_note(pair):
    with pytest.raises(TypeError) as info:
        pair.run(lambda: jnp.zeros("text"))
    assert not any("dj.static" in note for note in getattr(info.value, "__notes__", ()))
    with pytest.raises(jax.errors.TracerBoolConversionError) as info:
        jax.jit(lambda x: 1 if x else 2)(True)
    assert not any("dj.static" in note for note in getattr(info.value, "__notes__", ()))
