"""strategy.describe(): devices, replicas, variables and their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj

SUM = dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ

#: placement and bytes per device of float32[16, 4] and of a sync-on-read scalar.
WHOLE = 16 * 4 * 4
PLACES = {
    "mirrored1": (lambda: dj.MirroredStrategy(jax.devices()[:1]), "mirrored", WHOLE, 4),
    "mirrored8": (lambda: dj.MirroredStrategy(jax.devices()), "mirrored", WHOLE, 4),
    "virtual8": (lambda: dj.VirtualStrategy(8), "mirrored", WHOLE, 8 * 4),
    "one_device": (lambda: dj.OneDeviceStrategy(), "mirrored", WHOLE, 4),
    "zero1": (
        lambda: dj.ShardedStrategy(partition="optimizer", min_split_bytes=0),
        "mirrored",
        WHOLE,
        4,
    ),
    "zero3": (
        lambda: dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
        "partitioned on axis 0",
        WHOLE // 8,
        4,
    ),
    "central": (lambda: dj.CentralStorageStrategy(), "host memory", 0, 4),
}


def made(name):
    make, *expected = PLACES[name]
    strategy = make()
    with strategy.scope():
        w = dj.Variable(jnp.ones((16, 4)), name="w", aggregation=SUM)
        c = dj.Variable(0.0, name="c", synchronization=ON_READ, aggregation=SUM)
    return strategy, (w, c), expected


@pytest.mark.parametrize("name", PLACES)
def test_places_and_bytes(name):
    strategy, variables, (placement, w_bytes, c_bytes) = made(name)
    found = strategy.describe()
    assert found.num_replicas == strategy.num_replicas_in_sync
    assert found.devices == tuple(map(str, strategy.extended.topology.devices))
    w, c = found.variables
    assert (w.name, w.shape, w.dtype, w.trainable) == ("w", (16, 4), "float32", True)
    assert (w.synchronization, w.aggregation) == ("ON_WRITE", "SUM")
    assert (w.placement, w.bytes_per_device) == (placement, w_bytes)
    assert w.host_bytes == (WHOLE if name == "central" else 0)
    on_read = "mirrored" if name == "one_device" else "per replica"
    assert (c.synchronization, c.trainable) == ("ON_READ", False)
    assert (c.placement, c.bytes_per_device) == (on_read, c_bytes)
    assert found.bytes_per_device == w_bytes + c_bytes
    assert len(variables) == 2


@pytest.mark.parametrize("name", PLACES)
def test_bytes_are_those_of_the_arrays(name):
    strategy, variables, _ = made(name)
    for variable, described in zip(variables, strategy.describe().variables, strict=True):
        shards = variable.storage.addressable_shards
        if described.host_bytes:
            assert sum(s.data.nbytes for s in shards) == described.host_bytes
        else:
            assert {s.data.nbytes for s in shards} == {described.bytes_per_device}


def test_variables_come_in_order_and_go_when_collected(collect_garbage):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        kept = [dj.Variable(float(i), name=f"v{i}") for i in range(20)]
    assert [v.name for v in strategy.describe().variables] == [f"v{i}" for i in range(20)]
    strategy.run(lambda: kept[3].value)
    del kept[::2]
    collect_garbage()
    assert [v.name for v in strategy.describe().variables] == [f"v{i}" for i in range(1, 20, 2)]


def test_keys_empty_arrays_and_model_axes():
    strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    with strategy.scope():
        key, empty = dj.Variable(jax.random.key(0)), dj.Variable(np.zeros((0, 3), np.float32))
    found = strategy.describe()
    assert (found.num_replicas, found.devices_per_replica) == (2, 2)
    sizes = jax.random.key_data(jax.random.key(0)).nbytes
    assert [v.bytes_per_device for v in found.variables] == [sizes, 0]
    assert key.shape == () and empty.shape == (0, 3)


def test_the_default_strategy_describes_its_variables():
    v = dj.Variable(np.ones(3, np.float32), name="of nobody")
    found = dj.get_strategy().describe()
    assert [d.bytes_per_device for d in found.variables if d.name == v.name] == [12]


def test_text_and_page():
    strategy, variables, _ = made("central")
    text, page = str(strategy.describe()), strategy.describe()._repr_html_()
    assert text.splitlines()[0] == repr(strategy)
    rows = [line.split() for line in text.splitlines()]
    assert ["variables", "2"] in rows
    assert ["bytes", "in", "host", "memory", "256", "B"] in rows
    assert ["w", "[16,", "4]", "float32", "ON_WRITE", "SUM", "host"] == rows[-2][:7]
    for part in ("host memory", "256 B", "ON_READ", "bytes on host"):
        assert part in page and part in text
    assert page.count("<table>") == 2 and len(variables) == 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_strategy_with_servers_names_the_devices_of_each_worker(size):
    names = list(map(str, jax.devices()))
    workers = [jax.devices()[i * size : (i + 1) * size] for i in range(3)]
    strategy = dj.ParameterServerStrategy(workers, servers=2)
    with strategy.scope():
        w = dj.Variable(jnp.ones((16, 4)), name="w")
    found = strategy.describe()
    assert found.workers == tuple(tuple(names[i * size : (i + 1) * size]) for i in range(3))
    assert found.devices == tuple(names[: 3 * size])
    assert (found.num_replicas, found.devices_per_replica) == (size, 1)
    assert [(v.name, v.placement) for v in found.variables] == [(w.name, "at server 0")]
    rows = [" ".join(line.split()) for line in str(found).splitlines()]
    assert rows[1] == f"replicas of each worker {size}"
    for i in range(3):
        own = ", ".join(found.workers[i])
        assert rows[2 + i] == f"devices of worker {i} {size}, one for each replica: {own}"


def test_virtual_replicas_share_a_device():
    assert "1, shared by all replicas" in str(dj.VirtualStrategy(3).describe())


def test_many_variables_fit_a_screen_and_can_be_looked_for():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        kept = [
            dj.Variable(jnp.zeros((2, 3)), name=f"model.layers.{i}.{part}.kernel")
            for i in range(12)
            for part in ("query", "key", "value", "out")
        ]
        kept.append(dj.Variable(jnp.zeros(5), name="steps", trainable=False))
    lines = str(strategy.describe()).splitlines()
    assert "  model.layers.*.key.kernel (12)    [2, 3]  float32" in "\n".join(lines)
    assert sum(line.startswith("  model.layers") for line in lines) == 4
    assert [line.split()[-2] for line in lines if line.startswith("    of ")] == ["1.1", "20"]
    with strategy.scope():
        kept += [
            dj.Variable(0.0, name=f"other/{i}/{j}/{c}") for i in "ab" for j in "cd" for c in "ef"
        ]
        kept += [dj.Variable(0.0, name=f"more/x{i}") for i in range(40)]
    text = str(strategy.describe())
    assert "  more... (40) " in text and "  model... (48) " in text and "  other... (8) " in text
    assert str(strategy.describe(full=True)).count("  other/a/") == 4
    found = strategy.describe("layers.3.").variables
    assert [v.name.split(".")[3] for v in found] == ["query", "key", "value", "out"]


def test_totals_by_kind_and_over_all_devices():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = dj.Variable(jnp.zeros(4), name="w")
        seen = dj.Variable(jnp.zeros(2), name="seen", trainable=False)
    optimizer = dj.optim.Optimizer(optax.sgd(0.1, momentum=0.9), reduce_op="mean")
    optimizer.init([w])
    found = " ".join(str(strategy.describe()).split())
    assert "bytes per device 40 B of parameters 16 B of optimizer state 16 B of other" in found
    assert "of other state 8 B bytes on all devices 80 B" in found, seen


def test_a_strategy_without_variables_says_how_a_module_gets_there():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    rows = [" ".join(line.split()) for line in str(strategy.describe()).splitlines()]
    assert "variables 0; Flax modules come with their first run, or dj.flax.place(module)" in rows
    with pytest.raises(TypeError) as error:
        strategy.describe(model)
    lines = str(error.value).splitlines()
    assert lines[0] == "describe needs a part of the names of variables."
    assert lines[1].startswith("  Got: Linear")
    assert lines[2:] == [
        "  Why: it lists the variables that the strategy has placed, of all models.",
        "  Fix: with strategy.scope(): dj.flax.place(model), before its first run, and then "
        "strategy.describe('Linear')",
    ]
    with strategy.scope():
        dj.flax.place(model)
    assert {v.name for v in strategy.describe("Linear").variables} == {
        "Linear.bias",
        "Linear.kernel",
    }
