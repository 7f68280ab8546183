"""Variables that replicas write differently: each error says what cures its cause."""

import functools

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import ids


class Box(nnx.Module):
    """Holds one parameter."""

    def __init__(self):
        self.weight = nnx.Param(jnp.float32(1))


def test_a_layer_that_a_step_makes_is_drawn_from_the_stream_that_the_error_names(mirrored):
    def add(box, rngs):
        box.layer = nnx.Linear(2, 3, rngs=rngs)

    with pytest.raises(LocalityError, match=r"a stream named params, nnx\.Rngs\(params=0\)"):
        mirrored.run(add, args=(Box(), nnx.Rngs(0)))
    box = Box()
    mirrored.run(add, args=(box, nnx.Rngs(params=0)))
    assert dj.locality(box.layer.kernel[...]).kind == "mirrored"


def test_a_loss_that_the_optimizer_takes_is_reduced_as_the_error_says(mirrored):
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5))
    box = Box()
    optimizer = nnx.Optimizer(box, tx, wrt=nnx.Param)
    mean = lambda x: dj.get_replica_context().all_reduce("mean", x)

    def step(box, optimizer, x, reduce_loss):
        loss, grads = nnx.value_and_grad(lambda box: box.weight[...] * x)(box)
        optimizer.update(box, mean(grads), value=reduce_loss(loss))

    def run(reduce_loss):
        fn = functools.partial(step, reduce_loss=reduce_loss)
        mirrored.run(fn, args=(box, optimizer, ids(mirrored)))

    with pytest.raises(LocalityError, match="likewise a loss that it takes as value=loss"):
        run(lambda loss: loss)
    run(mean)
    assert int(optimizer.step[...]) == 1


def test_a_stream_that_some_replicas_draw_from_is_refused(pair):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def draw_in_branch(dropout, x):
        nnx.cond(x > 0, lambda dropout: dropout(jnp.ones(2)), lambda dropout: jnp.ones(2), dropout)

    def draw_before_branch(dropout, x):
        key = dropout.rngs()
        apply = lambda dropout: dropout(jnp.ones(2), rngs=key)
        return nnx.cond(x > 0, apply, lambda dropout: jnp.ones(2), dropout)

    with pytest.raises(LocalityError, match="needs to count equally many draws") as info:
        pair.run(draw_in_branch, args=(dropout, ids(pair)))
    assert str(info.value).startswith("Dropout.rngs.count")
    assert "key = rngs.dropout() before the branch" in str(info.value)
    pair.run(draw_before_branch, args=(dropout, ids(pair)))
    assert int(dropout.rngs.count[...]) == 1
