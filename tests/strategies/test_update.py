"""extended.update and its neighbors: values and refusals (decisions 11, 13, 14)."""

import contextlib
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError, LocalityError, StrategyMismatchError
from tests.interrupts import in_packages, interrupted
from tests.replicas import ids, local, per_replica

ON_READ = dj.VariableSynchronization.ON_READ
SUM = dj.VariableAggregation.SUM
NONE = dj.VariableAggregation.NONE


def make(strategy, initial=1.0, **options):
    with strategy.scope():
        return dj.Variable(initial, **options)


def test_group_false_of_a_sync_on_read_variable(pair, how):
    v = make(pair, 0.0, synchronization=ON_READ, aggregation=SUM)
    step = how(lambda x: pair.extended.update(v, lambda v, x: v.assign_add(x), (x,), group=False))
    assert [float(x) for x in step(per_replica(pair, [np.float32(1), np.float32(2)]))] == [1, 2]
    assert local(pair, v) == [1.0, 2.0]


@pytest.mark.parametrize("sync", [ON_READ, dj.VariableSynchronization.ON_WRITE])
def test_group_false_takes_a_returned_variable_apart(pair, how, sync):
    """ "The return value will be unwrapped": the components, not the variable twice."""
    v = make(pair, 0.0, synchronization=sync, aggregation=SUM)

    def fn(v):
        v.assign(3.0)
        return v

    out = how(lambda: pair.extended.update(v, fn, group=False))()
    assert [float(x) for x in out] == [3.0, 3.0]


def test_r241_python_results_come_back(pair):
    v = make(pair)
    device = jax.devices()[0]
    out = pair.extended.update(v, lambda v: {"x": 1, "y": device, "z": None})
    assert out == {"x": 1, "y": device, "z": None}


def test_r243_update_in_a_replica_is_refused(pair):
    """Decision 13: use merge_call (TF 2 does so in silence)."""
    v = make(pair)
    with pytest.raises(ContextError, match="^update needs cross-replica context") as info:
        pair.run(
            lambda x: pair.extended.update(v, lambda v, x: v.assign_add(x), (x,)), args=(ids(pair),)
        )
    assert "merge_call" in str(info.value)
    assert float(v.value) == 1.0


# -- arguments: decision 13 ----------------------------------------------------


def test_a_per_replica_argument_for_a_mirrored_variable(pair, how):
    v = make(pair, name="kernel")

    def apply(v, grads):
        v.assign_sub(grads["g"])

    step = how(lambda x: pair.extended.update(v, apply, ({"g": x},)))
    with pytest.raises(LocalityError) as info:
        step(ids(pair))
    first = str(info.value).splitlines()[0]
    assert first.startswith("update of variable 'kernel' by test_a_per_replica"), first
    assert "argument grads['g'] to be one value" in first
    with pytest.raises(LocalityError, match="argument grads"):
        pair.extended.update(v, lambda v, grads: None, kwargs={"grads": ids(pair)})
    assert float(v.value) == 1.0


@pytest.mark.parametrize("kind", ["mirrored", "virtual"])
def test_a_per_replica_argument_of_the_only_replica(kind, how):
    """Decision 3: one value has nothing to differ from."""
    alone = dj.VirtualStrategy(1) if kind == "virtual" else dj.MirroredStrategy(jax.devices()[:1])
    v = make(alone)
    step = how(lambda x: alone.extended.update(v, lambda v, x: v.assign_add(x["g"]), (x,)))
    step({"g": per_replica(alone, [np.float32(2)])})
    assert float(v.value) == 3.0


def test_unreduced_gradients_in_a_merge_are_refused_at_trace_time(pair):
    v = make(pair, name="kernel")

    def merge(strategy, g):
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), (g,))

    with pytest.raises(LocalityError, match="^update of variable 'kernel' by .* argument g to be"):
        pair.run(lambda g: dj.get_replica_context().merge_call(merge, args=(g,)), (ids(pair),))
    assert float(v.value) == 1.0


def test_an_argument_reduced_before_the_merge_is_accepted(pair, how):
    v = make(pair)

    def merge(strategy, g):
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), (g,))

    def fn(g):
        g = dj.get_replica_context().all_reduce("sum", g)
        dj.get_replica_context().merge_call(merge, args=(g,))

    how(lambda g: pair.run(fn, args=(g,)))(ids(pair))
    assert float(v.value) == 0.0


def test_per_replica_arguments_go_component_by_component(pair, how):
    v = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    how(lambda x: pair.extended.update(v, lambda v, x: v.assign_add(x), (x,)))(
        per_replica(pair, [np.float32(1), np.float32(2)])
    )
    assert local(pair, v) == [2.0, 3.0]
    assert float(v.value) == 5.0


def test_result_of_a_component_update_is_per_replica(pair, how):
    v = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    out = how(lambda x: pair.extended.update(v, lambda v, x: (v.value + x, 3), (x,)))(ids(pair))
    assert isinstance(out[0], dj.PerReplica) and local(pair, out[0]) == [1.0, 2.0]
    assert out[1] == 3


@pytest.mark.api_row("update context")
def test_writes_in_an_update_are_raw(pair):
    """The component itself is written: no aggregation, no division."""
    v = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    pair.extended.update(v, lambda v, x: v.assign(x), (4.0,))
    assert local(pair, v) == [4.0, 4.0] and float(v.value) == 8.0
    m = make(pair, 1.0, aggregation=SUM)
    pair.extended.update(m, lambda v, x: v.assign(x), (4.0,))
    assert local(pair, m) == [4.0, 4.0]


def test_a_per_replica_of_other_replicas(pair):
    v = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    with pytest.raises(LocalityError, match="^argument x needs a PerReplica over 2 replicas"):
        pair.extended.update(v, lambda v, x: v.assign(x), (ids(dj.VirtualStrategy(3)),))
    assert local(pair, v) == [1.0, 1.0]


def test_args_and_kwargs_are_checked(pair):
    v = make(pair)
    with pytest.raises(ValueError, match="^update: positional args must be a list or tuple"):
        pair.extended.update(v, lambda v, x: None, 5)
    with pytest.raises(ValueError, match="^update: kwargs must be a dict"):
        pair.extended.update(v, lambda v, x: None, (), 5)


@pytest.mark.parametrize("what", [3.0, np.ones(2), None, "v"])
def test_update_needs_a_variable(pair, what):
    with pytest.raises(TypeError, match="^update needs a distjax.Variable"):
        pair.extended.update(what, lambda v: v)
    with pytest.raises(TypeError, match="^read_var needs a distjax.Variable"):
        pair.extended.read_var(what)
    with pytest.raises(TypeError, match="^variable_created_in_scope needs a distjax.Variable"):
        pair.extended.variable_created_in_scope(what)


def test_update_needs_a_variable_of_its_strategy(pair):
    other = dj.VirtualStrategy(2)
    v = make(other, name="theirs")
    with pytest.raises(StrategyMismatchError, match="^update needs a variable of ") as info:
        pair.extended.update(v, lambda v: v.assign(2.0))
    assert "'theirs'" in str(info.value) and repr(other) in str(info.value)
    assert float(v.value) == 1.0


def test_nested_update(pair):
    v, w = make(pair), make(pair, 5.0)

    def outer(v):
        pair.extended.update(w, lambda w, x: w.assign_add(x), (v.value,))
        return v.assign_add(1.0)

    assert float(pair.extended.update(v, outer)) == 2.0
    assert float(w.value) == 6.0


def test_sync_on_read_variable_read_in_anothers_update(pair):
    v, c = make(pair), make(pair, 1.0, synchronization=ON_READ, aggregation=SUM, name="c")
    with pytest.raises(ContextError, match="^a read of sync-on-read variable 'c' needs"):
        pair.extended.update(v, lambda v: v.assign(c.value))
    assert float(v.value) == 1.0


@pytest.mark.parametrize("slot", [True, False], ids=["update", "update_non_slot"])
def test_sync_on_read_variable_written_in_anothers_update(pair, how, slot):
    """Writes are raw. Each component then has what was assigned; sums would be one for each."""
    v, c = make(pair), make(pair, 3.0, synchronization=ON_READ, aggregation=SUM, name="c")

    def update(write):
        if slot:
            return pair.extended.update(v, lambda v: write())
        return pair.extended.update_non_slot(pair.extended.non_slot_devices([]), write)

    assert float(how(lambda: update(lambda: c.assign(7.0)))()) == 7.0
    assert local(pair, c) == [7.0, 7.0]
    for method in (c.assign_add, c.assign_sub):
        with pytest.raises(ContextError, match="^a read of sync-on-read variable 'c' needs"):
            how(lambda method=method: update(lambda: method(1.0)))()
    assert local(pair, c) == [7.0, 7.0]


def test_an_exception_in_an_update_changes_nothing_else(pair):
    v = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)

    def fails(v):
        v.assign(9.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.extended.update(v, fails)
    assert local(pair, v) == [1.0, 1.0]
    assert not dj.in_cross_replica_context()


def test_extended_keeps_its_strategy():
    extended = dj.VirtualStrategy(2).extended
    assert float(extended.reduce_to("mean", jnp.float32(3), None)) == 3.0
    assert extended.strategy.extended is extended


# -- update_non_slot ------------------------------------------------------------


@pytest.mark.api_row("update_non_slot", "update_non_slot (group=False)", "non_slot_devices")
def test_r245_update_non_slot(pair, how):
    devices = pair.extended.non_slot_devices([])
    assert devices == pair.extended.parameter_devices
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    out = how(lambda x: pair.extended.update_non_slot(devices, lambda x: x, (x,), group=False))(x)
    assert [float(v) for v in out] == [1.0, 2.0]
    grouped = pair.extended.update_non_slot(devices, lambda x: (x + 1, "n"), (x,))
    assert local(pair, grouped[0]) == [2.0, 3.0] and grouped[1] == "n"
    assert pair.extended.update_non_slot(devices, lambda x: x, (3,), group=False) == [3, 3]


def test_r245_update_non_slot_needs_the_non_slot_devices(pair):
    for wrong in (list(pair.extended.non_slot_devices([])), (), "cpu:0", None):
        with pytest.raises(ValueError, match="^update_non_slot needs the tuple of devices that"):
            pair.extended.update_non_slot(wrong, lambda: 1)


def test_update_non_slot_in_a_replica(pair):
    devices = pair.extended.non_slot_devices([])
    with pytest.raises(ContextError, match="^update_non_slot needs cross-replica context"):
        pair.run(lambda: pair.extended.update_non_slot(devices, lambda: 1))


@pytest.mark.api_row("colocate_vars_with")
def test_decision_15_colocate_with_the_non_slot_devices(pair):
    v = make(pair)
    with pair.scope():
        for beside in (pair.extended.non_slot_devices([v]), pair.extended.non_slot_devices([]), v):
            with pair.extended.colocate_vars_with(beside):
                slot = dj.Variable(0.0)
            assert dj.locality(slot) == dj.locality(v)
        for wrong in ("cpu:0", 3, None, list(pair.extended.worker_devices)):
            with pytest.raises(LocalityError, match="^`colocate_vars_with` must only be passed a"):
                with pair.extended.colocate_vars_with(wrong):
                    pass
    theirs = make(dj.VirtualStrategy(2))
    with pair.scope(), pytest.raises(LocalityError, match="^`colocate_vars_with` must only be"):
        with pair.extended.colocate_vars_with(theirs):
            pass
    with pytest.raises(ContextError, match="^colocate_vars_with. Need to be inside the scope of"):
        with pair.extended.colocate_vars_with(v):
            pass


# -- decision 11: a PerReplica assigned across ---------------------------------


@pytest.mark.parametrize("options", [{}, {"synchronization": ON_READ, "aggregation": SUM}])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_per_replica_is_not_assigned_across(pair, how, options, method):
    v = make(pair, name="target", **options)
    with pytest.raises(LocalityError, match=f"^{method} of variable 'target' needs one value"):
        how(lambda x: getattr(v, method)(x))(ids(pair))
    with pytest.raises(LocalityError, match=f"^{method} of variable 'target' needs one value"):
        pair.extended.update(v, lambda v: getattr(v, method)(ids(pair)))


# -- read_var, value_container, variable_created_in_scope ----------------------


@pytest.mark.api_row("read_var")
def test_read_var(pair, how):
    m = make(pair, 2.0)
    c = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    assert [float(x) for x in how(lambda: [pair.extended.read_var(v) for v in (m, c)])()] == [2, 2]
    seen = pair.run(lambda: (pair.extended.read_var(m), pair.extended.read_var(c)))
    assert [local(pair, x) for x in seen] == [[2.0, 2.0], [1.0, 1.0]]


@pytest.mark.api_row("value_container")
def test_value_container(pair):
    modes = {"synchronization": ON_READ, "aggregation": SUM}
    for v in (make(pair, [1.0, 2.0]), make(pair, [1.0, 2.0], **modes)):
        parts = v.local_results()
        assert all(pair.extended.value_container(part) is v for part in parts)
        assert pair.extended.value_container(v) is v
        for part in parts:
            known = pair.local_results(pair.extended.value_container(part))
            assert any(part is other for other in known)
        v.assign(np.full(2, 5.0))
        assert [x.tolist() for x in v.local_results()][1][0] != parts[1].tolist()[0]
    x = jnp.ones(2)
    assert pair.extended.value_container(x) is x
    assert pair.extended.value_container(3) == 3


@pytest.mark.api_row("value_container")
def test_value_container_of_a_variable_that_is_gone(pair):
    v = make(pair)
    part = v.local_results()[0]
    del v
    assert pair.extended.value_container(part) is part


@pytest.mark.api_row("variable_created_in_scope")
def test_variable_created_in_scope(pair):
    v, outside = make(pair), dj.Variable(1.0)
    assert pair.extended.variable_created_in_scope(v) is True
    assert pair.extended.variable_created_in_scope(outside) is False
    assert dj.VirtualStrategy(2).extended.variable_created_in_scope(v) is False


def test_decision_23_another_strategys_variable(pair):
    other = dj.VirtualStrategy(3)
    v = make(other, name="theirs")
    for action, fn in (("read", lambda: v.value), ("write", lambda: v.assign(2.0))):
        for call in (lambda fn=fn: pair.run(fn), lambda fn=fn: pair.run(lambda: merge_of(fn))):
            with pytest.raises(StrategyMismatchError, match=f"^a {action} of variable 'theirs'"):
                call()
        with pair.scope(), pytest.raises(StrategyMismatchError, match="^a .* of variable"):
            fn()
    assert float(v.value) == 1.0


def merge_of(fn):
    return dj.get_replica_context().merge_call(lambda s: fn())


def make_with_slot(strategy):
    """Returns a variable, its momentum, and an update of both, as optimizers make them."""
    with strategy.scope():
        v = dj.Variable(jnp.zeros(3))
        with strategy.extended.colocate_vars_with(v):
            momentum = dj.Variable(jnp.zeros(3))

    def update(v, amount):
        momentum.assign_add(amount)
        v.assign_add(momentum.value)

    return v, momentum, update


@pytest.mark.parametrize("inner", ["eager", "jit", "run", "update", "scope"])
@pytest.mark.parametrize(
    "make_strategy",
    [
        dj.get_strategy,
        dj.OneDeviceStrategy,
        lambda: dj.MirroredStrategy(jax.devices()[:2]),
        lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
        lambda: dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0),
    ],
    ids=["default", "one_device", "mirrored", "central", "parameters"],
)
def test_an_update_that_raises_has_written_no_variable(make_strategy, inner):
    strategy = make_strategy()
    v, momentum, update = make_with_slot(strategy)
    compiled = dj.jit(lambda: update(v, jnp.ones(3)))
    extended = strategy.extended
    extended.update(v, update, args=(jnp.ones(3),))
    compiled()

    def write(v, amount):
        if inner == "jit":
            compiled()
        elif inner == "run":
            strategy.run(merge_of, args=(lambda: update(v, jnp.ones(3)),))
        elif inner == "update":
            extended.update(v, update, args=(amount,))
        else:
            with strategy.scope() if inner == "scope" else contextlib.nullcontext():
                update(v, amount)

    def raises(v, amount):
        write(v, amount)
        raise ZeroDivisionError

    held = v.value
    for call in (
        lambda: extended.update(v, raises, args=(jnp.ones(3),)),
        lambda: extended.update(momentum, lambda _, x: raises(v, x), args=(jnp.ones(3),)),
        lambda: extended.update_non_slot(
            extended.non_slot_devices([v]), raises, args=(v, jnp.ones(3))
        ),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        np.testing.assert_array_equal(v.value, np.full(3, 3.0))
        np.testing.assert_array_equal(momentum.value, np.full(3, 2.0))
    extended.update(v, write, args=(jnp.ones(3),))
    compiled()
    np.testing.assert_array_equal(v.value, np.full(3, 10.0))
    np.testing.assert_array_equal(momentum.value, np.full(3, 4.0))
    np.testing.assert_array_equal(held, np.full(3, 3.0))


def test_an_error_in_an_update_that_is_caught_leaves_what_was_written_before(pair):
    v, momentum, update = make_with_slot(pair)

    def inner(v):
        update(v, jnp.ones(3))
        raise ZeroDivisionError

    def outer(v):
        update(v, jnp.ones(3))
        with pytest.raises(ZeroDivisionError):
            pair.extended.update(v, inner)

    pair.extended.update(v, outer)
    np.testing.assert_array_equal([v.value, momentum.value], np.ones((2, 3)))


def test_an_interrupted_update_has_written_all_or_nothing(mirrored):
    v, momentum, update = make_with_slot(mirrored)
    call = lambda: mirrored.extended.update(v, update, args=(jnp.ones(3),))
    call()
    frames = in_packages("distjax._src.strategies", "distjax._src.variables")
    for at in range(1, 600):
        outcome = interrupted(call, at, frames)
        num_updates = int(momentum.value[0])
        assert float(v.value[0]) == sum(range(num_updates + 1)), outcome.line
        if outcome.line is None:
            break
    assert 30 < at < 599


def test_an_update_left_while_it_is_entered_undoes_nothing_later(mirrored):
    """As long as its traceback lives, so does what the interrupt has left half entered."""
    with mirrored.scope():
        v = dj.Variable(0.0)
    update = lambda: mirrored.extended.update(v, lambda v: v.assign_add(1.0))
    update()
    kept = []

    def keep_the_traceback():
        try:
            update()
        except KeyboardInterrupt as error:
            kept.append(error.__traceback__)
            raise

    frames = in_packages("contextlib", "distjax._src.strategies", "distjax._src.variables.storage")
    for at in range(1, 400):
        outcome = interrupted(keep_the_traceback, at, frames)
        update()
        before = float(v.value)
        kept.clear()
        gc.collect()
        assert float(v.value) == before, outcome.line
        if outcome.line is None:
            break
    assert 10 < at < 399
