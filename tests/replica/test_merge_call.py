"""merge_call: all replicas pause, one function runs in cross-replica context (decisions 4, 5)."""

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
    StrategyMismatchError,
)
from tests.replica.blindness import blind
from tests.replica.merging import context, merge, sum_of
from tests.replicas import ids, local, per_replica

# -- what the function gets, and what comes back -------------------------------


@pytest.mark.api_row("merge_call")
def test_arguments_by_locality(pair, how):
    """Decision 4: objects bare, equal values as arrays, others PerReplica, variables themselves."""
    with pair.scope():
        v = dj.Variable(1.0)
    captured = object()
    seen = []

    def look(strategy, **kwargs):
        seen.append(kwargs)
        return kwargs["number"]

    def fn(x, m):
        total = context().all_reduce("sum", x)
        return context().merge_call(
            look,
            kwargs={
                "t": x,
                "m": m,
                "reduced": total,
                "v": v,
                "o": captured,
                "number": 3,
                "text": "a",
                "none": None,
            },
        )

    assert how(lambda x, m: pair.run(fn, args=(x, m)))(ids(pair), jnp.float32(2)) == 3
    last = seen[-1]  # it may be traced more than once: the last time counts
    assert isinstance(last["t"], dj.PerReplica) and last["t"].shape == ()
    assert isinstance(last["m"], jax.Array) and last["m"].shape == ()
    assert isinstance(last["reduced"], jax.Array)
    assert last["v"] is v and last["o"] is captured
    assert (last["number"], last["text"], last["none"]) == (3, "a", None)


@pytest.mark.api_row("merge_call")
def test_a_per_replica_result_gives_each_replica_its_own(pair, how):
    out = how(
        lambda x: pair.run(lambda x: merge(lambda s, x: {"t": x, "m": s.reduce("sum", x)}, x), (x,))
    )(per_replica(pair, [np.float32(5), np.float32(7)]))
    assert local(pair, out["t"]) == [5.0, 7.0]
    assert isinstance(out["m"], jax.Array) and float(out["m"]) == 12.0


def test_python_results_come_back_as_they_are(pair):
    captured = object()
    assert pair.run(lambda: merge(lambda s: (None, "a", 3, captured))) == (None, "a", 3, captured)


def test_r079_merge_call_in_a_function_wholly_inside_jit(pair):
    @dj.jit
    def step():
        return pair.run(lambda: merge(sum_of, jnp.float32(0)))

    assert float(step()) == 0.0


def test_r081_merge_call_in_a_nested_jit_works(pair, how):
    """Decision 5 (TF: RuntimeError)."""
    inner = jax.jit(lambda x: merge(sum_of, x) * 2)
    out = how(lambda x: pair.run(lambda x: inner(x) + x, args=(x,)))(ids(pair))
    assert local(pair, out) == [2.0, 3.0]


def test_r083_collectives_in_a_branch_of_one_device(how):
    strategy = dj.OneDeviceStrategy()

    def fn(x):
        return lax.cond(x > 0, lambda: context().all_reduce("sum", x), lambda: x * 7)

    assert float(how(lambda x: strategy.run(fn, args=(x,)))(jnp.float32(1))) == 1.0


def test_r085_a_context_used_after_its_trace(pair):
    kept = []
    pair.run(lambda: kept.append(context()))
    calls = {
        "merge_call": lambda: kept[0].merge_call(lambda s: 1),
        "all_reduce": lambda: kept[0].all_reduce("sum", 1.0),
        "all_gather": lambda: kept[0].all_gather(jnp.ones(1), 0),
        "replica_id_in_sync_group": lambda: kept[0].replica_id_in_sync_group,
    }
    for what, call in calls.items():
        with pytest.raises(StrategyMismatchError, match=f"^{what} of a replica context") as info:
            call()
        assert "Mismatching tf.distribute.Strategy objects" in str(info.value)
    assert kept[0].strategy is pair and kept[0].num_replicas_in_sync == 2


@pytest.mark.api_row("a second merge_call")
def test_r087_two_merges(pair, how):
    def fn(x):
        s = merge(sum_of, x)
        return merge(sum_of, x * s)

    x = per_replica(pair, [np.float32(1), np.float32(2)])
    assert float(how(lambda x: pair.run(fn, args=(x,)))(x)) == 9.0


def test_r089_run_in_a_merge_function(pair, how):
    def fn(x):
        return merge(lambda s, x: s.run(lambda y: 2 * y, args=(x,)), x)

    x = per_replica(pair, [np.float32(1), np.float32(2)])
    assert local(pair, how(lambda x: pair.run(fn, args=(x,)))(x)) == [2.0, 4.0]


def test_merges_nest_through_run_to_any_depth(pair, how):
    def fn(x, depth):
        if depth == 0:
            return merge(sum_of, x)
        return x + merge(lambda s, x: s.run(lambda x: fn(x, depth - 1), args=(x,)), x)

    def step(x):
        return pair.run(lambda x: fn(x, 3), args=(x,))

    # 3 levels of x + ..., around the sum 0 + 1
    assert local(pair, how(step)(ids(pair))) == [1.0, 4.0]


@pytest.mark.parametrize("catch", [ZeroDivisionError, Exception])
def test_r091_a_replica_cannot_catch_an_error_of_a_merge_function(pair, how, catch):
    reached = []

    def fn(x):
        try:
            merge(lambda s: 1 // 0)
        except catch:
            reached.append(1)
        return x

    with pytest.raises(ZeroDivisionError):
        how(lambda: pair.run(fn, args=(1.0,)))()
    assert not dj.in_cross_replica_context()


def test_r093_a_variable_made_in_a_merge_function(pair):
    made = []

    def create(strategy):
        if not made:
            made.append(dj.Variable(2.0, name="inside"))
        return made[0]

    out = pair.run(lambda: merge(create))
    assert out is made[0]
    assert out.strategy is pair and len(out.local_results()) == 2
    assert out.synchronization is dj.VariableSynchronization.ON_WRITE
    assert float(out.value) == 2.0


def test_merge_functions_write_variables(pair, how):
    """The update pattern without `update`: read, reduce, assign."""
    with pair.scope():
        w = dj.Variable(10.0)

    def fn(g):
        merge(lambda s, g: w.assign_sub(0.5 * s.reduce("sum", g)), g)
        return w.value

    g = per_replica(pair, [np.float32(1), np.float32(2)])
    assert local(pair, how(lambda g: pair.run(fn, args=(g,)))(g)) == [8.5, 8.5]
    assert float(w.value) == 8.5


# -- weak types: the law that proving more never changes a dtype ----------------


def half(x):
    """Weak values take the dtype of what they meet, here bfloat16."""
    return x * jnp.ones(2, jnp.bfloat16)


WEAK = {
    "run to run": lambda s, x: s.run(half, args=(s.run(jnp.sin, args=(x,)),)),
    "run in merge": lambda s, x: s.run(
        lambda x: merge(lambda s, y: s.run(half, args=(y,)), jnp.sin(x)), args=(x,)
    ),
    "T run in merge": lambda s, x: s.run(
        lambda x: merge(
            lambda s, y: s.run(half, args=(y,)), x * context().replica_id_in_sync_group
        ),
        args=(x,),
    ),
    "reduce in merge": lambda s, x: s.run(
        lambda x: merge(lambda s, y: half(s.reduce("sum", y)), jnp.sin(x)), args=(x,)
    ),
    "out of a merge": lambda s, x: s.run(
        lambda x: half(merge(lambda s, y: s.reduce("sum", y), jnp.sin(x))), args=(x,)
    ),
    "through a merge": lambda s, x: s.run(
        lambda x: half(merge(lambda s, y: y, jnp.sin(x))), args=(x,)
    ),
    "a sum of replicas to run": lambda s, x: s.run(
        half, args=(s.run(lambda x: context().all_reduce("sum", x), args=(x,)),)
    ),
    "a sum of replicas to run in merge": lambda s, x: s.run(
        lambda x: merge(
            lambda s, y: s.run(half, args=(y,)), context().all_reduce("sum", jnp.sin(x))
        ),
        args=(x,),
    ),
    "a psum in dj.jit": lambda s, x: dj.jit(
        lambda x: s.run(half, args=(s.run(lambda x: lax.psum(x, "replica"), args=(x,)),))
    )(x),
    "in a scan": lambda s, x: s.run(
        lambda x: half(lax.scan(lambda c, _: (c + merge(sum_of, c), None), x, length=2)[0]),
        args=(x,),
    ),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_do_not_depend_on_what_is_proved(name):
    def dtype(strategy):
        out = WEAK[name](strategy, 2.0)
        return out.dtype

    proved = [dtype(make()) for make in (two_virtual, two_mirrored)]
    with blind():
        blinded = [dtype(make()) for make in (two_virtual, two_mirrored)]
    assert len(set(proved + blinded)) == 1


def two_virtual():
    return dj.VirtualStrategy(2)


def two_mirrored():
    return dj.MirroredStrategy(jax.devices()[:2])


# -- refusals ------------------------------------------------------------------


def test_merge_call_in_a_merge_function(pair):
    def fn():
        c = context()
        return c.merge_call(lambda s: c.merge_call(lambda s: 1))

    with pytest.raises(MergeError, match="^merge_call needs replica context. Need to be inside"):
        pair.run(fn)


def test_a_merge_function_that_changes_between_its_traces(pair):
    """In a derivative it is traced before it is known that its argument differs, and after."""
    calls = []

    def impure(strategy, x):
        calls.append(1)
        return (x,) * len(calls)

    fix = r"Fix: a result, or v\.assign\(x\) of a dj\.Variable"
    with pytest.raises(MergeError, match=f"impure needs to do the same on every call(.|\n)*{fix}"):
        pair.run(jax.grad(lambda x: merge(impure, x)[0]), args=(ids(pair),))


@pytest.mark.parametrize("devices", [None, 1])
def test_a_result_of_other_replicas(pair, how, devices):
    """Decision 24."""
    other = dj.VirtualStrategy(3) if devices is None else dj.MirroredStrategy(jax.devices()[4:6])
    foreign = ids(other)
    with pytest.raises(LocalityError, match="^a result of merge function .*needs a PerReplica ov"):
        how(lambda: pair.run(lambda: merge(lambda strategy: foreign)))()


def test_a_per_replica_that_is_closed_over_as_an_argument(pair):
    x = ids(pair)
    with pytest.raises(LocalityError, match="^merge_call needs this replica's value"):
        pair.run(lambda: merge(sum_of, x))


def test_a_value_that_differs_written_to_a_mirrored_variable(pair):
    """A merge function gets T, and puts it into a mirrored variable: refused when known."""
    with pair.scope():
        v = dj.Variable(1.0, name="kept")
    with pytest.raises(LocalityError, match="^assign of variable 'kept' needs one value"):
        pair.run(lambda x: merge(lambda s, x: v.assign(x), x), args=(ids(pair),))
    assert float(v.value) == 1.0


def test_a_branch_that_differs_cannot_write_a_mirrored_variable(pair, how):
    """No collective is in it (a Python number needs none), but the copies would diverge."""
    with pair.scope():
        v = dj.Variable(1.0, name="kept", aggregation=dj.VariableAggregation.MEAN)

    def fn(x):
        dj.lax.cond(x > 0, lambda: v.assign(5.0), lambda: v.value)

    with pytest.raises(LocalityError, match="^variable 'kept' needs a value that is equal on"):
        how(lambda x: pair.run(fn, args=(x,)))(ids(pair))
    assert float(v.value) == 1.0


def test_an_outer_context_is_not_the_inner_runs(pair):
    def fn():
        outer = context()
        return merge(lambda s: s.run(lambda: outer.all_reduce("sum", 1.0)))

    with pytest.raises(ContextError, match="needs the context of the function that is running"):
        pair.run(fn)


# -- derivatives ---------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradient_through_a_merge_is_the_same_reduction(pair, how, op):
    """Decision 8, for reduce in a merge as for all_reduce."""

    def fn(x, c):
        f = lambda x: c * merge(lambda s, y: s.reduce(op, y), x * x)
        return jax.grad(f)(x), jax.jvp(f, (x,), (jnp.ones_like(x),))[1]

    x = per_replica(pair, [np.float32(3), np.float32(5)])
    c = per_replica(pair, [np.float32(1), np.float32(3)])
    grad, tangent = how(lambda x, c: pair.run(fn, args=(x, c)))(x, c)
    scale = 1.0 if op == "sum" else 0.5
    assert local(pair, grad) == [scale * 4 * 2 * 3, scale * 4 * 2 * 5]
    assert local(pair, tangent) == [scale * 1 * 16, scale * 3 * 16]


@pytest.mark.parametrize("where", ["replica", "default"])
def test_a_merge_function_that_does_not_take_the_strategy(pair, where):
    def merged(merge_fn):
        call = lambda x: dj.get_replica_context().merge_call(merge_fn, args=(x,))
        with pytest.raises(TypeError) as caught:
            pair.run(call, args=(1.0,)) if where == "replica" else call(1.0)
        return getattr(caught.value, "__notes__", [""])[0]

    assert merged(lambda x: x) == (
        "merge_call passes the strategy first, then args.\n"
        "  Fix: merge_call(lambda strategy, x: ..., args=(x,))"
    )
    for other in (lambda strategy, x, y: x, lambda strategy, x: x + "text"):
        assert not merged(other).startswith("merge_call")
