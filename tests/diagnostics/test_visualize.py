"""dj.visualize draws who holds which part, as text and as SVG."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import distjax as dj
from tests.replicas import ids


def labels(x):
    return [block.label for block in dj.visualize(x).blocks]


def spans(x):
    return [(block.rows, block.columns) for block in dj.visualize(x).blocks]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_block_for_each_replica(count):
    for strategy in (dj.MirroredStrategy(jax.devices()[:count]), dj.VirtualStrategy(count)):
        x = ids(strategy).map(lambda v: v * jnp.ones(5))
        devices = [strategy.extended.topology.replica_devices(r)[0] for r in range(count)]
        assert labels(x) == [f"replica {r} on {d}" for r, d in enumerate(devices)]
        assert spans(x) == [((r, r + 1), (0, 5)) for r in range(count)]
        assert dj.visualize(x).caption == f"PerReplica float32[5] on {count} replicas"


def test_variables():
    strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters")
    with strategy.scope():
        w = dj.Variable(jnp.zeros((3, 4)), name="w")
        c = dj.Variable(0.0, synchronization=dj.VariableSynchronization.ON_READ)
    first, second = jax.devices()[:2]
    assert labels(w) == [str(first), str(second)]
    assert spans(w) == [((0, 3), (0, 2)), ((0, 3), (2, 4))]
    assert dj.visualize(w).caption == "Variable 'w' float32[3, 4], partitioned on axis 1"
    assert labels(c) == [f"replica 0 on {first}", f"replica 1 on {second}"]


def test_arrays_split_on_two_axes_and_copied_on_the_third():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3)
    x = jax.device_put(np.zeros((4, 3, 6)), NamedSharding(mesh, PartitionSpec("a", None, "b")))
    d = [str(device) for device in jax.devices()]
    assert labels(x) == [f"{d[i]}, {d[i + 1]}" for i in (0, 2, 4, 6)]
    assert spans(x) == [((r, r + 2), (c, c + 3)) for r in (0, 2) for c in (0, 3)]
    assert str(dj.visualize(x)).splitlines()[1:4] == [
        "+" + "-" * (len(labels(x)[0]) + 2) + "+" + "-" * (len(labels(x)[1]) + 2) + "+",
        f"| {d[0]}, {d[1]} | {d[2]}, {d[3]} |",
        "+" + "-" * (len(labels(x)[0]) + 2) + "+" + "-" * (len(labels(x)[1]) + 2) + "+",
    ]


def test_scalars_and_mirrored_arrays_are_one_block():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    names = ", ".join(map(str, jax.devices()[:2]))
    for x in (strategy.run(lambda: jnp.float32(1)), strategy.run(lambda: jnp.ones((2, 3)))):
        assert labels(x) == [names]


def test_the_svg_is_well_formed_and_says_the_same():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = dj.Variable(jnp.zeros(3), name="<w> & co")
    for x in (w, ids(strategy)):
        picture = dj.visualize(x)
        root = ElementTree.fromstring(picture._repr_html_())
        name = "{http://www.w3.org/2000/svg}"
        texts = [node.text for node in root.iter(f"{name}text")]
        assert texts == [picture.caption, *(b.label for b in picture.blocks)]
        boxes = [node.attrib for node in root.iter(f"{name}rect")]
        assert len({box["fill"] for box in boxes}) == len(picture.blocks)
        assert max(float(b["y"]) + float(b["height"]) for b in boxes) == float(root.get("height"))


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
