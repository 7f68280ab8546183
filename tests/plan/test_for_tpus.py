"""Plans for TPU slices, with libtpu: `make plan-test`. One process at a time may load it."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax._src.plan import topologies
from tests.plan.test_plan import of_variables

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'distjax[plan]' (Linux only)",
)


def test_a_slice_is_planned():
    report = dj.plan.plan(of_variables, "v5e:2x2", strategies=["mirrored", "zero3"])
    mirrored, zero3 = report.plans
    assert report.libtpu.startswith(f"{topologies.LIBTPU}.") and report.fits
    assert mirrored.memory.limit_bytes == int(15.75 * 2**30)
    for plan in (mirrored, zero3):
        assert plan.memory.peak_bytes == sum(plan.memory.by_cause.values())
        assert 0 <= plan.memory.by_cause["unattributed"] < 0.1 * plan.memory.peak_bytes
        assert plan.seconds_at_least["step"] > 0
    state = lambda plan: plan.memory.by_cause["parameters"] + plan.memory.by_cause["optimizer"]
    assert state(mirrored) == 4 * state(zero3)


def test_what_does_not_fit_is_an_answer():
    def target(strategy):
        step = lambda x: strategy.run(lambda x: (x @ x.T) @ (x @ x.T), args=(x,))
        rows = jax.ShapeDtypeStruct((2**17 * strategy.num_replicas_in_sync, 8), jnp.float32)
        return step, (dj.plan.batch(rows),)

    (plan,) = dj.plan.plan(target, "v5e:2x2", strategies=["mirrored"]).plans
    assert plan.fits is False
    assert plan.memory.peak_bytes > plan.memory.limit_bytes


def test_there_is_no_such_slice():
    with pytest.raises(ValueError, match="topology 'v5e:3x3' needs to be a kind of device"):
        dj.plan.plan(of_variables, "v5e:3x3")


def test_two_slices_reduce_in_stages():
    (plan,) = dj.plan.plan(of_variables, "v5e:2x2", slices=2, strategies=["mirrored"]).plans
    assert (plan.chips, plan.slices, plan.num_replicas, plan.fits) == (8, 2, 8, True)
    stages = [c for c in plan.collectives.compiled if c.axis == "part of replica"]
    assert stages and {c.made_by_xla for c in stages} == {"a stage of one over more devices"}


def test_options_of_the_compiler():
    options = {"xla_tpu_enable_async_collective_fusion": "true"}
    plans = dj.plan.plan(of_variables, "v5e:2x2", strategies=["mirrored"], options=options).plans
    assert [p.compiler_options for p in plans] == [{}, options] and all(p.fits for p in plans)


@pytest.mark.parametrize(("name", "count"), [("v5e:16x16", 256), ("v4:8x8x8", 1024)])
def test_zero_3_on_a_pod(name, count):
    """Every array over the threshold is split, with Adam's moments, though 770 = 2 * 5 * 7 * 11."""
    strategy = dj.ShardedStrategy(topologies.describe(name).devices, partition="parameters")
    assert strategy.num_replicas_in_sync == count
    shapes = {"embedding": (50257, 770), "up": (770, 3074), "down": (3074, 770), "out": (770, 770)}
    with strategy.scope():
        params = {k: dj.Variable(lambda s=s: jnp.zeros(s), name=k) for k, s in shapes.items()}
        model = dj.flax.create(lambda: nnx.Linear(768, 3072, rngs=nnx.Rngs(0)))
    optimizer = dj.optim.Optimizer(optax.adam(0.1), "mean")
    optimizer.init(params)
    dj.flax.place(model)
    for v in strategy.describe().variables:
        whole = 4 * math.prod(v.shape)
        assert v.bytes_per_device < whole / 150 or whole <= 64 << 10, v
    step = dj.jit(lambda: strategy.run(lambda: params["out"].value.sum()))
    compiled = step.lower().compile()
    assert "all-gather" in compiled.as_text() or "all-reduce" in compiled.as_text()
