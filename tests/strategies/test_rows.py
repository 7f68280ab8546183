"""Arrays [R, ...] taken in and given back, and those that are refused: per_replica, first, jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import distjax as dj
from distjax._src.placement.rows import is_split_over_replicas
from distjax.errors import LocalityError
from tests.replicas import counted, ids, local

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


# -- per_replica ----------------------------------------------------------------------


def test_each_row_is_the_value_of_a_replica(strategy):
    count = strategy.num_replicas_in_sync
    rows = np.arange(3.0 * count, dtype=np.float32).reshape(count, 3)
    tree = strategy.per_replica({"x": rows, "n": 3, "none": None, "name": "x"})
    assert tree["n"] == 3 and tree["none"] is None and tree["name"] == "x"
    assert local(strategy, strategy.run(lambda x: 2 * x, args=(tree["x"],))) == (2 * rows).tolist()


def test_rows_are_not_compared(pair):
    """Values never decide how a step is compiled: equal rows are T, as others are."""
    assert dj.is_per_replica(pair.per_replica(np.ones((2, 3))))
    step = counted(lambda x: x + 1)
    for rows in (ROWS, np.ones((2, 3), np.float32), ROWS):
        assert dj.is_per_replica(pair.run(step, args=(pair.per_replica(rows),)))
    assert step.calls == 1


@pytest.mark.parametrize("count", [1, 2])
def test_rows_already_on_the_replicas_are_copied(count):
    own = dj.MirroredStrategy(jax.devices()[:count])
    of_pmap = jax.pmap(lambda x: x + 1, devices=jax.devices()[:count])(ROWS[:count])
    for rows in (of_pmap, own.per_replica(ROWS[:count]), jnp.asarray(ROWS[:count])):
        rows = rows.stacked if dj.is_per_replica(rows) else rows
        before = np.asarray(rows)
        taken = own.per_replica(rows)
        own.jit(lambda x: x + 1, donate_argnums=0)(taken)
        assert taken.stacked.is_deleted()
        assert np.array_equal(np.array(rows), before) and not rows.is_deleted()


def test_in_a_trace(pair):
    out = dj.jit(lambda rows: pair.per_replica(rows))(ROWS)
    assert dj.is_per_replica(out) and local(pair, out) == ROWS.tolist()
    total = dj.jit(lambda rows: pair.reduce("sum", pair.per_replica(rows)))(ROWS)
    assert total.tolist() == ROWS.sum(0).tolist()


def test_what_is_per_replica_stays_so(pair):
    x = pair.per_replica(ROWS)
    assert pair.per_replica({"x": x})["x"] is x
    with pytest.raises(LocalityError, match=r"^per_replica: the value\['x'\] needs a PerR"):
        dj.VirtualStrategy(3).per_replica({"x": x})


@pytest.mark.parametrize("rows", [np.ones((3, 2), np.float32), np.float32(1)])
def test_an_array_without_a_row_per_replica(pair, rows):
    with pytest.raises(LocalityError) as info:
        pair.per_replica({"x": rows})
    assert str(info.value) == (
        "per_replica: the value['x'] needs a leading dimension of 2, a row per replica.\n"
        f"  Got: {type(rows).__name__} of shape {rows.shape} and dtype float32.\n"
        "  Why: row r is the value of replica r, as jax_utils.replicate and pmap stack them.\n"
        "  Fix: pass trees without that dimension to run as they are"
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_values_is_to_be_stacked(pair, kind):
    with pytest.raises(LocalityError) as info:
        pair.per_replica(kind([jnp.ones(3)] * 2))
    assert str(info.value).splitlines()[-1] == (
        "  Fix: strategy.per_replica(jnp.stack(values)) for a list of R values"
    )


def test_numbers_are_no_rows(pair):
    with pytest.raises(LocalityError) as info:
        pair.per_replica([1.0, 2.0])
    assert str(info.value) == (
        "per_replica needs arrays [R, ...], a row per replica.\n"
        "  Got: a tree without any array: list ([1.0, 2.0]).\n"
        "  Why: a list of R numbers is R values, which all replicas share.\n"
        "  Fix: strategy.per_replica(np.array([1.0, 2.0]))"
    )
    assert pair.per_replica(()) == ()


# -- first ----------------------------------------------------------------------------


def test_first_is_what_the_first_replica_holds(strategy, how):
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0), aggregation=dj.VariableAggregation.MEAN)
    step = lambda: (dj.get_replica_context().replica_id_in_sync_group + 5, v.value)
    found = how(lambda: strategy.first(strategy.run(step)))()
    assert int(found[0]) == 5 and found[1].tolist() == [0, 1, 2]
    assert strategy.first(v).tolist() == [0, 1, 2]
    assert strategy.first({"n": 3, "x": np.ones(2)})["n"] == 3


def test_first_is_on_every_replica(pair):
    first = pair.first({"x": pair.per_replica(ROWS), "same": pair.run(lambda: jnp.ones(2))})
    assert first["x"].tolist() == [0, 1, 2] and first["same"].shape == (2,)
    pair.assert_mirrored(first)
    assert pair.run(lambda x: 2 * x, args=(first["x"],)).tolist() == [0, 2, 4]
    with pytest.raises(LocalityError, match=r"^first: the value needs a PerReplica over 3"):
        dj.VirtualStrategy(3).first(pair.per_replica(ROWS))


def test_first_of_components_is_on_every_replica(pair, how):
    on_read = dj.VariableSynchronization.ON_READ
    with pair.scope():
        v = dj.Variable(5.0, synchronization=on_read)
    pair.run(lambda: v.assign_add(1.0 + dj.get_replica_context().replica_id_in_sync_group))
    first = how(lambda: pair.first({"v": v})["v"])()
    pair.assert_mirrored(first)
    assert float(first + pair.extended.broadcast_to(1.0)) == 7.0
    assert local(pair, pair.run(lambda: pair.first(v))) == [6.0, 7.0]  # each its own


def test_first_of_what_came_from_pmap(mirrored):
    rows = jax.pmap(lambda x: x + 1, devices=jax.devices()[:2])(ROWS)
    assert mirrored.first(rows).tolist() == [1, 2, 3]
    assert mirrored.first(mirrored.per_replica(rows)).tolist() == [1, 2, 3]
    split = jax.device_put(np.ones((4, 3)), mirrored.extended.topology.per_replica)
    with pytest.raises(LocalityError, match=r"^first: the value needs a leading dimension of 2"):
        mirrored.first(split)


# -- bare arrays that are split over the replicas ----------------------------------------


def as_pmap(strategy, rows):
    return jax.pmap(lambda x: x, devices=jax.devices()[:2])(rows)


def as_stacked(strategy, rows):
    return strategy.per_replica(rows).stacked


def as_own_mesh(strategy, rows):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(None, "data")))


SPLIT = {"pmap": as_pmap, "stacked": as_stacked, "of another mesh": as_own_mesh}


@pytest.fixture(params=SPLIT)
def split(request, mirrored):
    """A bare array whose parts lie on the replicas of `mirrored`."""
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    return SPLIT[request.param](mirrored, rows)


def text(where):
    return (
        f"{where} needs to be a PerReplica, or one value that each replica holds.\n"
        "  Got: an array that is split over the 2 replicas: jax.Array float32[2, 2].\n"
        "  Why: its rows may be values of the replicas, as after pmap, or copies of one value, or "
        "all of it may be one value.\n"
        "  Fix: strategy.per_replica(x) if row r is the value of replica r; strategy.first(x) if "
        "the rows are equal; strategy.broadcast(x) if all of it is one value"
    )


def step(batch, scale=1):
    return jax.tree.map(lambda x: x * scale, batch)


def test_run_refuses_it(mirrored, split):
    with pytest.raises(LocalityError) as info:
        mirrored.run(step, args=({"x": split},))
    assert str(info.value) == text("argument batch['x'] of step")
    with pytest.raises(LocalityError) as info:
        mirrored.jit(step, donate_argnums=0)({"x": split})
    assert str(info.value) == text("argument batch['x'] of step") and not split.is_deleted()
    with pytest.raises(LocalityError) as info:
        mirrored.run(step, args=(1.0,), kwargs={"scale": split})
    assert str(info.value) == text("argument scale of step")


@pytest.mark.parametrize("method", ["sum", "mean", "mask", "gather"])
def test_reduce_and_gather_refuse_it(mirrored, split, method):
    role = {"mask": "the mask", "gather": "the value to gather"}.get(method, "the value to reduce")
    with pytest.raises(LocalityError) as info:
        if method == "gather":
            mirrored.gather([split], axis=0)
        elif method == "mask":
            mirrored.reduce("mean", mirrored.per_replica(ROWS), axis=0, mask=split)
        else:
            mirrored.reduce(method, {"x": split})
    assert str(info.value) == text(role)


def test_the_ways_out(mirrored, split):
    rows = np.asarray(split)
    double = lambda x: 2 * x
    assert local(mirrored, mirrored.run(double, args=(mirrored.per_replica(split),))) == (
        (2 * rows).tolist()
    )
    whole = mirrored.run(double, args=(mirrored.extended.broadcast_to(split),))
    assert whole.tolist() == (2 * rows).tolist()
    first = mirrored.run(double, args=(mirrored.first(split),))
    assert first.tolist() == (2 * rows[0]).tolist()


def test_a_refused_call_wrote_nothing(mirrored):
    with mirrored.scope():
        v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        v.assign_add(x.sum())
        return 2 * x

    mirrored.run(step, args=(mirrored.per_replica(ROWS),))
    before = float(v.value)
    for _ in range(2):
        with pytest.raises(LocalityError, match="^argument x of .*step needs to be a"):
            mirrored.run(step, args=(mirrored.per_replica(ROWS).stacked,))
    assert float(v.value) == before


def test_what_is_not_split_over_the_replicas():
    two_each = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    place = lambda *names: jax.device_put(ROWS, NamedSharding(two_each.mesh, PartitionSpec(*names)))
    topology = two_each.extended.topology
    assert is_split_over_replicas(place("replica"), topology)
    assert not is_split_over_replicas(place("model"), topology)
    assert not is_split_over_replicas(place(), topology)
    elsewhere = jax.device_put(ROWS, jax.devices()[7])
    for value in (ROWS, 1.0, elsewhere, jnp.asarray(ROWS)):
        assert not is_split_over_replicas(value, topology)
    alone = dj.MirroredStrategy(jax.devices()[:1])
    assert not is_split_over_replicas(alone.per_replica(ROWS[:1]).stacked, alone.extended.topology)


# -- jit ---------------------------------------------------------------------------------


def test_jit_is_a_function_of_replicas(strategy):
    @strategy.jit
    def total(x, scale=1):
        """Sums."""
        return dj.get_replica_context().all_reduce("sum", scale * x)

    assert total.__name__ == "total" and total.__doc__ == "Sums."
    count = strategy.num_replicas_in_sync
    assert float(total(jnp.float32(2))) == 2 * count
    assert float(total(ids(strategy), scale=3)) == 3 * sum(range(count))


def test_jit_donates(mirrored):
    train = counted(lambda w, x: w - jax.lax.pmean(x, "replica"))
    step = mirrored.jit(train, donate_argnums=0)
    w, x = mirrored.extended.broadcast_to(np.ones(3, np.float32)), mirrored.per_replica(ROWS)
    for _ in range(3):
        before, w = w, step(w, x)
        assert before.is_deleted()
    assert train.calls == 1
    np.testing.assert_allclose(w, 1 - 3 * ROWS.mean(0))


def test_jit_of_no_function(pair):
    with pytest.raises(TypeError, match="^jit needs a function"):
        pair.jit(3)
    with pytest.raises(ValueError, match="^jit: donate_argnums needs numbers"):
        pair.jit(lambda x: x, donate_argnums="x")
