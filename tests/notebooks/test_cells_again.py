"""A user's notebook with NNX: its cells run again, in any order, as by a click on one of them.

The shipped notebooks are run like this by `make notebooks NOTEBOOK_FLAGS=--again`.
"""

CELLS = {
    "imports": """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import distjax as dj
""",
    "strategy": "strategy = dj.MirroredStrategy(jax.devices()[:2])",
    "data": """
dataset = strategy.distribute_dataset([np.ones((4, 2), np.float32)] * 2)
""",
    "model": """
with strategy.scope():
    model = dj.flax.create(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
""",
    "optimizer": """
optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
metric = nnx.metrics.Average()
""",
    "step": """
@strategy.jit
def step(model, optimizer, metric, x):
    loss, grads = nnx.value_and_grad(lambda m: m(x).mean())(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))
    metric.update(values=loss)
""",
    "loop": """
before = int(optimizer.step[...])
for x in dataset:
    step(model, optimizer, metric, x)
assert int(optimizer.step[...]) == before + 2
""",
    "evaluate": """
(x, *_) = dataset
mean = strategy.reduce("mean", strategy.run(lambda m, x: m(x).mean(), args=(model, x)))
assert np.isfinite(float(mean)) and np.isfinite(float(metric.compute()))
""",
}


def test_each_cell_twice_and_then_any_of_them_before_the_loop():
    """The model and the optimizer that are left over are used under what is made anew."""
    space = {}
    for cell in CELLS.values():
        exec(cell, space)
        exec(cell, space)
    for name in ("strategy", "data", "strategy", "model", "step", "optimizer"):
        for again in (name, "loop", "evaluate"):
            exec(CELLS[again], space)
