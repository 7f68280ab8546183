"""dj.visualize says who holds which part, as text and as HTML."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import distjax as dj
from tests.replicas import ids


def parts(x):
    return dj.visualize(x).rows


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_row_for_each_replica(count):
    for strategy in (dj.MirroredStrategy(jax.devices()[:count]), dj.VirtualStrategy(count)):
        x = ids(strategy).map(lambda v: v * jnp.ones(5))
        devices = [strategy.extended.topology.replica_devices(r)[0] for r in range(count)]
        assert parts(x) == tuple((f"replica {r}", str(d)) for r, d in enumerate(devices))
        assert dj.visualize(x).caption == f"PerReplica float32[5] on {count} replicas"


def test_variables():
    strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0)
    with strategy.scope():
        w = dj.Variable(jnp.zeros((3, 4)), name="w")
        c = dj.Variable(0.0, synchronization=dj.VariableSynchronization.ON_READ)
    first, second = map(str, jax.devices()[:2])
    assert parts(w) == (("[:, 0:2]", first), ("[:, 2:4]", second))
    assert dj.visualize(w).caption == "Variable 'w' float32[3, 4], partitioned on axis 1"
    assert parts(c) == (("replica 0", first), ("replica 1", second))


def test_arrays_split_on_two_axes_and_copied_on_the_third():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3)
    x = jax.device_put(np.zeros((4, 3, 6)), NamedSharding(mesh, PartitionSpec("a", None, "b")))
    d = [str(device) for device in jax.devices()]
    corners = [f"[{r}:{r + 2}, :, {c}:{c + 3}]" for r in (0, 2) for c in (0, 3)]
    holders = [f"{d[i]}, {d[i + 1]}" for i in (0, 2, 4, 6)]
    assert parts(x) == tuple(zip(corners, holders, strict=True))
    assert str(dj.visualize(x)).splitlines() == [
        "Array float32[4, 3, 6]",
        *(f"  {corner}  {devices}" for corner, devices in parts(x)),
    ]


def test_scalars_and_mirrored_arrays_are_whole_everywhere():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    names = ", ".join(map(str, jax.devices()[:2]))
    for x in (strategy.run(lambda: jnp.float32(1)), strategy.run(lambda: jnp.ones((2, 3)))):
        assert parts(x) == (("whole", names),)


def test_a_notebook_shows_the_same():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = dj.Variable(jnp.zeros(3), name="<w>")
    page = dj.visualize(w)._repr_html_()
    assert page.startswith("<table><caption>Variable &#x27;&lt;w&gt;&#x27; float32[3], mirrored")
    assert f"<td>whole</td><td>{', '.join(map(str, jax.devices()[:2]))}</td>" in page


def test_what_lives_nowhere_is_refused(pair):
    with pytest.raises(TypeError) as error:
        dj.visualize(np.ones(3))
    first = "visualize needs a PerReplica, a variable or a JAX array."
    assert str(error.value).splitlines()[0] == first
    with pair.scope():
        w = dj.Variable(0.0)
    for step in (lambda x: dj.visualize(x), lambda x: dj.visualize(w)):
        with pytest.raises(dj.errors.ContextError) as error:
            dj.jit(step)(1.0)
        assert str(error.value).splitlines()[0] == "visualize needs a value that exists."
