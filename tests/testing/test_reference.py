"""The reference interpreter does what the documents of TF 1.13 say."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import (
    ContextError,
    LocalityError,
    MergeError,
    TraceLeakError,
    UnsupportedError,
)
from tests.testing.on_reference import context, local, rid, variable

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
ON_READ, ON_WRITE = dj.VariableSynchronization.ON_READ, dj.VariableSynchronization.ON_WRITE


@pytest.fixture
def strategy():
    """Two replicas."""
    return dj.testing.ReferenceStrategy(2)


def test_a_sum_is_never_of_weak_type(strategy, pair):
    """So that what is computed with it has the same dtype under every strategy."""

    def fn(x):
        return context().all_reduce("sum", jnp.asarray(2.0)) * x

    for each in (strategy, pair):
        assert each.run(fn, args=(jnp.ones(2, jnp.bfloat16),)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_mean_along_an_axis_is_summed_in_float32(strategy, pair, dtype):
    """The float16 sum overflows, and that of bfloat16 stagnates, though the mean does neither."""
    for each in (strategy, pair):
        (x,) = each.distribute_dataset([np.full(40000, 3, dtype)])
        (kept,) = each.distribute_dataset([np.ones(40000, bool)])
        for mask in (None, kept):
            mean = each.reduce("mean", x, axis=0, mask=mask)
            assert float(mean) == 3 and mean.dtype == dtype


# -- threads ------------------------------------------------------------------


def test_replicas_run_in_order_and_pause_at_merges(strategy):
    log = []

    def merge(strategy, x):
        log.append(("merge", threading.current_thread() is threading.main_thread()))
        return x

    def fn():
        log.append(("before", rid()))
        context().merge_call(merge, args=(rid(),))
        log.append(("after", rid()))

    strategy.run(fn)
    assert log == [
        *[("before", 0), ("before", 1), ("merge", True)],
        *[("after", 0), ("after", 1)],
    ]


def test_the_merge_function_of_replica_0_is_the_one_that_runs(strategy):
    def fn():
        mine = rid()
        return context().merge_call(lambda strategy: mine)

    assert strategy.run(fn) == 0


@pytest.mark.parametrize("in_merge", [False, True])
def test_an_exception_leaves_run_unchanged_and_nothing_behind(strategy, in_merge):
    unwound, caught, error = [], [], KeyError("the user's")

    def fail(*_):
        raise error

    def fn():
        try:
            if in_merge:
                context().merge_call(fail)
            elif rid() == 1:
                fail()
            else:
                context().all_reduce("sum", 1.0)
        except Exception as e:  # what a meeting raises passes by
            caught.append(e)
            raise
        finally:
            unwound.append(rid())

    with pytest.raises(KeyError) as info:
        strategy.run(fn)
    assert info.value is error
    assert sorted(unwound) == [0, 1]
    assert caught == ([] if in_merge else [error])
    assert not [t for t in threading.enumerate() if t.name.startswith("replica")]
    assert not dj.has_strategy()


def test_a_replica_that_is_unwound_cannot_meet_again(strategy):
    def fn():
        if rid() == 1:
            raise KeyError("stop")
        try:
            context().all_reduce("sum", 1.0)
        finally:
            context().all_reduce("sum", 1.0)

    with pytest.raises(KeyError, match="stop"):
        strategy.run(fn)


@pytest.mark.parametrize("calls", [(1, 0), (0, 1), (2, 1)])
def test_unequal_numbers_of_merges_are_an_error(strategy, calls):
    def fn():
        for _ in range(calls[rid()]):
            context().merge_call(lambda strategy: None)

    with pytest.raises(MergeError, match="a different number of merge_call calls"):
        strategy.run(fn)


def test_different_meetings_are_an_error(strategy):
    def fn():
        if rid() == 0:
            context().all_reduce("sum", 1.0)
        else:
            context().all_gather(jnp.ones(1), 0)

    with pytest.raises(
        MergeError, match=r"replica 0 at all_reduce\(SUM\), replica 1 at all_gather"
    ):
        strategy.run(fn)


def test_nested_runs_may_merge_to_any_depth(strategy):
    def fn(depth):
        if depth == 0:
            return context().all_reduce("sum", rid() + 1)
        return context().merge_call(lambda strategy: strategy.run(lambda: fn(depth - 1)))

    assert strategy.run(lambda: fn(3)) == 3


def test_the_body_of_loops_and_inner_jit_sees_numbers(strategy):
    seen = []

    @jax.jit
    def inner(c, x):
        seen.append(int(c))
        return c + context().all_reduce("sum", x), c

    def fn():
        (total, _), i = lax.scan(inner, jnp.int32(0), jnp.arange(3)), jnp.int32(0)
        i = lax.while_loop(lambda i: i < 2, lambda i: i + 1, i)
        return total, lax.cond(i > 1, lambda: total, lambda: -total)

    assert [int(x) for x in strategy.run(fn)] == [6, 6]
    assert seen == [0, 0, 0, 0, 2, 2]


# -- contexts -----------------------------------------------------------------


def where():
    return dj.get_strategy(), dj.has_strategy(), dj.in_cross_replica_context(), context() is None


def test_free_functions_in_every_context(strategy):
    found = {}

    def in_merge(strategy, v):
        found["merge"] = where()
        strategy.extended.update(v, lambda v: found.update(update=where()))

    def fn(v):
        found["replica"] = where()
        assert context().strategy is strategy and context().num_replicas_in_sync == 2
        assert context().devices == strategy.extended.worker_devices
        context().merge_call(in_merge, args=(v,))

    strategy.run(fn, args=(variable(strategy),))
    assert found == {
        "replica": (strategy, True, False, False),
        "merge": (strategy, True, True, True),
        "update": (strategy, True, True, True),
    }


def test_keys_have_no_sum(strategy):
    keys = strategy.distribute_values_from_function(lambda ctx: jax.random.key(1))
    with pytest.raises(TypeError, match="a sum over the replicas needs numbers, not PRNG keys"):
        strategy.reduce("sum", keys)
    with pytest.raises(TypeError, match="a mean over the replicas needs numbers, not PRNG keys"):
        strategy.run(lambda key: context().all_reduce("mean", key), args=(keys,))


def test_cross_replica_calls_in_a_replica_are_refused(strategy):
    with pytest.raises(ContextError, match="reduce needs cross-replica context"):
        strategy.run(lambda: strategy.reduce("sum", 1.0))
    with pytest.raises(ContextError, match="cross-replica context"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_a_context_is_good_only_in_its_replica(strategy):
    kept = []
    strategy.run(lambda: kept.append(context()))
    with pytest.raises(ContextError, match="all_gather needs its own replica context"):
        kept[0].all_gather(jnp.ones(1), 0)
    with pytest.raises(MergeError, match="merge_call needs its own replica context"):
        strategy.run(lambda: context().merge_call(lambda s: kept[0].merge_call(lambda s: 1)))

    with pytest.raises(ContextError, match="fold_in needs its own replica context"):
        kept[0].fold_in(jax.random.key(0))


@pytest.mark.parametrize("is_captured", [False, True])
def test_nnx_objects_are_refused(strategy, is_captured):
    nnx = pytest.importorskip("flax.nnx")
    count = nnx.Variable(jnp.float32(0))

    def step(*args):
        count[...] += 1

    with pytest.raises(UnsupportedError, match=r"run of ReferenceStrategy\(2\) needs a function"):
        strategy.run(step if is_captured else abs, args=() if is_captured else (count,))
    assert float(count[...]) == 0


def test_it_is_refused_in_traces(strategy):
    v = variable(strategy)
    with pytest.raises(UnsupportedError, match="run of ReferenceStrategy.2. needs to be called"):
        dj.jit(lambda: strategy.run(lambda: 1))()
    with pytest.raises(UnsupportedError, match="outside of JAX traces"):
        jax.jit(lambda x: strategy.reduce("sum", x))(1.0)
    with pytest.raises(TraceLeakError, match="assign of variable 'v'"):
        strategy.run(lambda: jax.grad(lambda x: v.assign(x))(1.0))
    with pytest.raises(TraceLeakError, match="read of variable 'v'"):
        jax.jit(lambda: v.value)()


def test_bare_collectives_have_no_axis(strategy):
    assert strategy.axis_name is None and strategy.mesh is None
    with pytest.raises(NameError, match="replica"):
        strategy.run(lambda: lax.psum(1.0, dj.REPLICA_AXIS))


def test_arguments_are_a_tuple_and_a_dict(strategy):
    with pytest.raises(ValueError, match="run: positional args must be a list or tuple"):
        strategy.run(lambda x: x, args=3)
    with pytest.raises(ValueError, match="run: kwargs must be a dict"):
        strategy.run(lambda x: x, kwargs=[3])
    with pytest.raises(TypeError, match="run needs a function"):
        strategy.run(3)


def test_a_strategy_is_not_copied(strategy):
    with pytest.raises(RuntimeError, match="needs to stay one object"):
        copy.copy(strategy)


# -- values -------------------------------------------------------------------


def test_equal_results_are_bare_and_others_per_replica(strategy):
    v = variable(strategy)

    def fn(word):
        return {"own": rid() + 0.5, "all": jnp.ones(2), "nan": jnp.nan, "word": word, "v": v}

    out = strategy.run(fn, args=("word",))
    assert local(strategy, out["own"]) == [0.5, 1.5]
    assert isinstance(out["own"], dj.PerReplica) and isinstance(out["all"], jax.Array)
    assert out["word"] == "word" and out["v"] is v and np.isnan(out["nan"])


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: [1] * rid(), "a tree"),
        (lambda: jnp.ones(1 + rid()), "shape"),
        (lambda: "ab"[rid()], "'a'"),
    ],
)
def test_what_cannot_differ_per_replica(strategy, make, got):
    with pytest.raises(LocalityError, match=f"(?s)a result of run needs the same tree.*{got}"):
        strategy.run(make)


def test_a_per_replica_is_passed_not_closed_over(strategy):
    x = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert local(strategy, strategy.run(lambda x: x * 2, args=(x,))) == [0, 2]
    with pytest.raises(LocalityError, match="closes over"):
        strategy.run(lambda: x)
    with pytest.raises(LocalityError, match="all_reduce needs this replica's value"):
        strategy.run(lambda: context().all_reduce("sum", x))
    three = dj.testing.ReferenceStrategy(3)
    with pytest.raises(LocalityError, match="3 replicas"):
        three.run(lambda x: x, args=(x,))


def test_reduce_by_kind_of_value(strategy):
    own = strategy.distribute_values_from_function(
        lambda ctx: np.arange(2) + ctx.replica_id_in_sync_group
    )
    v, s = variable(strategy), variable(strategy, synchronization=ON_READ, aggregation=SUM)
    assert strategy.reduce("mean", own).tolist() == [0.5, 1.5]
    assert float(strategy.reduce("MEAN", own, axis=(0,))) == 1.0
    assert int(strategy.reduce(dj.ReduceOp.SUM, jnp.int32(3))) == 6
    assert strategy.reduce("mean", 3) == 3
    assert float(strategy.reduce("mean", np.array([1.0, 3.0]), axis=0)) == 2.0
    assert float(strategy.reduce("mean", v)) == 10 and float(strategy.reduce("sum", s)) == 20
    with pytest.raises(ValueError, match="cannot be reduced with the given reduce op"):
        strategy.reduce("sum", 3)
    with pytest.raises(ValueError, match="cannot be reduced"):
        strategy.reduce("sum", np.ones(2), axis=0)
    with pytest.raises(LocalityError, match="not mirrored variable 'v'"):
        strategy.reduce("sum", v)


def test_gather_by_kind_of_value(strategy):
    own = strategy.distribute_values_from_function(
        lambda ctx: np.full(1, ctx.replica_id_in_sync_group)
    )
    assert strategy.gather(own, 0).tolist() == [0, 1]
    assert strategy.gather(jnp.ones(1), axis=0).tolist() == [1, 1]
    assert strategy.gather("host", 0) == "host"
    with pytest.raises(ValueError, match="gather needs an axis between 0 and 0"):
        strategy.gather(own, -1)
    with pytest.raises(ValueError, match="all_gather needs a value with at least one axis"):
        strategy.run(lambda: context().all_gather(1.0, 0))


def test_local_results_of_trees(strategy):
    own = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    v = variable(strategy)
    first, second = strategy.local_results({"own": own, "v": v, "n": 1})
    assert (int(second["own"]), float(second["v"]), second["n"]) == (1, 10.0, 1)
    assert len(strategy.local_results(jnp.ones(3))) == 2
    assert strategy.local_results(None) == (None,) and strategy.local_results("a") == ("a",)


def test_destinations_say_nothing(strategy):
    extended = strategy.extended
    own = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1)
    v = variable(strategy)
    assert [int(x) for x in extended.batch_reduce_to("sum", [(own, v), (own, None)])] == [3, 3]
    assert extended.broadcast_to([1, 2.0])[1] == 2.0
    assert extended.non_slot_devices([v]) == extended.worker_devices


# -- derivatives --------------------------------------------------------------


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("mean", 1.5)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_the_derivative_of_all_reduce_is_all_reduce(strategy, op, expected, wrap):
    def fn(x):
        loss = wrap(lambda x: (rid_weight() * context().all_reduce(op, x)).sum())
        return jax.grad(loss)(x)

    def rid_weight():
        return 1.0 + context().number

    assert strategy.run(fn, args=(jnp.ones(2),)).tolist() == [expected] * 2


def test_other_meetings_need_concrete_values(strategy):
    def fn(x):
        return jax.grad(lambda x: context().merge_call(lambda s, x: s.reduce("sum", x), (x,)))(x)

    with pytest.raises(MergeError, match="merge_call in the reference interpreter needs concrete"):
        strategy.run(fn, args=(1.0,))


# -- steps on an iterator -----------------------------------------------------


def last_outputs(strategy, iterations, initial):
    """A running total in a variable, of batches of which two steps have another shape."""
    with strategy.scope():
        v = dj.Variable(0.0, name="v", aggregation=SUM)

    def step(context, batch):
        def replica(x):
            v.assign_add(x.sum())
            context.set_last_step_output("mean", x.mean(), reduce_op="mean")
            return x.max()

        own = strategy.run(replica, args=(batch,))
        context.set_last_step_output("largest", own, reduce_op="sum")
        if initial:
            context.set_last_step_output("count", context.last_step_outputs["count"] + 1)
        context.set_non_tensor_output("where", "cross")

    batches = [np.arange(n, dtype=np.float32) for n in (4, 4, 6, 6)]
    iterator = iter(strategy.distribute_dataset(batches))
    found = strategy.extended.run_steps_on_iterator(step, iterator, iterations, initial)
    outputs = {k: np.asarray(x).tolist() for k, x in found.last_step_outputs.items()}
    return outputs, found.non_tensor_outputs, found.iterations, float(v.value)


@pytest.mark.parametrize("initial", [None, {"count": 10}])
@pytest.mark.parametrize("iterations", [1, 3, 9])
def test_steps_on_an_iterator_are_those_of_the_compiled_loop(strategy, iterations, initial):
    expected = last_outputs(dj.VirtualStrategy(2), iterations, initial)
    assert last_outputs(strategy, iterations, initial) == expected


def test_steps_on_an_iterator_without_an_element(strategy):
    with pytest.raises(StopIteration):
        strategy.extended.run_steps_on_iterator(lambda context, x: None, iter([]), 2)


@pytest.mark.parametrize("method", ["explain", "check"])
def test_what_looks_at_a_compiled_step_refuses(strategy, method):
    text = rf"dj\.{method} needs a strategy that compiles its steps\.\s+Got: strategy=Reference"
    with pytest.raises(UnsupportedError, match=text):
        getattr(dj, method)(lambda x: x, 1.0, strategy=strategy)
