"""Cases r269 to r281 of tf.distribute: what a checkpoint makes of each kind of variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

ON_READ = dj.VariableSynchronization.ON_READ
ON_WRITE = dj.VariableSynchronization.ON_WRITE
SUM, MEAN, FIRST, NONE = (
    dj.VariableAggregation[name] for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
)


def make(strategy, value, synchronization=ON_WRITE, aggregation=NONE):
    with strategy.scope():
        return dj.Variable(value, synchronization=synchronization, aggregation=aggregation)


def set_components(strategy, variable, start):
    """Component r gets start + r."""

    def write():
        replica = dj.get_replica_context().replica_id_in_sync_group
        variable.assign(jnp.asarray(start + replica, variable.dtype))

    strategy.run(write)


def components(variable):
    return [np.asarray(x).tolist() for x in variable.local_results()]


MODES = [
    (synchronization, aggregation)
    for synchronization in (ON_WRITE, ON_READ)
    for aggregation in (NONE, SUM, MEAN, FIRST)
    if (synchronization, aggregation)
    != (ON_READ, NONE)  # no one value: test_checkpoint_refusals.py
]


@pytest.mark.parametrize("modes", MODES, ids=lambda modes: f"{modes[0].name}_{modes[1].name}")
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_r269_a_variable_reads_back_what_was_saved(num_replicas, modes, checkpointer):
    v = make(dj.VirtualStrategy(num_replicas), jnp.array([1.0, 2.0, 3.0, 4.0]), *modes)
    v.assign([1.0, 2.0, 3.0, 4.0])  # the initial value of a SUM is that of each component
    checkpointer.save(1, {"v": v})
    v.assign([4.0, 3.0, 2.0, 1.0])
    checkpointer.restore({"v": v})
    np.testing.assert_allclose(v.value, [1.0, 2.0, 3.0, 4.0], rtol=1e-6)


def test_r271_mirrored_variables_and_plain_ones_move_both_ways(mirrored, checkpointer):
    of_mirrored, plain = make(mirrored, 3.0), dj.Variable(0.0)
    checkpointer.save(1, {"v": of_mirrored})
    checkpointer.restore({"v": plain})
    assert float(plain.value) == 3.0
    of_mirrored.assign(0.0)
    checkpointer.save(2, {"v": plain})
    checkpointer.restore({"v": of_mirrored})
    assert components(of_mirrored) == [3.0, 3.0]


def test_r273_on_read_mean_is_saved_as_the_mean(mirrored, checkpointer):
    v = make(mirrored, 0.0, ON_READ, MEAN)
    set_components(mirrored, v, 3.0)
    checkpointer.save(1, {"v": v})
    v.assign(0.0)
    checkpointer.restore({"v": v})
    assert components(v) == [3.5, 3.5]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(SUM, [1.75, 1.75]), (MEAN, [3.5, 3.5])], ids=["SUM", "MEAN"]
)
def test_r275_a_plain_value_is_restored_to_components(
    aggregation, expected, mirrored, checkpointer
):
    checkpointer.save(1, {"v": dj.Variable(3.5)})
    v = make(mirrored, 0.0, ON_READ, aggregation)
    checkpointer.restore({"v": v})
    assert components(v) == expected


def test_r277_on_read_mean_moves_to_plain_and_back(mirrored, checkpointer):
    v, plain = make(mirrored, 0.0, ON_READ, MEAN), dj.Variable(0.0)
    set_components(mirrored, v, 3.0)
    checkpointer.save(1, {"v": v})
    checkpointer.restore({"v": plain})
    assert float(plain.value) == 3.5
    v.assign(0.0)
    checkpointer.restore({"v": v})
    assert float(v.value) == 3.5
    checkpointer.save(2, {"v": dj.Variable(2.0)})
    checkpointer.restore({"v": v})
    assert float(v.value) == 2.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(SUM, [1.75] * 4), (MEAN, [3.5] * 4), (FIRST, [3.0] * 4)],
    ids=["SUM", "MEAN", "FIRST"],
)
def test_r279_from_two_replicas_to_four(aggregation, expected, mirrored, checkpointer):
    two = make(mirrored, 0.0, ON_READ, aggregation)
    set_components(mirrored, two, 3.0)
    checkpointer.save(1, {"v": two})
    four = make(dj.MirroredStrategy(jax.devices()[:4]), 0.0, ON_READ, aggregation)
    checkpointer.restore({"v": four})
    assert components(four) == expected


def test_r279_without_an_aggregation_save_is_a_value_error(mirrored, checkpointer):
    v = make(mirrored, 0.0, ON_READ, NONE)
    with pytest.raises(ValueError, match="^save of variable 'Variable' needs an aggregation"):
        checkpointer.save(1, {"v": v})
    assert checkpointer.latest_step() is None


def test_r281_a_restore_is_requested_before_the_variable_exists(mirrored, checkpointer):
    checkpointer.save(1, {"v": dj.Variable(5.0), "total": dj.Variable(6.0)})
    later = checkpointer.delayed()
    v = make(mirrored, 0.0)
    later.restore({"v": v})
    assert (float(v.value), later.remaining) == (5.0, ("total",))
    v.assign(1.0)
    total = make(mirrored, 0.0, ON_READ, SUM)
    later.restore({"v": v, "total": total})
    assert float(v.value) == 1.0, "what has had its value is not restored again"
    assert components(total) == [3.0, 3.0]
    later.require_all()


def test_integer_sums_are_restored_without_loss(checkpointer):
    """Decision 12: the remainder goes to the first replicas."""
    seven = dj.Variable(jnp.int32(7))
    checkpointer.save(1, {"v": seven})
    v = make(dj.VirtualStrategy(4), jnp.int32(0), ON_READ, SUM)
    checkpointer.restore({"v": v})
    assert components(v) == [2, 2, 2, 1]
    assert int(v.value) == 7
