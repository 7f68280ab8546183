"""Which line of a call stack is the user's."""

import functools
import inspect
import sysconfig

import jax
import jax.numpy as jnp
import optax
import pytest

import distjax as dj
from distjax._src.user_lines import (
    UNKNOWN,
    SourceFrame,
    calling_line,
    find_line,
    last_line,
    line_within,
    meeting_level,
    source_line,
    user_frames,
)

PACKAGES, SCRIPTS = (sysconfig.get_paths()[key] for key in ("purelib", "scripts"))
OWN = SourceFrame("step", "/home/me/train.py", 7)
JAX = SourceFrame("psum", jax.__file__, 1)
DISTJAX = SourceFrame("run", dj.__file__, 2)
FLAX = SourceFrame("Dense.__call__", f"{PACKAGES}/flax/linen.py", 3)
COMMAND = SourceFrame("<module>", f"{SCRIPTS}/train", 4)


@pytest.mark.parametrize(
    ("frames", "otherwise", "expected"),
    [
        ([JAX, DISTJAX], None, None),
        ([JAX, DISTJAX], "elsewhere", "elsewhere"),
        ([JAX, DISTJAX, OWN, FLAX], "elsewhere", str(OWN)),
        ([JAX, FLAX, DISTJAX, OWN], None, str(OWN)),
        ([JAX, FLAX, DISTJAX], "elsewhere", "elsewhere"),
        ([JAX, FLAX, COMMAND], None, str(FLAX)),  # a program that is installed as a whole
    ],
)
def test_a_line_of_the_user_counts_before_one_of_a_package(frames, otherwise, expected):
    assert find_line(frames, otherwise) == expected


def test_the_line_that_is_running():
    here = f"{__file__}:{inspect.currentframe().f_lineno + 1}"
    assert calling_line().startswith(here)


def test_the_line_of_an_equation():
    (add,) = jax.make_jaxpr(lambda x: x + 1)(1.0).eqns
    assert source_line(add).startswith(f"{__file__}:")


def test_an_equation_of_a_package_has_the_line_of_the_user():
    jaxpr = jax.make_jaxpr(lambda x: optax.apply_updates(x, x))(jnp.ones(3))
    assert {source_line(eqn).rpartition(":")[0] for eqn in jaxpr.eqns} == {__file__}


def _halved(x):
    return x / 2


def test_the_line_of_the_function_that_has_a_value_where_it_is_used():
    def step(x):
        y = jnp.exp(x)  # made
        z = _halved(y)  # called
        inner = lambda: y * 3  # of its own
        return z, inner()

    made, halved, inner = jax.make_jaxpr(step)(1.0).eqns
    lines = inspect.getsourcelines(step)
    at = lambda text: lines[1] + next(i for i, line in enumerate(lines[0]) if text in line)
    assert source_line(halved).endswith("(_halved)")
    makes, uses, own = (
        f"{__file__}:{at(f'# {text}')} " for text in ("made", "called", "of its own")
    )
    frames = lambda eqn: user_frames([eqn], False)
    level, are_lines = meeting_level(frames(halved), frames(made))
    assert are_lines and str(frames(made)[level]).startswith(makes)
    assert line_within(frames(halved), level).startswith(uses)
    level, are_lines = meeting_level(frames(inner), frames(halved))
    assert are_lines and line_within(frames(inner), level).startswith(own)
    level, are_lines = meeting_level(frames(halved), frames(halved))
    assert not are_lines and str(frames(halved)[level]) == source_line(halved)
    assert line_within([], 0) == UNKNOWN


def test_the_last_line_of_a_function_is_that_of_its_result():
    def step(x):
        y = x + 1
        return y  # the result

    lines = inspect.getsourcelines(step)
    at = lines[1] + next(i for i, line in enumerate(lines[0]) if "the result" in line)
    assert last_line(functools.partial(jax.jit(step), 1)).startswith(f"{__file__}:{at} ")
    assert last_line(len) == UNKNOWN


def test_a_line_that_nothing_tells():
    assert source_line() == UNKNOWN == "an unknown line"
