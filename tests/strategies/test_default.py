"""The default strategy: code that knows nothing of strategies runs unchanged."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityError, StrategyMismatchError, UnsupportedError

DEFAULT = dj.get_strategy()


def active():
    return dj.has_strategy(), dj.in_cross_replica_context(), dj.get_strategy() is DEFAULT


@pytest.mark.api_row("code with no knowledge of strategies")
def test_r025_scope_changes_nothing():
    with DEFAULT.scope() as entered:
        assert entered is DEFAULT
        assert active() == (False, False, True)
        with DEFAULT.scope():
            assert active() == (False, False, True)
        assert active() == (False, False, True)
        assert dj.get_replica_context().replica_id_in_sync_group == 0
    assert active() == (False, False, True)


def test_default_scope_nests_with_others():
    """Inside the default scope the state is the default one: other scopes may be entered."""
    other = dj.VirtualStrategy(2)
    with DEFAULT.scope():
        with other.scope():
            assert dj.get_strategy() is other
        assert active() == (False, False, True)
        with DEFAULT.scope(), other.scope():
            assert dj.get_strategy() is other


@pytest.mark.api_row("code with no knowledge of strategies")
def test_r027_run_returns_what_the_function_returns():
    batch = np.arange(4)
    assert DEFAULT.run(lambda x: x, args=(batch,)) is batch
    assert DEFAULT.run(lambda x, y: (x, y), args=[1], kwargs={"y": "two"}) == (1, "two")


def test_run_traces_nothing():
    """A function that JAX could not trace, called once per run."""
    calls = []
    for _ in range(2):
        DEFAULT.run(lambda x: calls.append(float(x)), args=(jnp.float32(2),))
    assert calls == [2.0, 2.0]


@pytest.mark.parametrize("value", [3.0, np.ones(2), "text", None, {"a": [1, 2]}])
def test_r031_reduce_to_returns_its_input(value):
    assert DEFAULT.extended.reduce_to("sum", value, "anything") is value
    assert DEFAULT.extended.batch_reduce_to("mean", [(value, "anything")])[0] is value


def test_r031_reduce_to_of_another_strategys_per_replica_is_its_own_affair():
    x = dj.VirtualStrategy(2).distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )
    assert DEFAULT.extended.reduce_to("sum", x, None) is x
    with pytest.raises(LocalityError, match="needs a PerReplica over 1 replicas"):
        DEFAULT.reduce("sum", x)


@pytest.mark.parametrize("destinations", ["cpu:0", None])
def test_r033_broadcast_to_is_not_supported(destinations):
    with pytest.raises(UnsupportedError, match="^broadcast_to needs a strategy that has devices"):
        DEFAULT.extended.broadcast_to(jnp.ones(2), destinations)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize(
    "name", ["worker_devices", "parameter_devices", "between_graph", "should_init"]
)
def test_r041_what_the_default_strategy_does_not_have(name):
    with pytest.raises(UnsupportedError, match=f"^{name} needs a strategy that has devices"):
        getattr(DEFAULT.extended, name)
    assert issubclass(UnsupportedError, RuntimeError)


def test_r029_datasets_from_function():
    seen = []
    dataset = DEFAULT.distribute_datasets_from_function(
        lambda context: seen.append(context) or [[0, 1], [2, 3]]
    )
    assert next(iter(dataset)) == [0, 1]
    assert seen == [dj.InputContext()]
    assert dataset == [[0, 1], [2, 3]]
    batches = [np.ones(2)]
    assert DEFAULT.distribute_dataset(batches) is batches


def test_r035_non_slot_devices_are_the_first_variable_by_name():
    zz, aa = dj.Variable(1.0, name="zz"), dj.Variable(2.0, name="aa")
    assert DEFAULT.extended.non_slot_devices([zz, aa]) is aa
    assert DEFAULT.extended.non_slot_devices([]) == (jax.devices()[0],)  # decision 15
    assert DEFAULT.extended.update_non_slot(aa, lambda x: x, (3,), group=False) == [3]


def test_r037_values_from_function_are_bare():
    made = DEFAULT.distribute_values_from_function(
        lambda ctx: (ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync)
    )
    assert made == (0, 1)
    sparse = object()
    assert DEFAULT.distribute_values_from_function(lambda ctx: sparse) is sparse


def test_r039_collectives_return_their_input():
    context = dj.get_replica_context()
    value = {"a": 3.0}
    assert context.all_reduce("sum", value) is value
    values = [3.0]
    assert context.all_gather(values, 0) is values
    assert DEFAULT.run(lambda: dj.get_replica_context().all_reduce("mean", value)) is value


def test_all_reduce_still_checks_its_op():
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        dj.get_replica_context().all_reduce("MAX", 1.0)


def test_reduce_with_an_axis_reduces_the_one_replica():
    x = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    assert DEFAULT.reduce("sum", x) is x
    np.testing.assert_array_equal(DEFAULT.reduce("sum", x, axis=0), [4, 7])
    assert float(DEFAULT.reduce("mean", x, axis=(0, 1))) == 2.75


def test_update_functions_stay_in_the_context_of_the_caller():
    """As in TensorFlow: there are no copies, so nothing changes for the function."""
    v = dj.Variable(1.0)
    seen = []
    note = lambda *args: seen.append((active(), dj.get_replica_context() is not None))
    DEFAULT.extended.update(v, note)
    DEFAULT.extended.update_non_slot(DEFAULT.extended.non_slot_devices([v]), note)
    merge = lambda strategy: strategy.extended.update(v, note)
    dj.get_replica_context().merge_call(merge)
    in_default, in_merge = ((False, False, True), True), ((False, True, True), False)
    assert seen == [in_default, in_default, in_merge]


def test_gather_and_local_results():
    x = np.ones(2)
    assert DEFAULT.gather(x, 0) is x
    assert DEFAULT.local_results([1, 2]) == ([1, 2],)
    assert DEFAULT.local_results(None) == (None,)


@pytest.mark.api_row("default single-replica context")
def test_replica_context():
    context = dj.get_replica_context()
    assert type(context.replica_id_in_sync_group) is int
    assert context.num_replicas_in_sync == 1
    assert context.strategy is DEFAULT
    assert context.devices == (jax.devices()[0],)
    assert DEFAULT.axis_name is None
    assert DEFAULT.mesh is None
    assert DEFAULT.num_replicas_in_sync == 1


def test_merge_call_is_a_call():
    merged = dj.get_replica_context().merge_call(
        lambda strategy, x, y: (strategy, x, y), args=(1,), kwargs={"y": "two"}
    )
    assert merged == (DEFAULT, 1, "two")


def test_fold_in_is_that_of_replica_zero(pair):
    key = jax.random.key(1)
    folded = pair.run(lambda: jax.random.key_data(dj.get_replica_context().fold_in(key)))
    mine = jax.random.key_data(dj.get_replica_context().fold_in(key))
    np.testing.assert_array_equal(pair.local_results(folded)[0], mine)


def test_variables_are_plain():
    v = dj.Variable(1.0, synchronization=dj.VariableSynchronization.ON_READ)
    assert v.strategy is DEFAULT
    DEFAULT.run(lambda: v.assign_add(2.0))
    assert float(v.value) == 3.0
    assert float(DEFAULT.extended.update(v, lambda v, x: v.assign(x), (5.0,))) == 5.0


def test_variables_made_in_the_default_scope_belong_to_it():
    with DEFAULT.scope():
        assert dj.Variable(1.0).strategy is DEFAULT
    assert DEFAULT.extended.variable_created_in_scope(dj.Variable(1.0))


def test_r023_decision_a_default_variable_under_a_strategy(pair):
    """Decision 23: reads see its value, a write in a replica says where to create it."""
    v = dj.Variable(3.0, name="outside")
    out = pair.run(lambda: v.value + 1)
    assert float(out) == 4.0
    with pytest.raises(StrategyMismatchError, match="^a write of variable 'outside'") as info:
        pair.run(lambda: v.assign(1.0))
    assert "with strategy.scope()" in str(info.value)
    assert float(v.value) == 3.0


def test_default_strategy_is_one_object():
    assert dj.get_strategy() is DEFAULT
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="^DefaultStrategy.. needs to stay one object"):
            duplicate(DEFAULT)
