"""Which context is active, and who may call what in it."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.strategies.default import DEFAULT_STRATEGY
from distjax.errors import ContextError, MergeError, StrategyMismatchError
from tests.replicas import ids

MIXING = "Mixing different tf.distribute.Strategy objects"


def state():
    """Returns what the free functions say: strategy, has one, cross-replica, is a replica."""
    return (
        dj.get_strategy(),
        dj.has_strategy(),
        dj.in_cross_replica_context(),
        dj.get_replica_context() is not None,
    )


DEFAULT = (DEFAULT_STRATEGY, False, False, True)


def in_cross(strategy):
    return (strategy, True, True, False)


def in_replica(strategy):
    return (strategy, True, False, True)


@contextlib.contextmanager
def raised_first(error, match):
    """The first line of the message matches."""
    with pytest.raises(error) as info:
        yield
    first = str(info.value).splitlines()[0]
    assert match in first, first


@pytest.mark.api_row("default single-replica context", "get_replica_context")
def test_r001_default_state():
    assert state() == DEFAULT
    assert dj.get_replica_context() is dj.get_replica_context()
    assert dj.get_replica_context().strategy is DEFAULT_STRATEGY


@pytest.mark.api_row("cross-replica context", "scope", "in_cross_replica_context")
def test_scope_is_cross_replica_context(pair):
    with pair.scope() as entered:
        assert entered is pair
        assert state() == in_cross(pair)
    assert state() == DEFAULT


@pytest.mark.api_row("replica context", "get_replica_context", "call_for_each_replica")
@pytest.mark.parametrize("method", ["run", "call_for_each_replica"])
@pytest.mark.parametrize("scoped", [False, True])
def test_r003_replica_state_inside_run(pair, how, method, scoped):
    seen = []
    call = pair.run if method == "run" else pair.extended.call_for_each_replica

    def fn():
        seen.append((state(), dj.get_replica_context().strategy))

    with pair.scope() if scoped else contextlib.nullcontext():
        how(lambda: call(fn))()
        assert state() == (in_cross(pair) if scoped else DEFAULT)
    assert set(seen) == {(in_replica(pair), pair)}
    assert state() == DEFAULT


def test_r005_a_scope_of_another_strategy_is_refused(pair):
    other = dj.VirtualStrategy(2)
    with pair.scope():
        with pytest.raises(StrategyMismatchError, match=MIXING):
            with other.scope():
                pass
        assert state() == in_cross(pair)
        with raised_first(StrategyMismatchError, "scope() of VirtualStrategy"):
            with other.scope():
                pass


def test_scopes_of_one_strategy_nest(pair):
    with pair.scope():
        with pair.scope():
            assert state() == in_cross(pair)
        assert state() == in_cross(pair)
    assert state() == DEFAULT


def test_r007_set_strategy_in_a_scope_is_refused(pair):
    with pair.scope():
        for strategy in (dj.VirtualStrategy(2), pair, None):
            with raised_first(
                ContextError, "Must not be called inside a `tf.distribute.Strategy` scope"
            ):
                dj.set_strategy(strategy)
        assert state() == in_cross(pair)


def test_set_strategy_replaces_the_one_set_before(pair):
    other = dj.VirtualStrategy(3)
    dj.set_strategy(pair)
    assert state() == in_cross(pair)
    dj.set_strategy(other)
    assert state() == in_cross(other)
    with raised_first(StrategyMismatchError, "scope() of"), pair.scope():
        pass
    with other.scope():
        assert state() == in_cross(other)
    dj.set_strategy(None)
    assert state() == DEFAULT


def test_r009_scopes_left_out_of_order(pair):
    """Distjax has no variable-creator scopes: the scopes themselves are left out of order."""
    outer, inner = pair.scope(), pair.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ContextError, match=r"(?s)left in the order opposite.*nesting error"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert state() == DEFAULT


CALLS = {
    "reduce": lambda s, v: s.reduce("mean", jnp.float32(3)),
    "reduce_to": lambda s, v: s.extended.reduce_to("mean", jnp.float32(3), None),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("mean", [(jnp.float32(3), None)]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(jnp.float32(3)),
    "gather": lambda s, v: s.gather(jnp.ones(1), 0),
    "update": lambda s, v: s.extended.update(v, lambda v: v.assign(3.0)),
    "update_non_slot": lambda s, v: s.extended.update_non_slot(
        s.extended.non_slot_devices([]), lambda: 3
    ),
    "run": lambda s, v: s.run(lambda: 3),
    "run_steps_on_iterator": lambda s, v: s.extended.run_steps_on_iterator(
        lambda context, x: None, iter([jnp.ones(1)])
    ),
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: 3),
}


@pytest.fixture
def variable(pair):
    with pair.scope():
        return dj.Variable(1.0)


@pytest.mark.api_row("a strategy's methods in and out of its scope")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_r011_cross_replica_methods_in_and_out_of_scope(pair, variable, call):
    call(pair, variable)
    with pair.scope():
        call(pair, variable)
    other = dj.VirtualStrategy(2)
    with other.scope(), pytest.raises(StrategyMismatchError, match=MIXING):
        call(pair, variable)
    assert state() == DEFAULT


@pytest.mark.api_row("a strategy's methods in and out of its scope")
@pytest.mark.parametrize("name", CALLS)
def test_r013_cross_replica_methods_are_refused_in_a_replica(pair, variable, name):
    method = {"call_for_each_replica": "run"}.get(name, name)
    with raised_first(ContextError, f"{method} needs cross-replica context"):
        pair.run(lambda: CALLS[name](pair, variable))
    with pytest.raises(ContextError, match="Method requires being in cross-replica context"):
        pair.run(lambda: CALLS[name](pair, variable))
    assert state() == DEFAULT


@pytest.mark.parametrize("name", CALLS)
def test_the_advice_names_what_a_merge_function_may_call(pair, variable, name):
    method = {"call_for_each_replica": "run"}.get(name, name)
    with pytest.raises(ContextError) as caught:
        pair.run(lambda: CALLS[name](pair, variable))
    fix = str(caught.value).partition("Fix: ")[2]
    assert fix.startswith("call it outside run")
    if name == "run_steps_on_iterator":
        assert "merge_call" not in fix
        return
    owner = "strategy" if hasattr(pair, method) else "strategy.extended"
    assert f"ctx.merge_call(lambda strategy, x: {owner}.{method}(...), args=(x,))" in fix
    assert ("ctx.all_reduce(op, x)" in fix) == ("reduce" in method)
    merge = lambda: dj.get_replica_context().merge_call(CALLS[name], args=(variable,))
    pair.run(merge)


@pytest.mark.parametrize("kind", ["default", "reference", "virtual"])
def test_a_batch_of_no_pairs_is_refused_in_a_replica_too(kind):
    makers = {"reference": dj.testing.ReferenceStrategy, "virtual": dj.VirtualStrategy}
    strategy = dj.get_strategy() if kind == "default" else makers[kind](2)
    call = lambda: strategy.extended.batch_reduce_to("sum", [])
    assert call() == []
    with raised_first(ContextError, "batch_reduce_to needs cross-replica context"):
        strategy.run(call)
    other = dj.VirtualStrategy(2)
    with other.scope(), pytest.raises(StrategyMismatchError, match=MIXING):
        call()


def test_gather_in_a_replica_names_what_a_replica_has(pair):
    with pytest.raises(ContextError, match=r"Fix: .*ctx\.all_gather\(x, axis\)") as caught:
        pair.run(lambda: pair.gather(jnp.ones(1), 0))
    assert "ReplicaContext.all_gather" in str(caught.value)


def test_scope_is_refused_in_a_replica(pair):
    def fn():
        with pair.scope():
            pass

    with raised_first(ContextError, "scope() needs cross-replica context"):
        pair.run(fn)


def test_r015_another_strategys_run_in_a_replica_is_refused(pair):
    other = dj.VirtualStrategy(2)
    with pytest.raises(StrategyMismatchError, match=MIXING):
        pair.run(lambda: other.run(lambda: 1))
    assert state() == DEFAULT


@pytest.mark.parametrize(
    "raiser",
    [
        lambda s: s.run(lambda: 1 // 0),
        lambda s: s.run(lambda: dj.get_replica_context().merge_call(lambda s: 1 // 0)),
        lambda s: dj.jit(lambda: 1 // 0)(),
        lambda s: dj.jit(lambda: s.run(lambda: 1 // 0))(),
        lambda s: s.extended.update(dj.Variable(1.0), lambda v: 1 // 0),
        lambda s: 1 // 0,
    ],
    ids=["replica", "merge", "jit", "run in jit", "update", "scope"],
)
def test_r017_contexts_are_clean_after_an_exception(pair, raiser):
    with pytest.raises(ZeroDivisionError), pair.scope():
        try:
            raiser(pair)
        finally:
            assert state() == in_cross(pair)
    assert state() == DEFAULT


def test_r019_scope_in_a_merge_function(pair):
    seen = []

    def merge(strategy):
        with strategy.scope() as entered:
            seen.append((entered is strategy, state()))
        seen.append((True, state()))

    pair.run(lambda: dj.get_replica_context().merge_call(merge))
    assert seen and set(seen) == {(True, in_cross(pair))}


@pytest.mark.api_row("cross-replica context", "in_cross_replica_context")
def test_merge_functions_are_cross_replica(pair, how):
    seen = []

    def merge(strategy):
        seen.append((strategy, *state()))

    def fn():
        dj.get_replica_context().merge_call(merge)
        seen.append((pair, *state()))

    how(lambda: pair.run(fn))()
    assert set(seen) == {(pair, *in_cross(pair)), (pair, *in_replica(pair))}


@pytest.mark.api_row("update context")
def test_update_functions_are_cross_replica(pair, variable):
    seen = []
    pair.extended.update(variable, lambda v: seen.append(state()))
    assert seen == [in_cross(pair)]
    assert state() == DEFAULT


def test_scope_in_an_update_function(pair, variable):
    def fn(v):
        with pair.scope():
            v.assign_add(1.0)
        return state()

    assert pair.extended.update(variable, fn) == in_cross(pair)
    assert float(variable.value) == 2.0


def test_r021_state_inside_the_default_strategys_run():
    def fn():
        context = dj.get_replica_context()
        return state(), context.replica_id_in_sync_group, context.num_replicas_in_sync

    assert DEFAULT_STRATEGY.run(fn) == (DEFAULT, 0, 1)


def test_default_merge_call_is_cross_replica():
    seen = dj.get_replica_context().merge_call(lambda strategy: (strategy, state()))
    assert seen == (DEFAULT_STRATEGY, (DEFAULT_STRATEGY, False, True, False))


def test_cross_replica_methods_in_the_default_strategys_run():
    with raised_first(ContextError, "reduce needs cross-replica context"):
        DEFAULT_STRATEGY.run(lambda: DEFAULT_STRATEGY.reduce("sum", 1.0))
    with raised_first(ContextError, "run needs cross-replica context"):
        DEFAULT_STRATEGY.run(lambda: DEFAULT_STRATEGY.run(lambda: 1))


def test_reduce_in_a_default_merge_call():
    merged = dj.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), args=(2.0,))
    assert merged == 2.0


def test_r023_another_strategys_run_in_the_default_strategys_run(pair, how):
    def fn():
        seen = []
        x = pair.run(lambda x: seen.append(state()) or x, (ids(pair),))
        assert set(seen) == {in_replica(pair)}
        assert state() == DEFAULT
        with pair.scope():
            return pair.reduce("sum", x)

    assert float(how(lambda: DEFAULT_STRATEGY.run(fn))()) == 1.0


def test_another_strategys_scope_in_the_default_strategys_run(pair):
    def fn():
        with pair.scope():
            return state()

    assert DEFAULT_STRATEGY.run(fn) == in_cross(pair)
    assert DEFAULT_STRATEGY.run(lambda: state()) == DEFAULT


def test_other_methods_of_another_strategy_in_the_default_strategys_run(pair):
    """They make nothing active: TF asks for the scope there, too."""
    with raised_first(StrategyMismatchError, "reduce of"):
        DEFAULT_STRATEGY.run(lambda: pair.reduce("mean", 1.0))


def test_context_called_from_cross_replica_context(pair):
    """A merge function closes over its context, which works in its replica function only."""

    def nested():
        context = dj.get_replica_context()
        return context.merge_call(lambda s: context.merge_call(lambda s: 1))

    with raised_first(MergeError, "Need to be inside `call_for_each_replica()`"):
        pair.run(nested)
    assert state() == DEFAULT


@pytest.mark.parametrize("what", ["merge_call", "all_reduce", "all_gather"])
def test_default_context_called_under_a_strategy(pair, what):
    default = dj.get_replica_context()
    calls = {
        "merge_call": lambda: default.merge_call(lambda s: 1),
        "all_reduce": lambda: default.all_reduce("sum", 1.0),
        "all_gather": lambda: default.all_gather(jnp.ones(1), 0),
    }
    with raised_first(StrategyMismatchError, f"{what} of a replica context of Def"):
        with pair.scope():
            calls[what]()
    with raised_first(StrategyMismatchError, f"{what} of a replica context of Def"):
        pair.run(calls[what])


def test_default_context_called_in_its_merge_function():
    default = dj.get_replica_context()
    with raised_first(MergeError, "Need to be inside `call_for_each_replica()`"):
        default.merge_call(lambda s: default.all_reduce("sum", 1.0))


@pytest.mark.parametrize("kind", ["pair", "default"])
def test_contexts_of_another_run_of_the_same_strategy(pair, kind):
    """A context that outlives its call, asked in a later one: "Mismatching ReplicaContext"."""
    strategy = pair if kind == "pair" else DEFAULT_STRATEGY
    kept = []
    strategy.run(lambda: kept.append(dj.get_replica_context()))
    with pytest.raises(ContextError) as caught:
        strategy.run(lambda: kept[0].all_reduce("sum", 1.0))
    assert str(caught.value) == (
        "all_reduce needs the context of the function that is running.\n"
        "  Got: a context of an earlier or outer call. Mismatching ReplicaContext.\n"
        "  Why: a replica context is valid only in the call that made it.\n"
        "  Fix: ask for it where it is used: dj.get_replica_context()"
    )


@pytest.mark.parametrize("what", ["merge_call", "all_reduce", "all_gather"])
def test_contexts_of_another_call_of_the_default_strategy(what):
    outside = dj.get_replica_context()
    calls = {
        "merge_call": lambda context: context.merge_call(lambda s: 1),
        "all_reduce": lambda context: context.all_reduce("sum", 1.0),
        "all_gather": lambda context: context.all_gather(jnp.ones(1), 0),
    }
    after_its_run = DEFAULT_STRATEGY.run(dj.get_replica_context)
    with raised_first(ContextError, f"{what} needs the context of the function that is running"):
        calls[what](after_its_run)
    with raised_first(ContextError, f"{what} needs the context of the function that is running"):
        DEFAULT_STRATEGY.run(lambda: calls[what](outside))


def test_default_scope_changes_nothing_and_does_not_nest_in_others(pair):
    with DEFAULT_STRATEGY.scope():
        assert state() == DEFAULT
    with raised_first(StrategyMismatchError, "Must not nest tf.distribute.Strategy scopes"):
        with pair.scope(), DEFAULT_STRATEGY.scope():
            pass


def test_jit_keeps_the_context_it_is_called_in(pair):
    step = dj.jit(lambda: state())
    assert step() == DEFAULT
    with pair.scope():
        assert step() == in_cross(pair)


def test_jax_jit_in_a_scope_keeps_the_context(pair):
    with pair.scope():
        assert jax.jit(lambda x: x + int(dj.in_cross_replica_context()))(1) == 2
