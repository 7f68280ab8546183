"""Gradients that were saved between two steps of one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj


class Training:
    """A variable of zeros, and gradients of which each is its number of the step."""

    def __init__(self, steps, op="mean", strategy=None, dtype=jnp.float32):
        self.strategy = strategy or dj.MirroredStrategy(jax.devices()[:2])
        with self.strategy.scope():
            self.w = dj.Variable(jnp.zeros(2, dtype), name="w")
        self.optimizer = dj.optim.Optimizer(optax.sgd(1.0), op, accumulate_steps=steps)
        self.optimizer.init([self.w])
        self.step = dj.jit(lambda g: self.strategy.run(self.replica_step, args=(g,)))

    def replica_step(self, g):
        self.optimizer.apply_gradients([(g * jnp.ones(2, self.w.dtype), self.w)])

    def values_after(self, gradients):
        """Returns the variable's first element after each gradient."""
        values = []
        for gradient in gradients:
            self.step(jnp.asarray(gradient, self.w.dtype))
            values.append(float(self.w.value[0]))
        return values

    def tree(self):
        return {"w": self.w, "o": self.optimizer}


def test_fewer_steps_than_are_saved_already(checkpointer):
    """The next step completes the update, by the mean of all gradients that are in the sum."""
    saved = Training(4)
    saved.values_after([1, 2, 3])
    checkpointer.save(1, saved.tree())
    resumed = Training(2)
    checkpointer.restore(resumed.tree())
    assert resumed.values_after([6, 1, 2, 1]) == [-3, -3, -4.5, -4.5]


def test_more_steps_than_when_saved(checkpointer):
    saved = Training(2)
    saved.values_after([1])
    checkpointer.save(1, saved.tree())
    resumed = Training(4)
    checkpointer.restore(resumed.tree())
    assert resumed.values_after([2, 3, 6]) == [0, 0, -3]


def test_another_reduction_after_an_update(checkpointer):
    saved = Training(2, "sum")
    saved.values_after([1, 1])
    checkpointer.save(1, saved.tree())
    resumed = Training(2, "mean")
    checkpointer.restore(resumed.tree())
    np.testing.assert_array_equal(resumed.w.value, saved.w.value)


def test_what_an_earlier_version_saved(checkpointer):
    """Without the reduction, and summed in the dtype of the variable."""
    accumulators = [jnp.full(2, 3, jnp.bfloat16), jnp.int32(1)]
    w = jnp.zeros(2, jnp.bfloat16)
    checkpointer.save(1, {"w": w, "o": {"accumulators": accumulators}})
    resumed = Training(2, dtype=jnp.bfloat16)
    checkpointer.restore(resumed.tree())
    assert resumed.optimizer.accumulators[0].dtype == jnp.float32
    assert resumed.values_after([1]) == [-2]
