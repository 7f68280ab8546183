"""What a step leaves in its object, or returns, that is of no use after its trace."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import TraceLeakError

STRATEGY = dj.VirtualStrategy(2)
HOWS = {
    "run": lambda fn: lambda x: STRATEGY.run(fn, args=(x,)),
    "jit": lambda fn: dj.jit(lambda x: STRATEGY.run(fn, args=(x,))),
    "strategy.jit": STRATEGY.jit,
    "global": dj.jit,
}


class Trainer:
    """Leaves modules in itself, for the first time."""

    def model_(self, x):
        self.model = nnx.Linear(2, 2, rngs=nnx.Rngs(params=0))
        return x

    def in_a_list(self, x):
        self.models = [nnx.Linear(2, 2, rngs=nnx.Rngs(params=0))]
        return x

    def variable(self, x):
        self.v = nnx.Param(x)
        return x

    def removed(self, x):
        self.v = nnx.Param(x)
        y = self.v[...] + 1
        del self.v
        return y


@pytest.mark.parametrize("how", list(HOWS))
@pytest.mark.parametrize("name", ["model_", "in_a_list", "variable"])
def test_a_module_left_in_the_object_of_a_method(name, how):
    """Also where there was none before."""
    with pytest.raises(TraceLeakError, match=rf"Trainer.{name} needs to return what it computes"):
        HOWS[how](getattr(Trainer(), name))(jnp.ones(2))


@pytest.mark.parametrize("how", list(HOWS))
def test_one_that_the_step_removes_is_no_matter(how):
    assert HOWS[how](Trainer().removed)(jnp.ones(2)).tolist() == [2, 2]


def test_one_that_the_program_removes_after_the_run():
    trainer = Trainer()

    @dj.jit
    def program(x):
        STRATEGY.run(trainer.variable, args=(x,))
        del trainer.v  # what it held is of a trace that is over
        return x + 1

    assert program(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("how", list(HOWS))
@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"a": r}, lambda r: (1, [r])])
def test_a_ref_that_is_returned(wrap, how):
    with pytest.raises(TraceLeakError) as info:
        HOWS[how](lambda x: wrap(jax.new_ref(x)))(jnp.ones(2))
    assert "needs to return arrays, or pytrees of them.\n  Got: a Ref" in str(info.value)
    assert "Fix: return its value: return ref[...]" in str(info.value)


def test_a_ref_inside_of_a_program_is_fine():
    @dj.jit
    def program(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    assert program(jnp.ones(2)).tolist() == [2, 2]
