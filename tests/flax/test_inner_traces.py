"""Objects of a step that the body of a scan or a branch changes: the error names what works."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import TraceLeakError

XS = jnp.arange(3.0)


class Counter(nnx.Module):
    """A parameter and a count."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))
        self.count = nnx.Variable(jnp.float32(0))


def add(model, x):
    model.count[...] += x


def set_attribute(model, x):
    model.new = 1


def in_scan(scan):
    return lambda model, write: scan(lambda c, x: (write(model, x), (c, x))[1], 0.0, XS)[0]


def in_cond(cond):
    def step(model, write):
        write_it = lambda: [write(model, 1.0)] and 0.0
        return cond(model.weight[...] > 0, write_it, lambda: 0.0)

    return step


def in_function(transform):
    return lambda model, write: transform(lambda x: [write(model, x)] and x)(1.0)


INNER = {
    "dj.lax.scan": in_scan(dj.lax.scan),
    "jax.lax.scan": in_scan(jax.lax.scan),
    "dj.lax.cond": in_cond(dj.lax.cond),
    "jax.lax.cond": in_cond(jax.lax.cond),
    "jax.jit": in_function(jax.jit),
    "jax.grad": in_function(jax.grad),
}

#: What the program is, around a step: all give the step its objects.
PROGRAMS = {
    "run": lambda strategy, step: lambda m: strategy.run(step, args=(m,)),
    "jit": lambda strategy, step: dj.jit(step),
    "run_in_jit": lambda strategy, step: dj.jit(lambda m: strategy.run(step, args=(m,))),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("write", [add, set_attribute])
@pytest.mark.parametrize("made_in_step", [False, True], ids=["argument", "made_in_step"])
def test_an_object_written_in_a_trace_inside(mirrored, program, inner, write, made_in_step):
    def step(model):
        return INNER[inner](Counter() if made_in_step else model, write)

    model = Counter()
    text = rf"in the trace that it belongs to[^$]* at {re.escape(__file__)}:\d+[^$]*nnx\.scan"
    with pytest.raises(TraceLeakError, match=text):
        PROGRAMS[program](mirrored, step)(model)
    assert model.count[...] == 0 and not hasattr(model, "new")


@pytest.mark.parametrize("program", ["run", "run_in_jit"])
@pytest.mark.parametrize("write", [add, set_attribute])
def test_an_object_written_in_a_merge_function(mirrored, program, write):
    def step(model):
        merged = lambda strategy, x: [write(model, x)] and x
        return dj.get_replica_context().merge_call(merged, args=(1.0,))

    model = Counter()
    with pytest.raises(TraceLeakError, match=r"in the trace that it belongs to[^$]*merge_call:"):
        PROGRAMS[program](mirrored, step)(model)
    assert model.count[...] == 0 and not hasattr(model, "new")


def test_an_object_that_is_in_no_argument(mirrored):
    """Where a run inside a program did not get the object, the object is what is missing."""
    hidden = [[Counter()]]
    hide = type("Hidden", (), {"__module__": "numpy", "get": lambda self: hidden[0][0]})()
    step = lambda x: add(hide.get(), x)
    with pytest.raises(TraceLeakError, match="was found neither among the arguments"):
        mirrored.run(step, args=(1.0,))


def with_nnx_scan(model):
    body = lambda model, x: (add(model, x), model)[1]
    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(model, XS)


def with_nnx_cond(model):
    nnx.cond(model.weight[...] > 0, lambda m: add(m, 3.0), lambda m: None, model)


def with_nnx_jit(model):
    nnx.jit(add)(model, 3.0)


def with_split(scan):
    def step(model):
        graphdef, state = nnx.split(model)

        def body(state, x):
            merged = nnx.merge(graphdef, state, copy=True)
            add(merged, x)
            return nnx.state(merged), None

        nnx.update(model, scan(body, state, XS)[0])

    return step


FIXES = {
    "nnx.scan": with_nnx_scan,
    "nnx.cond": with_nnx_cond,
    "nnx.jit": with_nnx_jit,
    "split": with_split(jax.lax.scan),
    "split_dj": with_split(dj.lax.scan),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fix", FIXES)
def test_what_the_error_names_works(mirrored, program, fix):
    model = Counter()
    PROGRAMS[program](mirrored, FIXES[fix])(model)
    np.testing.assert_array_equal(model.count[...], 3.0)


@pytest.mark.parametrize("write", [add, set_attribute])
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
def test_a_run_that_changes_an_object_inside_jax_jit(mirrored, write, is_captured):
    model = Counter()
    step = lambda x: write(model, x)
    if not is_captured:
        step = functools.partial(lambda model, x: write(model, x), model)
    with pytest.raises(TraceLeakError) as error:
        jax.jit(lambda x: mirrored.run(step, args=(x,)))(1.0)
    assert str(error.value).splitlines() == [
        "an nnx.Counter needs to be changed in the trace that it belongs to.",
        "  Got: a step that changes it, run in a function that jax.jit or another transformation "
        "traces.",
        "  Why: its new values are those of that trace, and it was made outside of it.",
        "  Fix: strategy.run without jax.jit around it, since it compiles the step itself; or "
        "dj.jit in its place",
    ]
    assert model.count[...] == 0 and not hasattr(model, "new")
    dj.jit(lambda x: mirrored.run(step, args=(x,)))(1.0)
    assert model.count[...] == 1 or hasattr(model, "new")
