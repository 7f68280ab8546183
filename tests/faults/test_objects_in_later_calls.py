"""A later call that brings a Python object, and with it a variable, is a call like any other."""

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

MEAN = dj.VariableAggregation.MEAN

STRATEGIES = {
    "default": dj.get_strategy,
    "one_device": dj.OneDeviceStrategy,
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}
OBJECTS = {
    "string": lambda variable: "train",
    "variable": lambda variable: variable,
    "list": lambda variable: [variable, "train"],
}


@pytest.fixture
def owner(request):
    return STRATEGIES[request.param]()


def cases():
    """Outside of scopes the default strategy calls the function itself: nothing is compiled."""
    for name in STRATEGIES:
        for how in ("run", "jit"):
            yield pytest.param(name, how, id=f"{name}-{how}")


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize(("owner", "how"), list(cases()), indirect=["owner"])
def test_an_object_after_arrays_only(owner, how, kind):
    with owner.scope():
        v = dj.Variable(0.0, name="v", aggregation=MEAN)

    def step(x, extra=None):
        if extra is not None:
            v.assign_add(x)
        return x + 1

    call = (lambda *args: owner.run(step, args=args)) if how == "run" else dj.jit(step)
    one, extra = jnp.float32(1), OBJECTS[kind](v)
    assert [float(call(one)), float(call(one, extra)), float(call(one))] == [2, 2, 2]
    assert float(v.value) == 1
    call(one, extra)
    assert float(v.value) == 2
