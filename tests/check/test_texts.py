"""For the commonest mistakes: the line that is named, the factor, and a fix that was tried."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from tests.check import problem
from tests.check.problem import (
    RULE,
    X,
    Y,
    batch_of,
    descend,
    finding_of,
    findings_of,
    is_at,
    is_right,
    loss_of,
    params,
    summed_loss,
)
from tests.diagnostics.lines import line_of

AXIS = "replica"
MEANS = "jax.lax.pmean(x, axis), ctx.all_reduce('mean', x) or reduce_op='mean'"
DESCENDS = f"{line_of(problem.__file__, 'descends')} (descend.<locals>.<lambda>)"
SUMS = "jax.lax.psum(x, axis), ctx.all_reduce('sum', x) or reduce_op='sum'"


def find(strategy, step):
    return finding_of(step, params(), *batch_of(strategy), strategy=strategy)


def test_a_sum_for_a_mean(strategy):
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        grads = lax.psum(grads, AXIS)  # sums means
        return descend(params, grads)

    found = find(strategy, step)
    line = line_of(__file__, "sums means")
    where = f"{line} (test_a_sum_for_a_mean.<locals>.step)"
    assert (found.level, found.rule, found.source) == ("error", RULE, where)
    name = "test_a_sum_for_a_mean.<locals>.step"
    assert found.text.splitlines() == [
        f"{name} needs to compute the same for 4 replicas as for one with the whole batch.",
        "  Got: ['b'] differs, ['w'] differs, by the factor 4.",
        f"  Why: the first line whose result is not that of one replica: {DESCENDS}; it takes a "
        f"value that is equal on all replicas, R times too large; made by psum at {where}.",
        f"  Fix: a mean in place of the sum at {where}: {MEANS}",
    ]


def test_a_sum_for_a_mean_by_the_optimizer(strategy):
    """The line is that of the argument to change. One variable: of several, see below."""
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), reduce_op="sum")  # the optimizer's sum
    with strategy.scope():
        w = dj.Variable(jnp.ones(3), name="w")
        optimizer.init([w])

    def step(x, y):
        loss = lambda w: jnp.mean((x @ w - y) ** 2)
        optimizer.apply_gradients([(jax.grad(loss)(w.value), w)])

    found = finding_of(step, *batch_of(strategy), strategy=strategy)
    assert "Got: variable 'w' differs, by the factor 4." in found.text
    assert is_at(found, __file__, "the optimizer's sum")
    line = line_of(__file__, "the optimizer's sum")
    assert f"reduce_op='mean'; or by an argument of what is made at {line}" in found.text


def test_one_mistake_of_an_optimizer_is_one_finding(strategy):
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), reduce_op="sum")
    with strategy.scope():
        variables = {k: dj.Variable(v, name=k) for k, v in params().items()}
        optimizer.init([*variables.values()])

    def step(x, y):
        grads = jax.grad(loss_of)({k: v.value for k, v in variables.items()}, x, y)
        optimizer.apply_gradients([(grads[k], v) for k, v in variables.items()])

    found = finding_of(step, *batch_of(strategy), strategy=strategy)
    assert MEANS in found.text


def make_averaging_step():
    def step(params, x, y):
        grads = jax.grad(summed_loss)(params, x, y)
        grads = lax.pmean(grads, AXIS)  # averages shares
        return descend(params, grads)

    return step


def test_a_mean_for_a_sum_of_shares(strategy):
    args = params(), *batch_of(strategy)
    found = findings_of(make_averaging_step(), *args, strategy=strategy)
    assert all("by the factor 0.25" in f.text and SUMS in f.text for f in found)


def test_a_mean_for_a_sum_of_shares_has_its_line_and_its_fix(strategy):
    found = find(strategy, make_averaging_step())
    assert is_at(found, __file__, "averages shares")
    line = line_of(__file__, "averages shares")
    assert f"Fix: a sum in place of the mean at {line}" in found.text


def make_forgetful_step():
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        return descend(params, grads)  # forgets

    return step


def test_a_forgotten_reduction(strategy):
    args = params(), *batch_of(strategy)
    found = findings_of(make_forgetful_step(), *args, strategy=strategy)
    [error] = [f for f in found if f.level == "error"]
    assert "['b'] is another value on each replica, ['w'] is another" in error.text
    assert "Fix: the mean over the replicas of what " in error.text and MEANS in error.text


def test_a_forgotten_reduction_is_one_finding(strategy):
    find(strategy, make_forgetful_step())


def test_a_reduction_that_one_gradient_misses(strategy):
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        return descend(params, grads | {"w": lax.pmean(grads["w"], AXIS)})

    found = findings_of(step, params(), *batch_of(strategy), strategy=strategy)
    [error] = [f for f in found if f.level == "error"]
    assert "['b'] is another value on each replica." in error.text and "['w']" not in error.text


def test_reduced_twice(strategy):
    def step(params, x, y):
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
        grads = lax.psum(grads, AXIS)  # once more
        return descend(params, grads)

    found = find(strategy, step)
    assert is_at(found, __file__, "once more")
    assert "by the factor 4" in found.text and "Fix: a mean in place of the sum at " in found.text


def test_a_mean_twice_is_a_mean(strategy):
    def step(params, x, y):
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
        return descend(params, lax.pmean(grads, AXIS))

    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


def test_clipped_before_it_is_reduced(strategy):
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)  # clips its own
        return descend(params, lax.pmean(grads, AXIS))

    found = find(strategy, step)
    assert found.rule == RULE and str(__file__) in found.source


def test_a_square_root_of_a_local_mean(strategy):
    def step(params, x, y):
        mean = lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2)  # the mean
        loss = lambda p: jnp.sqrt(mean(p))  # the root
        return descend(params, lax.pmean(jax.grad(loss)(params), AXIS))

    found = find(strategy, step)
    assert is_at(found, __file__, "the mean")
    assert f"not that of one replica: {line_of(__file__, 'the root')} " in found.text


def test_a_count_of_a_replica_s_own_in_a_quotient(strategy):
    """The numerator may be a share; what it is divided by is to be that of all."""

    def step(params, x, y):
        positives = jnp.sum(jnp.abs(y))  # counts its own

        def loss(p):
            return jnp.sum((x @ p["w"] + p["b"] - y) ** 2) / positives

        return descend(params, lax.pmean(jax.grad(loss)(params), AXIS))

    found = find(strategy, step)
    assert is_at(found, __file__, "counts its own")
    where = f"{line_of(__file__, 'counts its own')} "
    assert f"Fix: the mean over the replicas of what {where}" in found.text


def test_a_decision_by_one_replica_s_rows(strategy):
    def step(params, x, y):
        is_small = jnp.all(jnp.abs(y) < 1)  # of its own
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
        kept = jax.tree.map(lambda g: jnp.where(is_small, g, 0.0), grads)
        return descend(params, kept)

    assert (np.abs(Y.reshape(4, 2)) < 1).all(1).any(), "one replica decides otherwise"
    found = find(strategy, step)
    assert is_at(found, __file__, "of its own")
    assert "the smallest over the replicas of" in found.text and "lax.pmin" in found.text


def test_a_share_beside_a_mean(strategy):
    def step(params, x, y):
        def loss(p):
            penalty = jnp.sum(jnp.abs(x @ p["w"])) / len(X)
            return loss_of(p, x, y) + 0.5 * penalty  # adds a share

        return descend(params, lax.pmean(jax.grad(loss)(params), AXIS))

    found = find(strategy, step)
    assert is_at(found, __file__, "adds a share")
    assert "it adds values of which one is R times as large as the other" in found.text
    assert "Fix: ctx.num_replicas_in_sync * (...) of what " in found.text


def test_a_reduction_in_cross_replica_code(strategy):
    def gradients(params, x, y):
        return jax.grad(loss_of)(params, x, y)

    def step(params, x, y):
        grads = strategy.run(gradients, args=(params, x, y))
        return descend(params, strategy.reduce("sum", grads))  # sums in the open

    found = finding_of(step, params(), *batch_of(strategy))
    line = line_of(__file__, "sums in the open")
    assert is_at(found, __file__, "sums in the open")
    assert f"Fix: a mean in place of the sum at {line}" in found.text


def test_a_reduction_in_a_merge(strategy):
    def merge(strategy, grads):
        return strategy.reduce("sum", grads)  # sums in a merge

    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        grads = dj.get_replica_context().merge_call(merge, args=(grads,))
        return descend(params, grads)

    found = find(strategy, step)
    assert is_at(found, __file__, "sums in a merge")
    assert "Fix: a mean in place of the sum at " in found.text


def test_what_comes_of_a_mistake_is_no_finding_of_its_own(strategy):
    with strategy.scope():
        options = {"trainable": False, "aggregation": dj.VariableAggregation.SUM}
        count = dj.Variable(jnp.float32(1), name="count", **options)  # counts R times

    def step(params, x, y):
        rate = 0.1 / count.value
        count.assign_add(jnp.float32(1))
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
        return jax.tree.map(lambda p, g: p - rate / count.value * g, params, grads)

    found = find(strategy, step)
    assert is_at(found, __file__, "counts R times")
    assert "variable 'count' differs" in found.text and "['w'] differs" in found.text


def test_a_reduction_less_is_told_where_it_mends(strategy):
    """Of gradients that are weighted by a replica's number of rows, that number is its own."""

    def step(params, x, y, mask):
        count = lax.pmean(mask.sum(), AXIS)  # weighs all alike
        loss = lambda p: jnp.sum(mask * (x @ p["w"] + p["b"] - y) ** 2) / mask.sum()
        grads = jax.tree.map(lambda g: count * g, jax.grad(loss)(params))
        grads = lax.psum(grads, AXIS)
        total = lax.psum(mask.sum(), AXIS)
        return descend(params, jax.tree.map(lambda g: g / total, grads))

    mask = np.array([1, 1, 1, 0, 1, 1, 0, 1], np.float32)
    found = finding_of(step, params(), *batch_of(strategy, X, Y, mask), strategy=strategy)
    assert is_at(found, __file__, "weighs all alike")
    line = line_of(__file__, "weighs all alike")
    assert f"Fix: each replica's own value in place of the mean at {line} " in found.text


def test_a_loss_is_well_until_something_takes_it_that_is_not_linear(strategy):
    """Its value is each replica's own, also in a gradient of which nobody asks for the value."""

    def step(params, x, y):
        def loss_of(params):
            gap = jnp.mean(x @ params["w"] - y)  # makes it
            return gap**2 + params["b"] ** 2  # takes it

        return descend(params, lax.pmean(jax.grad(loss_of)(params), AXIS))

    found = find(strategy, step)
    assert is_at(found, __file__, "makes it")
    assert f"not that of one replica: {line_of(__file__, 'takes it')} " in found.text
    assert "made at " in found.text and ", before anything reduces it." in found.text


def test_a_number_of_python_s_has_the_line_that_returns_it(strategy):
    def step(params, x, y):
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), AXIS)
        return descend(params, grads), jnp.float32(1.5 * len(x))  # returns it

    found = find(strategy, step)
    assert is_at(found, __file__, "returns it")
    assert "Why: it is a number that Python computes, as it does of x.shape, by no" in found.text


def test_an_argument_of_a_variable_is_told_at_the_variable(strategy):
    with strategy.scope():
        options = {"aggregation": dj.VariableAggregation.ONLY_FIRST_REPLICA, "trainable": False}
        peak = dj.Variable(jnp.zeros(3), name="peak", **options)  # one replica's

    def step(x, y):
        peak.assign(0.9 * peak.value + 0.1 * x.mean(0))

    found = finding_of(step, *batch_of(strategy), strategy=strategy)
    assert is_at(found, __file__, "one replica's")
    line = line_of(__file__, "one replica's")
    assert f"; or by an argument of what is made at {line}" in found.text


def test_a_state_that_the_next_step_reads(strategy):
    """Its components are right in the mean; the step that reads them shows that they are not."""
    with strategy.scope():
        options = {"trainable": False, "aggregation": dj.VariableAggregation.MEAN}
        on_read = dj.VariableSynchronization.ON_READ
        center = dj.Variable(jnp.zeros(3), name="center", synchronization=on_read, **options)

    def step(params, x, y):
        grads = jax.grad(loss_of)(params, jnp.tanh(x - center.value), y)
        center.assign(x.mean(0))  # of a part
        return descend(params, lax.pmean(grads, AXIS))

    found = find(strategy, step)
    assert is_at(found, __file__, "of a part")


def test_statistics_of_a_replica_s_own_rows(strategy):
    def step(params, x, y):
        mean, deviation = x.mean(0), x.std(0)  # its own
        grads = jax.grad(loss_of)(params, (x - mean) / deviation, y)
        return descend(params, lax.pmean(grads, AXIS))

    found = find(strategy, step)
    assert str(__file__) in found.source or "_methods" in found.source


def test_two_mistakes_are_two_findings(strategy):
    def step(params, seen, x, y):
        grads = lax.psum(jax.grad(loss_of)(params, x, y), AXIS)  # the first
        seen = seen + lax.pmean(jnp.float32(len(x)), AXIS)  # the second
        return descend(params, grads), seen

    args = params(), jnp.float32(0), *batch_of(strategy)
    found = findings_of(step, *args, strategy=strategy)
    assert len(found) == 2
    assert any(is_at(f, __file__, "the first") for f in found)
    assert any("[1] differs" in f.text and "by the factor 0.25" in f.text for f in found)


def test_the_error_says_how_many_findings(strategy):
    step = make_averaging_step()
    with pytest.raises(dj.errors.CheckError) as caught:
        dj.check(step, params(), *batch_of(strategy), strategy=strategy)
    lines = str(caught.value).splitlines()
    name = "make_averaging_step.<locals>.step"
    assert lines[0] == f"{name} needs to pass dj.check."
    assert lines[1].startswith("  Got: ") and "error" in lines[1]
    assert lines[2:4] == [
        "  Why: such steps train, but not as one device with the whole batch would.",
        "  Fix: as each finding says; or, where it is meant: with dj.expect(reason)",
    ]
    assert lines[4].startswith(f"  error: {RULE}, at ")


def test_what_is_excused_is_told_beside_what_is_wrong(strategy):
    """The number R in the code may stand for the number of replicas: then the loss is right."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return descend(params, lax.psum(grads, AXIS)), lax.psum(loss, AXIS) / 4

    found = findings_of(step, params(), *batch_of(strategy), strategy=strategy)
    [note] = [f for f in found if f.level == "note"]
    assert "[1] (a number in the code that is R, or 1 / R)" in note.text


def test_values_that_differ_by_factors_of_their_own_are_told_with_them(strategy):
    def step(params, x, y):
        grads = lax.psum(jax.grad(loss_of)(params, x, y), AXIS)
        return {"w": params["w"] - 0.1 * grads["w"], "b": params["b"] - 0.1 * grads["b"] ** 2}

    text = finding_of(step, params(), *batch_of(strategy), strategy=strategy).text
    assert "Got: ['b'] differs by the factor 16, ['w'] differs by the factor 4.\n" in text


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_statistics_of_a_batch_norm(strategy, library):
    flax = pytest.importorskip(f"flax.{library}")

    def make(axis_name=None):
        if library == "nnx":
            return lambda x: flax.BatchNorm(3, axis_name=axis_name, rngs=flax.Rngs(0))(x)
        norm = flax.BatchNorm(use_running_average=False, axis_name=axis_name)
        variables = norm.init(jax.random.key(0), X)
        return lambda x: norm.apply(variables, x, mutable=["batch_stats"])[0]

    def step_with(norm, reason=None):
        def step(w, x):
            def loss(w):
                if reason is None:
                    return jnp.mean((norm(x) @ w - 1) ** 2)
                with dj.expect(reason):
                    rows = norm(x)
                return jnp.mean((rows @ w - 1) ** 2)

            return w - 0.1 * lax.pmean(jax.grad(loss)(w), AXIS)

        return step

    (x,) = batch_of(strategy, X)
    given = {"strategy": strategy}
    text = finding_of(step_with(make()), jnp.ones(3), x, **given).text
    assert "Fix: BatchNorm(..., axis_name=strategy.axis_name), for the statistics of all" in text
    assert "with dj.expect(reason) around its call" in text
    assert is_right(step_with(make(strategy.axis_name)), jnp.ones(3), x, **given)
    assert is_right(step_with(make(), "local statistics"), jnp.ones(3), x, **given)


def pairs_loss(params, x, y, gather=lambda rows: rows, first=0):
    """A contrastive loss: which of all y belongs to each x."""
    scores = jnp.tanh(x @ params["w"]) @ gather(y).T  # pairs
    own = first + jnp.arange(len(x))
    return optax.softmax_cross_entropy_with_integer_labels(scores, own).mean()


def test_rows_that_are_compared_with_those_of_one_replica(strategy):
    """As in CLIP. The fix is taken to the letter."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(2, 12, 5)).astype(np.float32)
    (batch,) = strategy.distribute_dataset([tuple(rows)])
    params = {"w": random.normal(size=(5, 5)).astype(np.float32)}

    def wrong(params, x, y):
        return descend(params, lax.pmean(jax.grad(pairs_loss)(params, x, y), AXIS))

    def right(params, x, y):
        ctx = dj.get_replica_context()
        gather = lambda y: ctx.all_gather(y, axis=0)
        first = ctx.replica_id_in_sync_group * len(y)
        grads = jax.grad(pairs_loss)(params, x, y, gather, first)
        return descend(params, lax.pmean(grads, AXIS))

    found = finding_of(wrong, params, *batch, strategy=strategy)
    assert found.source == f"{line_of(__file__, 'pairs')} (pairs_loss)"
    assert found.text.splitlines()[-1] == (
        "  Fix: ctx.all_gather(y, axis=0) of the rows that each one is compared with; its own are "
        "number ctx.replica_id_in_sync_group * len(y) and following"
    )
    dj.check(right, params, *batch, strategy=strategy)
