"""dj.check lists what is probably wrong; dj.expect says once why it is meant."""

import concurrent.futures
import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.context.reporting import current_reason
from distjax.errors import CheckError, ContextError, LocalityWarning
from tests.diagnostics.lines import line_of
from tests.replicas import ids, local

REASON = "each replica trains on its own"


def forgetful(params, x):
    return {"w": params["w"] - x, "b": params["b"]}


def start():
    return {"w": jnp.ones(2), "b": jnp.zeros(())}


@pytest.fixture(autouse=True)
def no_other_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        yield


def test_a_finding_has_level_rule_line_and_cure(pair):
    def step(params, x):
        return pair.run(forgetful, args=(params, x))  # the run

    with pytest.raises(CheckError) as info:
        dj.check(step, start(), ids(pair))
    [finding] = info.value.findings
    assert (finding.level, finding.rule) == ("warning", "state that comes back different")
    assert finding.source.startswith(line_of(__file__, "the run"))
    lines = str(info.value).splitlines()
    assert lines[0].endswith("step needs to pass dj.check.")
    assert lines[1:4] == [
        "  Got: 1 warning.",
        "  Why: such steps train, but not as one device with the whole batch would.",
        "  Fix: as each finding says; or, where it is meant: with dj.expect(reason)",
    ]
    assert lines[4] == f"  warning: state that comes back different, at {finding.source}"
    assert "      Fix: grads = dj.get_replica_context().all_reduce('mean', grads)" in lines[-1]


def test_errors_come_first_and_are_not_raised_one_by_one(pair):
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")
    state = train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1)
    )

    def step(params, state, x):
        return pair.run(forgetful, args=(params, x)), pair.run(train, args=(state, x))

    def train(state, x):
        return state.apply_gradients(grads={"w": state.params["w"] * x})

    with pytest.raises(CheckError, match="Got: 1 error, 1 warning") as info:
        dj.check(step, start(), state, ids(pair))
    assert [finding.level for finding in info.value.findings] == ["warning", "error"]
    assert str(info.value).index("  error: ") < str(info.value).index("  warning: ")


def test_a_right_step_passes(pair):
    def step(params, x):
        x = dj.get_replica_context().all_reduce("mean", x)
        return {"w": params["w"] - x, "b": params["b"]}

    assert dj.check(step, start(), ids(pair), strategy=pair) is None


def test_what_is_static_stays_so(pair):
    def step(x, n):
        return dj.get_replica_context().all_reduce("mean", x) + jnp.zeros(n)

    x, n = ids(pair), dj.static(3)
    assert dj.check(step, x, n, strategy=pair) is None
    assert dj.check(pair.jit(step), x, n) is None
    assert dj.check(lambda x, n: pair.run(step, args=(x, n)), x, n) is None
    assert dj.explain(step, x, n, strategy=pair).results == {"": "M"}


def test_what_is_static_is_handed_on_as_a_call_does(pair):
    seen = []

    def step(x, n, m):
        seen.append((n, m))
        return pair.run(lambda x, n: x + jnp.zeros(n), args=(x, n))

    x, n, compiled = ids(pair), dj.static(3), dj.jit(lambda x, n: x + jnp.zeros(n))
    for look in (step, functools.partial(dj.check, step), functools.partial(dj.explain, step)):
        look(x, n, 2)
    assert all(marked == n for marked, _ in seen)
    assert dj.check(compiled, 1.0, n) is None  # which a call of it takes the mark from


def test_a_struct_stands_for_an_array(pair):
    def step(x, w):
        return dj.get_replica_context().all_reduce("mean", x) + w

    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    x, w = jax.tree.map(struct, (ids(pair), jnp.ones(3)))
    assert dj.check(step, x, w, strategy=pair, rules_only=True) is None
    assert dj.explain(step, x, w, strategy=pair).arguments == {"x": "T", "w": "M"}
    with pytest.raises(CheckError, match="1 warning"):
        structs = jax.tree.map(struct, (start(), ids(pair)))
        dj.check(forgetful, *structs, strategy=pair, rules_only=True)


def test_check_is_called_outside_of_traces(pair):
    wants = "dj.check needs to be called outside of run, dj.jit and other traces"
    with pytest.raises(ContextError, match=wants):
        dj.jit(lambda x: dj.check(forgetful, start(), x, strategy=pair))(ids(pair))


# -- dj.expect ----------------------------------------------------------------


def call_run(strategy, params, x):
    return strategy.run(forgetful, args=(params, x))


def call_jit(strategy, params, x):
    return dj.jit(lambda params, x: strategy.run(forgetful, args=(params, x)))(params, x)


def call_keyword(strategy, params, x):
    return strategy.run(
        lambda x, *, params: forgetful(params, x), args=(x,), kwargs={"params": params}
    )


@pytest.mark.parametrize("call", [call_run, call_jit, call_keyword])
def test_an_argument_that_is_meant_to_differ(pair, call):
    out = call(pair, dj.expect(REASON, differs=start()), ids(pair))
    assert local(pair, out["w"]) == [[1, 1], [0, 0]]
    with pytest.raises(LocalityWarning):
        call(pair, start(), ids(pair))


def test_a_jit_in_a_jit_takes_the_wrapper(pair):
    inner = dj.jit(lambda params, x: pair.run(forgetful, args=(params, x)))
    out = dj.jit(lambda x: inner(dj.expect(REASON, differs=start()), x))(ids(pair))
    assert local(pair, out["w"]) == [[1, 1], [0, 0]]


def test_the_wrapper_means_nothing_where_nothing_differs(strategy):
    step = lambda params: params["w"] * 2
    assert strategy.run(step, args=(dj.expect(REASON, differs=start()),)).tolist() == [2, 2]
    # As an argument it is no part of the function's tree.
    assert "dj.expect('each" in repr(dj.expect(REASON, differs=1))


def test_the_reference_takes_the_wrapper_too():
    reference = dj.testing.ReferenceStrategy(2)
    out = reference.run(lambda p: p["w"], args=(dj.expect(REASON, differs=start()),))
    assert [x.tolist() for x in reference.local_results(out)] == [[1, 1], [1, 1]]


def test_a_block_can_be_entered_by_several_threads_in_any_order():
    block = dj.expect(REASON)
    in_turn = [threading.Event() for _ in range(3)]
    found = []

    def first():
        with block:
            in_turn[0].set()
            assert in_turn[1].wait(60)
        found.append(current_reason())
        in_turn[2].set()

    def second():
        assert in_turn[0].wait(60)
        with block:
            in_turn[1].set()
            assert in_turn[2].wait(60)
            found.append(current_reason())
        found.append(current_reason())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
    assert found == [None, REASON, None]


def test_a_block_silences_what_is_found_in_it(pair):
    with dj.expect("outer"), dj.expect(REASON):
        out = pair.run(forgetful, args=(start(), ids(pair)))
        [finding] = dj.explain(forgetful, start(), ids(pair), strategy=pair).findings
        dj.check(forgetful, start(), ids(pair), strategy=pair)
    assert isinstance(out["w"], dj.PerReplica) and finding.expected == REASON
    with pytest.raises(CheckError):  # the block has ended
        dj.check(forgetful, start(), ids(pair), strategy=pair)


def test_explain_shows_the_reason(pair):
    expected = dj.expect(REASON, differs=start())
    text = str(dj.explain(forgetful, expected, ids(pair), strategy=pair))
    assert "found:" in text and REASON in text
    dj.check(forgetful, expected, ids(pair), strategy=pair)


def test_only_the_wrapped_argument_is_meant(pair):
    def both(a, b, x):
        return forgetful(a, x), forgetful(b, x)

    with pytest.raises(CheckError) as info:
        dj.check(both, dj.expect(REASON, differs=start()), start(), ids(pair), strategy=pair)
    [finding] = info.value.findings
    assert "b['w']" in finding.text and "a['w']" not in finding.text


@pytest.mark.parametrize("call", [call_run, call_jit, call_keyword])
def test_a_part_of_an_argument_is_meant(pair, call):
    """As the statistics of a batch in a state, whose parameters are still looked after."""
    some = start() | {"w": dj.expect(REASON, differs=start()["w"])}
    out = call(pair, some, ids(pair))
    assert local(pair, out["w"]) == [[1, 1], [0, 0]]
    out = call(pair, {**out, "w": dj.expect(REASON, differs=out["w"])}, ids(pair))
    assert local(pair, out["w"]) == [[1, 1], [-1, -1]]
    with pytest.raises(LocalityWarning):
        call(pair, start() | {"b": dj.expect(REASON, differs=start()["b"])}, ids(pair))


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_a_reason_is_text(reason):
    with pytest.raises(TypeError, match="expect needs a reason in words") as info:
        dj.expect(reason)
    assert "Got: " in str(info.value) and "Fix: dj.expect(" in str(info.value)


def test_a_mapped_function_that_loses_values():
    """`out_axes=None` of what differs is a finding here, and a warning in a plain run."""
    strategy = dj.VirtualStrategy(2)
    step = dj.pmap(lambda w, x: w - x.mean(), in_axes=(None, 0), out_axes=None, strategy=strategy)
    args = jnp.float32(1), jnp.arange(4.0).reshape(2, 2)
    with pytest.raises(CheckError, match="warning: one value of those that differ") as info:
        dj.check(step, *args, rules_only=True)
    assert [finding.level for finding in info.value.findings] == ["warning"]
    with pytest.raises(CheckError, match="error: numbers that depend on the number of replicas"):
        dj.check(step, *args)


@pytest.mark.parametrize("method", ["check", "explain"])
def test_a_replica_function_without_a_strategy_is_told_so(pair, method):
    x = ids(pair)

    def step(x):
        return dj.get_replica_context().all_reduce("mean", x.mean())

    with pytest.raises(AttributeError) as info:
        getattr(dj, method)(step, x)
    note = f"it needs strategy=...: dj.{method}("
    assert any(note in each for each in info.value.__notes__)
    getattr(dj, method)(lambda x: pair.run(lambda x: 2 * x, args=(x,)), x)
