"""What a process sees of values of several: its own part, or an error with the way out."""

import ast
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax._src.cluster import joining
from distjax._src.cluster.job import job
from tests.processes import groups

pytestmark = pytest.mark.multiprocess

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
ON_READ = dj.VariableSynchronization.ON_READ


@pytest.fixture
def group():
    return groups.group(2, 2)


STRATEGIES = {
    "multi_worker": lambda: dj.MultiWorkerMirroredStrategy(),
    "tpu": lambda: dj.TPUStrategy(),
    "zero3": lambda: dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
    "central": lambda: dj.CentralStorageStrategy(),
    "model": lambda: dj.MultiWorkerMirroredStrategy(model_axes={"model": 2}),
    "wide": lambda: dj.TPUStrategy(model_axes={"model": 4}),
}


def describe(name):
    strategy = STRATEGIES[name]()
    extended = strategy.extended
    return {
        "R": strategy.num_replicas_in_sync,
        "mesh": strategy.mesh.size,
        "workers": len(extended.worker_devices),
        "parameters": len(extended.parameter_devices),
        "are here": all(d.process_index == jax.process_index() for d in extended.worker_devices),
        "flags": (
            extended.between_graph,
            extended.should_init,
            extended.should_checkpoint,
            extended.should_save_summary,
        ),
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_are_of_the_job_and_devices_of_the_process(group, name):
    num_replicas = {"model": 2, "wide": 1}.get(name, 4)
    for process, found in enumerate(group.call(describe, name)):
        assert found == {
            "R": num_replicas,
            "mesh": 4,
            "workers": 2,
            "parameters": 2,
            "are here": True,
            "flags": (True, True, process == 0, process == 0),
        }


def train(name):
    """A few steps on own values; the same numbers as on one process with as many replicas."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        w = dj.Variable(jnp.arange(8.0), name="w", aggregation=SUM)
        seen = dj.Variable(0.0, name="seen", synchronization=ON_READ, aggregation=SUM)
    own = strategy.distribute_values_from_function(
        lambda ctx: np.full(8, ctx.replica_id_in_sync_group + 1, np.float32)
    )

    def step(x):
        w.assign_add(x * 0.5)
        seen.assign_add(x[0])
        return dj.get_replica_context().all_reduce("mean", x.sum())

    loss = [float(strategy.run(step, args=(own,))) for _ in range(3)][-1]
    total = strategy.reduce("sum", own)
    whole = strategy.extended.broadcast_to(w.value)
    return loss, np.asarray(whole).tolist(), float(seen.value), np.asarray(total).tolist()


@pytest.mark.api_row("several hosts")
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_give_the_numbers_of_one_process(group, name):
    count = {"model": 2, "wide": 1}.get(name, 4)
    rows = np.arange(1, count + 1)
    for loss, whole, seen, total in group.call(train, name):
        assert loss == 8 * rows.mean()
        assert whole == (np.arange(8) + 1.5 * rows.sum()).tolist()
        assert seen == 3 * rows.sum()
        assert total == [float(rows.sum())] * 8


def groups_in_use(model_axes, devices_per_host):
    """What a strategy has used when it is made, without its other groups; and a sum over them."""
    options = dj.CommunicationOptions(devices_per_host=devices_per_host)
    strategy = dj.TPUStrategy(model_axes=model_axes, communication=options)
    used = {
        frozenset(frozenset(d.id % 2048 + 2 * d.process_index for d in g) for g in groups)
        for groups in joining._used
    }
    ids = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    total = strategy.extended.reduce_to("sum", ids, destinations=None)
    return [sorted(map(sorted, groups)) for groups in used], float(total)


@pytest.mark.parametrize(
    ("model_axes", "devices_per_host", "groups", "total"),
    [(None, 2, [[0, 2], [1, 3]], 6.0), ({"model": 2}, 0, [[0, 2], [1, 3]], 1.0)],
    ids=["two levels", "model axes"],
)
def test_the_groups_of_devices_of_a_strategy_are_used_when_it_is_made(
    group, model_axes, devices_per_host, groups, total
):
    """Those that lie in one process need no connection."""
    for used, found in group.call(groups_in_use, model_axes, devices_per_host):
        assert groups in used
        assert [[0, 1], [2, 3]] not in used
        assert found == total


def look(name):
    strategy = STRATEGIES[name]()
    own = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    with strategy.scope():
        v = dj.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
    mirrored = strategy.extended.broadcast_to(np.float32(7.0))
    return {
        "own": [float(x) for x in strategy.local_results(own)],
        "tree": [float(t["x"]) for t in strategy.local_results({"x": own, "n": 3})],
        "mirrored": [float(x) for x in strategy.local_results(mirrored)],
        "component": [float(x) for x in strategy.local_results(v)],
        "text": repr(own),
        "update": strategy.extended.update(v, lambda v: 5, group=False),
    }


def test_local_results_are_of_this_process(group):
    for process, found in enumerate(group.call(look, "multi_worker")):
        own = [2.0 * process, 2.0 * process + 1]
        assert found["own"] == found["tree"] == own
        assert found["mirrored"] == [7.0, 7.0]
        assert found["component"] == [1.0, 1.0]
        assert found["update"] == [5, 5]
        lines = found["text"].splitlines()[1:-1]
        assert [line.endswith(f"<in process {1 - process}>") for line in lines] == (
            [False, False, True, True] if process == 0 else [True, True, False, False]
        )


def ask_for_what_is_elsewhere():
    strategy = dj.ShardedStrategy(partition="parameters", min_split_bytes=0)
    with strategy.scope():
        w = dj.Variable(jnp.zeros(8), name="w")
    texts = []
    with pytest.raises(dj.errors.LocalityError) as caught:
        np.asarray(w)
    texts.append(str(caught.value).splitlines()[0])
    other = next(d for d in jax.devices() if d.process_index != jax.process_index())
    with pytest.raises(dj.errors.LocalityError) as caught:
        strategy.extended.reduce_to("mean", np.float32(1.0), other)
    texts.append(str(caught.value).splitlines()[0])
    mirrored = strategy.extended.broadcast_to(np.zeros((4, 4), np.float32))
    columns = jax.sharding.NamedSharding(strategy.mesh, jax.P(None, "replica"))
    by_columns = jax.jit(lambda x: x, out_shardings=columns)(mirrored)
    with pytest.raises(dj.errors.LocalityError) as caught:
        strategy.local_results(dj.PerReplica(by_columns, strategy.extended.topology))
    texts.append(str(caught.value).splitlines()[0])
    return texts


def test_what_is_elsewhere_is_an_error(group):
    for texts in group.call(ask_for_what_is_elsewhere):
        assert texts == [
            "variable 'w' needs to be wholly on this process to be read by the host.",
            "a destination needs devices of this process, or all devices of the strategy.",
            "local_results needs the replica axis in front of a PerReplica.",
        ]


def leave_a_process_out():
    own = jax.local_devices() if job().process_id == 0 else jax.devices()[:2]
    texts = []
    for make in (dj.MultiWorkerMirroredStrategy, dj.TPUStrategy, dj.ShardedStrategy):
        with pytest.raises(ValueError) as caught:
            make(own)
        texts.append(str(caught.value).splitlines()[0])
    return texts


def test_a_list_that_leaves_a_process_out_is_refused(group):
    names = "MultiWorkerMirroredStrategy", "TPUStrategy", "ShardedStrategy"
    expected = [f"{name}: devices needs devices of each of the 2 processes." for name in names]
    assert group.call(leave_a_process_out) == [expected] * 2


def drift():
    strategy = dj.MultiWorkerMirroredStrategy()
    strategy.assert_mirrored(strategy.extended.broadcast_to({"w": np.ones(3)}))
    copies = [jax.device_put(np.float32(job().process_id), d) for d in jax.local_devices()]
    sharding = strategy.extended.topology.mirrored
    drifted = jax.make_array_from_single_device_arrays((), sharding, copies)
    with pytest.raises(dj.errors.LocalityError) as caught:
        strategy.assert_mirrored({"w": drifted})
    return str(caught.value).splitlines()[0]


def nans():
    """Returns whether NaNs of other bits on each process count as equal."""
    strategy = dj.MultiWorkerMirroredStrategy()
    value = np.array([np.nan, 1], np.float32)
    value.view(np.uint32)[0] += job().process_id
    copies = [jax.device_put(value, d) for d in jax.local_devices()]
    sharding = strategy.extended.topology.mirrored
    array = jax.make_array_from_single_device_arrays((2,), sharding, copies)
    strategy.assert_mirrored(array)
    return int(np.asarray(array.addressable_data(0)).view(np.uint32)[0])


def test_any_two_nans_are_equal_over_processes(group):
    first, second = group.call(nans)
    assert second == first + 1


def first_component():
    strategy = dj.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = dj.Variable(5.0, synchronization=ON_READ)
    strategy.run(lambda: v.assign_add(dj.get_replica_context().replica_id_in_sync_group + 1.0))
    first = strategy.first(v)
    strategy.assert_mirrored(first)
    return float(first), [float(x) for x in strategy.local_results(v)]


def test_the_first_component_is_replica_0s_on_every_process(group):
    assert group.call(first_component) == [(6.0, [6.0, 7.0]), (6.0, [8.0, 9.0])]


def test_copies_are_compared_over_processes(group):
    first, second = group.call(drift)
    assert first == second
    assert first.startswith("the value['w'] needs to be equal on every replica, and process 1 on ")


def hold_on_one_process():
    """What a process holds of a variable is copied before the next step donates it."""
    strategy = dj.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = dj.Variable(0.0, aggregation=SUM)
    held = []
    for _ in range(3):
        if job().process_id == 1:
            held.append(v.value)
        strategy.run(lambda: v.assign_add(jnp.ones(())))
    return [float(x) for x in held], float(v.value)


def test_a_value_that_one_process_holds_stays(group):
    assert group.call(hold_on_one_process) == [([], 12.0), ([0.0, 4.0, 8.0], 12.0)]


# -- what errors advise ------------------------------------------------------------


def advised():
    """Errors of what spans processes, and what their fixes give: code that works to the letter."""
    strategy = dj.MultiWorkerMirroredStrategy()
    me = float(job().process_id)
    x = strategy.distribute_values_from_function(lambda ctx: np.full(2, me, np.float32))
    with dj.ShardedStrategy(partition="parameters", min_split_bytes=0).scope() as split:
        v = dj.Variable(np.ones((4, 4), np.float32), name="v")
    failing = {
        "np.asarray": lambda: np.asarray(x),
        "tolist": lambda: x.tolist(),
        "pickle": lambda: pickle.dumps(x),
        "pickle of a variable": lambda: pickle.dumps(v),
        "SUM": lambda: strategy.reduce("sum", me),
    }
    said = {}
    for name, call in failing.items():
        with pytest.raises(Exception) as caught:
            call()
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
    here = strategy.local_results(x)
    number = lambda ctx: me / len(strategy.extended.worker_devices)
    total = strategy.reduce("sum", strategy.distribute_values_from_function(number))
    whole = jax.device_get(split.extended.broadcast_to(v.value))
    worked = [
        [part.tolist() for part in pickle.loads(pickle.dumps(here))],
        np.asarray(strategy.gather(x, axis=0)).tolist(),
        np.asarray(strategy.reduce("mean", x)).tolist(),
        float(total),
        pickle.loads(pickle.dumps(whole)).sum().item(),
    ]
    return said, worked


def test_what_errors_advise_works_over_processes(group):
    for me, (said, worked) in enumerate(group.call(advised)):
        assert "Fix: strategy.local_results(x), the values of this process; " in said["np.asarray"]
        assert "x.stacked" not in said["np.asarray"] + said["tolist"]
        assert "strategy.local_results(x), the values of this process" in said["tolist"]
        assert said["pickle"] == (
            "LocalityError: a PerReplica needs to stay in its process.\n"
            "  Got: pickle of 4 values of shape (2,).\n"
            "  Why: its replicas are on the devices of a strategy, which belong to this process.\n"
            "  Fix: pickle strategy.local_results(x), the values of this process, and stack them "
            "there: strategy.per_replica(np.stack(values)); or "
            "dj.checkpoint.Checkpointer(directory)"
        )
        assert "broadcast(v.value)), read on every process" in said["pickle of a variable"]
        assert (
            "strategy.distribute_values_from_function(lambda ctx: x / "
            "len(strategy.extended.worker_devices))"
        ) in said["SUM"]
        rows = [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
        flat = [x for row in rows for x in row]
        assert worked == [rows[2 * me : 2 * me + 2], flat, [0.5, 0.5], 1.0, 16.0]


# -- doors ---------------------------------------------------------------------

ROOT = pathlib.Path(dj.__file__).parent / "_src"

#: Where `jax.device_put` may stand: the doors, and a move between the memories of one array.
DOORS = {"placement/transfer.py", "flax/graphs.py"}


def test_values_of_the_host_go_to_devices_by_one_door():
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "device_put":
                found.add(path.relative_to(ROOT).as_posix())
    assert found == DOORS


# -- what is split within a replica, or padded -------------------------------------------------

SPLIT = {
    "replicas in a process": lambda: dj.MultiWorkerMirroredStrategy(model_axes={"model": 2}),
    "a replica over both": lambda: dj.TPUStrategy(model_axes={"model": 4}),
    "zero3, 2 x 2": lambda: dj.ShardedStrategy(
        partition="parameters", min_split_bytes=0, model_axes={"model": 2}
    ),
    "zero3, padded": lambda: dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
}


def train_split(name, directory=None):
    """Two steps, a checkpoint and its restoration, and a third: the losses, and the variables."""
    strategy = SPLIT[name]() if name else dj.OneDeviceStrategy()
    with strategy.scope():
        start = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
        up = dj.Variable(start, name="up", sharding=P(None, "model"))
        down = dj.Variable(lambda: jnp.ones((8, 3)), name="down")
        odd = dj.Variable(np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), name="odd")
    optimizer = dj.optim.Optimizer(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), "mean"
    )
    params = [up, down, odd]
    optimizer.init(params)
    data = np.linspace(0, 1, 48, dtype=np.float32).reshape(8, 6)

    def step(x):
        loss = lambda up, down, odd: jnp.mean((jnp.tanh(x @ up) @ down @ odd - 1) ** 2)
        value, grads = jax.value_and_grad(loss, (0, 1, 2))(*[v.value for v in params])
        optimizer.apply_gradients(zip(grads, params, strict=True))
        return dj.get_replica_context().all_reduce("mean", value)

    count = strategy.num_replicas_in_sync
    rows = strategy.distribute_values_from_function(
        lambda ctx: data.reshape(count, -1, 6)[ctx.replica_id_in_sync_group]
    )
    losses = [float(strategy.run(step, (rows,))) for _ in range(2)]
    if directory is not None:
        with dj.checkpoint.Checkpointer(directory) as checkpointer:
            checkpointer.save(1, {"params": params, "optimizer": optimizer})
            strategy.run(step, (rows,))
            checkpointer.restore({"params": params, "optimizer": optimizer})
    losses.append(float(strategy.run(step, (rows,))))
    values = [np.asarray(strategy.extended.broadcast_to(v.value)).tolist() for v in params]
    return losses, values, up.storage.addressable_shards[0].data.shape


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split_gives_the_numbers_of_one_process(group, name, tmp_path):
    losses, values, _ = train_split(None)
    shapes = {"replicas in a process": (6, 4), "a replica over both": (6, 2)}
    shapes |= {"zero3, 2 x 2": (3, 4), "zero3, padded": (6, 2)}
    for found, own, shape in group.call(train_split, name, str(tmp_path)):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for value, expected in zip(own, values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
        assert shape == shapes[name]
    files = epath.Path(tmp_path) / "1" / "values"
    saved = ocp.PyTreeCheckpointHandler().metadata(files).tree
    assert saved["params/2"].shape == (3, 5), "no padding is in the files"
