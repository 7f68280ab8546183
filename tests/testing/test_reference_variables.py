"""Variables of the reference interpreter, and updates of them."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import (
    AggregationError,
    ContextError,
    LocalityError,
    StrategyMismatchError,
    UnsupportedError,
)
from tests.testing.on_reference import context, local, rid, variable

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST, NONE = dj.VariableAggregation.ONLY_FIRST_REPLICA, dj.VariableAggregation.NONE
ON_READ, ON_WRITE = dj.VariableSynchronization.ON_READ, dj.VariableSynchronization.ON_WRITE


@pytest.fixture
def strategy():
    """Two replicas."""
    return dj.testing.ReferenceStrategy(2)


def parts(v):
    return [np.asarray(x).tolist() for x in v.local_results()]


# -- variables: the table of writes, start value 10 ----------------------------

WRITES = {  # (array r + 1, Python 4.0) in replicas, 4.0 across; assign and assign_add
    (ON_WRITE, NONE): [
        AggregationError,
        AggregationError,
        [4, 4],
        *[AggregationError] * 2,
        [14, 14],
    ],
    (ON_WRITE, SUM): [[3, 3], ValueError, [4, 4], [13, 13], ValueError, [14, 14]],
    (ON_WRITE, MEAN): [[1.5, 1.5], [4, 4], [4, 4], [11.5, 11.5], [14, 14], [14, 14]],
    (ON_WRITE, FIRST): [[1, 1], [4, 4], [4, 4], [11, 11], [14, 14], [14, 14]],
    (ON_READ, NONE): [[1, 2], [4, 4], AggregationError, [11, 12], [14, 14], AggregationError],
    (ON_READ, SUM): [[1, 2], [4, 4], [2, 2], [11, 12], [14, 14], AggregationError],
    (ON_READ, MEAN): [[1, 2], [4, 4], [4, 4], [11, 12], [14, 14], [14, 14]],
    (ON_READ, FIRST): [[1, 2], [4, 4], [4, 4], [11, 12], [14, 14], [14, 14]],
}
CALLS = [
    lambda s, write: s.run(lambda: write(jnp.float32(1 + context().number))),
    lambda s, write: s.run(lambda: write(4.0)),
    lambda s, write: write(4.0),
]


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("modes", list(WRITES), ids=lambda m: f"{m[0].name}-{m[1].name}")
def test_writes(strategy, modes, column):
    v = variable(strategy, synchronization=modes[0], aggregation=modes[1])
    write = v.assign if column < 3 else v.assign_add
    expected = WRITES[modes][column]
    if isinstance(expected, list):
        CALLS[column % 3](strategy, write)
        assert parts(v) == expected
    else:
        with pytest.raises(expected):
            CALLS[column % 3](strategy, write)
        assert parts(v) == [10, 10]


def test_the_texts_of_refused_writes_and_reads(strategy):
    modes = {"synchronization": ON_READ}
    bare, each = variable(strategy), variable(strategy, **modes)
    total = variable(strategy, aggregation=SUM)
    with pytest.raises(AggregationError, match="You must specify an aggregation method to update"):
        strategy.run(lambda: bare.assign(jnp.float32(1)))
    with pytest.raises(ValueError, match="aggregation SUM needs an array"):
        strategy.run(lambda: total.assign(1.0))
    with pytest.raises(AggregationError, match="a read of sync-on-read variable 'v'"):
        _ = each.value
    with pytest.raises(LocalityError, match="assign of variable 'v' needs one value"):
        bare.assign(strategy.distribute_values_from_function(lambda ctx: 1.0))
    with pytest.raises(TypeError, match="needs a value of dtype float32"):
        bare.assign("1")
    with pytest.raises(TypeError, match="needs a value of dtype int32"):
        variable(strategy, 1).assign(1.5)
    with pytest.raises(ValueError, match=r"needs shape \(\)"):
        bare.assign(np.ones(2))
    with pytest.raises(ValueError, match="assign of variable 'v' needs an array without a mask"):
        bare.assign(np.ma.masked_array(1.0, True))
    with pytest.raises(OverflowError, match="assign_add of variable 'v' needs values that int8"):
        variable(strategy, jnp.int8(1)).assign_add(300)
    with pytest.raises(TypeError, match="assign_add of variable 'v' needs a dtype that has sums"):
        variable(strategy, True).assign_add(True)
    with pytest.raises(StrategyMismatchError, match="read of ReferenceStrategy"):
        dj.VirtualStrategy(2).run(lambda: bare.value)


def test_the_texts_of_refused_variables(strategy):
    with pytest.raises(ValueError, match="`NONE` variable synchronization mode is not supported"):
        variable(strategy, synchronization=dj.VariableSynchronization.NONE)
    with pytest.raises(ValueError, match="needs a floating dtype for aggregation MEAN"):
        variable(strategy, 1, aggregation=MEAN)
    own = strategy.distribute_values_from_function(lambda ctx: 1.0)
    with pytest.raises(LocalityError, match="needs one initial value"):
        variable(strategy, own)
    with pytest.raises(ValueError, match="variable 'v' needs an array without a mask"):
        variable(strategy, np.ma.masked_array(1.0, True))
    with pytest.raises(TypeError, match="value of variable 'v' needs a value of dtype int8"):
        variable(strategy, 1.5, dtype=jnp.int8)


@pytest.mark.parametrize("total", [7, -7, 6])
def test_an_assigned_sum_of_ints_reads_back_exactly(total):
    strategy = dj.testing.ReferenceStrategy(3)
    v = variable(strategy, 0, synchronization=ON_READ, aggregation=SUM)
    assert int(v.assign(total)) == total == sum(parts(v))
    assert max(parts(v)) - min(parts(v)) <= 1
    with jax.numpy_dtype_promotion("strict"):
        assert int(v.assign(total + 1)) == total + 1


def test_a_variable_is_a_variable(strategy):
    v = variable(strategy, np.float32([1, 2]), name="w")
    assert isinstance(v, dj.Variable) and v.strategy is strategy
    assert (v.name, v.shape, v.dtype, v.trainable) == ("w", (2,), np.float32, True)
    assert (v + 1).tolist() == [2, 3] and v[1] == 2 and np.asarray(v).tolist() == [1, 2]
    assert strategy.extended.variable_created_in_scope(v)
    assert strategy.extended.value_container(v.local_results()[1]) is v
    assert strategy.extended.value_container("no component") == "no component"
    assert strategy.extended.read_var(v).tolist() == [1, 2]
    assert not variable(strategy, synchronization=ON_READ).trainable


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_has_components_of_its_own(strategy, how):
    v = variable(strategy, synchronization=ON_READ)
    strategy.run(lambda: v.assign(rid() + 1.0))
    w = how(v)
    strategy.run(lambda: v.assign(0.0))
    assert parts(w) == [1, 2] and parts(v) == [0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda s, v: s.first(v),
        lambda s, v: v._repr_html_(),
        lambda s, v: dj.VirtualStrategy(2).reduce("sum", v),
    ],
    ids=["first", "html", "reduce of another strategy"],
)
def test_what_reads_one_array_of_a_variable_is_told_of_components(strategy, call):
    v = variable(strategy, synchronization=ON_READ, name="v")
    with pytest.raises(UnsupportedError) as caught:
        call(strategy, v)
    assert str(caught.value).splitlines()[0] == (
        "variable 'v' of a reference strategy needs reading by components."
    )


def test_replica_0_gives_the_initial_value(strategy):
    made = []

    def fn():
        v = dj.Variable(lambda: 1.0 + rid(), name="v")
        made.append(v)
        return v

    v = strategy.run(fn)
    assert made == [v, v] and parts(v) == [1, 1]


# -- update -------------------------------------------------------------------


def test_update_runs_once_per_component(strategy):
    v = variable(strategy, synchronization=ON_READ, aggregation=SUM)
    own = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    seen = []

    def change(v, g, scale):
        seen.append(float(v.value))
        with strategy.scope():
            return v.assign_sub(scale * g)

    out = strategy.extended.update(v, change, args=(own,), kwargs={"scale": 2.0})
    assert seen == [10, 10] and local(strategy, out) == [8, 6] and parts(v) == [8, 6]
    lists = strategy.extended.update(v, lambda v: {"v": v.value}, group=False)
    assert [float(x) for x in lists["v"]] == [8, 6]


def test_a_mirrored_variable_is_updated_equally(strategy):
    v = variable(strategy)
    own = strategy.distribute_values_from_function(lambda ctx: 1.0)
    assert float(strategy.extended.update(v, lambda v, g: v.assign_add(g), args=(1.0,))) == 11
    with pytest.raises(LocalityError, match="update of variable 'v' needs arguments equal"):
        strategy.extended.update(v, lambda v, g: v.assign_add(g), args=(own,))
    with pytest.raises(ContextError, match="cross-replica context"):
        strategy.run(lambda: strategy.extended.update(v, lambda v: v.assign_add(1.0)))


def test_an_update_leaves_mirrored_components_equal(strategy):
    v, s = variable(strategy), variable(strategy, synchronization=ON_READ)
    strategy.run(lambda: s.assign(rid() + 1.0))
    with pytest.raises(LocalityError, match="update of variable 'v' needs to leave its components"):
        strategy.extended.update(v, lambda v: v.assign_add(s.value))


def test_non_slot_updates(strategy):
    extended = strategy.extended
    own = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    devices = extended.non_slot_devices([])
    assert local(strategy, extended.update_non_slot(devices, lambda x: x + 1, args=(own,))) == [
        1,
        2,
    ]
    with strategy.scope(), extended.colocate_vars_with(devices):
        assert dj.Variable(1.0).strategy is strategy


def test_it_is_described_as_the_virtual_strategy_is(collect_garbage):
    def described(strategy):
        kept = [variable(strategy, jnp.ones((4, 2)), f"v{i}") for i in range(8)]
        kept.append(variable(strategy, 0.0, "sum", synchronization=ON_READ, aggregation=SUM))
        kept.append(copy.deepcopy(kept[5]))
        add = lambda: kept[8].assign_add(context().replica_id_in_sync_group * 1.0)
        strategy.run(add)
        del kept[2:7:2]
        collect_garbage()
        return strategy.describe()

    found = described(dj.testing.ReferenceStrategy(2))
    expected = described(dj.VirtualStrategy(2))
    assert [v.name for v in found.variables] == "v0 v1 v3 v5 v7 sum v5".split()
    assert dataclasses.replace(found, strategy=expected.strategy) == expected
    assert str(found).startswith("ReferenceStrategy(2)\n  replicas          2\n")
    assert "1, shared by all replicas" in str(found)


def test_components_that_were_written_apart_count_each():
    strategy = dj.testing.ReferenceStrategy(2)
    v = variable(strategy, aggregation=MEAN)
    strategy.run(lambda: v.assign_add(jnp.float32(1)))
    assert strategy.describe().bytes_per_device == sum(x.nbytes for x in v.components) == 8
