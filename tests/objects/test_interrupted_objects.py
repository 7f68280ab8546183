"""A signal that raises at any line leaves objects as before, or as after the whole step."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.interrupts import Interrupt, in_packages, interrupted

#: Every how many lines one is interrupted, at a first call and at a warm one; primes, so that loops
#: are met at different places. A stride of 1 takes an hour.
STRIDES = {True: 523, False: 37}
LIBRARIES = in_packages("distjax", "flax.nnx")


class Model(nnx.Module):
    """Parameters, a random stream and a plain tree."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.zeros(2))
        self.rngs = nnx.Rngs(0)
        self.table = nnx.data({"a": nnx.Variable(jnp.zeros(()))})
        self.mode = "start"


def interrupt_at(number, call):
    """Runs `call`, with Ctrl-C at the given line of distjax or NNX; returns whether it came."""
    error = interrupted(call, number, LIBRARIES).error
    if error is not None and not isinstance(error, Interrupt):
        raise error
    return error is not None


def content(model):
    """Returns all that a model holds, with the identity of what holds it."""
    variables = (model.kernel, model.bias, model.rngs.default.count, model.table["a"])
    values = [np.asarray(v.get_raw_value()).tolist() for v in variables]
    return values, [*map(id, variables)], sorted(vars(model)), model.mode, sorted(model.table)


def in_place(model):
    model.kernel[...] += 1
    model.bias[...] += model.kernel[...]
    model.rngs()
    model.table["a"][...] += 1


def in_structure(model):
    in_place(model)
    if model.mode == "start":
        model.mode = "later"
        model.new = nnx.Variable(jnp.ones(2))
        model.table["b"] = nnx.Variable(jnp.ones(()))


def released(model, strategy):
    """Returns whether another thread can step the model."""
    thread = threading.Thread(
        target=lambda: strategy.run(lambda m: m.kernel[...].sum(), args=(model,)), daemon=True
    )
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.pairwise
@pytest.mark.parametrize("step", [in_place, in_structure])
@pytest.mark.parametrize("is_first", [True, False], ids=["first_call", "warm_call"])
def test_an_interrupt_at_any_line(pair, step, is_first):
    def call(model, step):
        pair.run(step, args=(model,))

    def fresh():
        """A model and a function, new unless the call is to be warm."""
        own = (lambda model: step(model)) if is_first else step
        return Model(), own

    expected, own = fresh()
    before = content(expected)
    call(expected, own)
    after = content(expected)
    number, num_interrupts, came = 1, 0, True
    while came:
        model, own = fresh()
        ids = content(model)[1]
        came = interrupt_at(number, lambda model=model, own=own: call(model, own))
        found = content(model)
        assert found[1] == ids, number
        is_old, is_new = found[0] == before[0], found[0] == after[0]
        assert is_old or is_new, (number, found)
        assert (found[2:] == before[2:]) if is_old else (found[2:] == after[2:]), (number, found)
        if num_interrupts % 10 == 0:
            assert released(model, pair), number
        number += STRIDES[is_first]
        num_interrupts += came
    assert num_interrupts > 20
    model = Model()
    call(model, step)
    assert content(model)[0] == after[0]
