"""Facts of replica values: right programs that look like wrong ones, lines, and reasons."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax._src.lint.findings import expected_state_fix
from distjax.errors import CheckError, ReductionWarning
from tests.diagnostics.lines import line_of
from tests.wrong_programs.program import (
    BATCH,
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    masks,
    mean,
    require_silence,
    total,
    weights,
)

R = 2


@pytest.fixture(scope="module")
def two():
    return dj.VirtualStrategy(R)


def optimizer_of_shares(s):
    """An optimizer that sums, and a mean over R."""
    with s.scope():
        w = dj.Variable(weights(), name="w")
    optimizer = dj.optim.Optimizer(optax.adam(0.1))
    optimizer.init([w])
    return lambda _, x: optimizer.apply_gradients([(gradient(w.value, x) / R, w)])


def sum_of_shares(s):
    return lambda w, x: w - 0.1 * total(gradient(w, x) / ctx().num_replicas_in_sync)


def divided_after_the_sum(s):
    return lambda w, x: w - 0.1 * (total(gradient(w, x)) / R)


def mean_in_the_loss_and_of_the_gradient(s):
    return lambda w, x: w - 0.1 * mean(jax.grad(lambda w: mean(loss_of(w, x)))(w))


def penalty_over_the_replicas(s):
    loss = lambda w, x: dj.losses.average_loss(errors_of(w, x)) + 0.01 * jnp.sum(w**2) / R
    return lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))


def half_a_mean(s):
    return lambda w, x: w - 0.1 * mean(jax.grad(lambda w: 0.5 * loss_of(w, x))(w))


def sum_over_outputs_and_a_global_batch(s):
    """As many elements on a replica as examples on all: no mean of them."""

    def loss(w, x):
        return jnp.sum(jnp.stack([x @ w, x @ w - 1], 1) ** 2) / (BATCH * R)

    return lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))


def count_of_the_examples(s):
    return lambda w, x: total(jnp.sum(errors_of(w, x))) / total(jnp.float32(x.shape[0]))


def momentum_given_as_equal(s):
    def step(w, x):
        velocity = 0.9 * jnp.ones_like(w) + mean(gradient(w, x))
        return w - 0.1 * velocity, velocity

    return step


def first_replica_with_equal_writes(s):
    with s.scope():
        w = dj.Variable(weights(), name="w", aggregation=FIRST)
    return lambda _, x: w.assign_sub(0.1 * mean(gradient(w.value, x)))


def mean_variable_of_a_reduced_value(s):
    with s.scope():
        w = dj.Variable(weights(), name="w", aggregation=MEAN)
    return lambda _, x: w.assign_sub(0.1 * mean(gradient(w.value, x)))


def sum_and_count_in_variables(s):
    with s.scope():
        losses, steps = (dj.Variable(0.0, name=n, aggregation=SUM) for n in ("losses", "steps"))

    def step(w, x):
        losses.assign_add(loss_of(w, x))
        steps.assign_add(jnp.ones(()))

    return step


def examples_clipped_and_summed(s):
    """Differential privacy: each example's gradient is clipped, not each replica's."""

    def step(w, x):
        grads = jax.vmap(jax.grad(lambda w, x: (x @ w - 1) ** 2), (None, 0))(w, x)
        norms = jnp.sqrt(jnp.sum(grads**2, axis=1, keepdims=True))
        return w - 0.1 * mean(jnp.mean(grads * jnp.minimum(1.0, 1 / norms), axis=0))

    return step


def examples_clipped_one_after_the_other(s):
    def step(w, x):
        def add(sum_, row):
            grads = gradient(w, row[None])
            return sum_ + grads * jnp.minimum(1.0, 0.5 / jnp.sqrt(jnp.sum(grads**2))), None

        grads, _ = jax.lax.scan(add, jnp.zeros_like(w), x)
        return w - 0.1 * total(grads) / (x.shape[0] * s.num_replicas_in_sync)

    return step


def clip_after_the_mean(s):
    tx = optax.chain(dj.optim.reduce_gradients(), optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    return lambda w, x: optax.apply_updates(w, tx.update(gradient(w, x), tx.init(w), w)[0])


def equal_noise_on_equal_gradients(s):
    def step(w, x):
        noise = jax.random.normal(jax.random.key(0), w.shape)
        return w - 0.1 * (mean(gradient(w, x)) + 0.01 * noise)

    return step


def layer_norm(s):
    def loss(w, x):
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return loss_of(w, x)

    return lambda w, x: w - 0.1 * mean(jax.grad(loss)(w, x))


def synchronized_batch_norm(s):
    def loss(w, x):
        first, second = mean((x.mean(0), (x**2).mean(0)))
        return loss_of(w, (x - first) / jnp.sqrt(second - first**2 + 1e-5))

    return lambda w, x: w - 0.1 * mean(jax.grad(loss)(w, x))


def weighted_by_the_local_count(s):
    def step(w, x):
        count = jnp.sum(x[:, 0] > 0)
        own = jnp.sum(errors_of(w, x)) / jnp.maximum(count, 1)
        return total(own * count) / total(count)

    return step


def masked_by_rank(s):
    """As in a masked autoencoder: each row, and so each replica, has as many that are masked."""

    def step(w, x):
        order = jnp.argsort(x, axis=1)
        masked = (jnp.argsort(order, axis=1) >= 1).astype(jnp.float32)
        return mean(jnp.sum((x * w) ** 2 * masked) / masked.sum())

    return step


def variances_within_and_between(s):
    """As for R-hat of Markov chains: what the means differ by is told of by itself."""

    def step(w, x):
        within, means = mean(x.var(0)), jax.lax.all_gather(x.mean(0), s.axis_name)
        return within + means.var(0)

    return step


def law_of_total_variance(s):
    return lambda w, x: mean(x.var(0)) + mean(x.mean(0) ** 2) - mean(x.mean(0)) ** 2


def critic_with_a_bias(s):
    """The bias of a critic has the gradient 1 - 1 on every replica."""
    loss = lambda w, x: jnp.mean(x @ w + w[0]) - jnp.mean(2 * x @ w + w[0])
    only_bias = lambda b, x: jnp.mean(x + b) - jnp.mean(2 * x + b)

    def step(w, x):
        bias = w[0] - 0.1 * mean(jax.grad(only_bias)(w[0], x))
        return w - 0.1 * mean(jax.grad(loss)(w, x)) + bias

    return step


def weighted_shares(s):
    def loss(w, x):
        own = 2 * loss_of(w, x) / s.num_replicas_in_sync
        return own + 0.3 * jnp.mean((x @ w) ** 4) / s.num_replicas_in_sync

    return lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))


def rate_over_the_replicas(s):
    return lambda w, x: w - (0.3 / s.num_replicas_in_sync) * total(gradient(w, x))


def weight_over_the_replicas(s):
    loss = lambda w, x: (0.3 / s.num_replicas_in_sync) * loss_of(w, x)
    return lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))


def _accumulated(w, x, weigh=lambda loss: loss):
    loss = lambda w, x: weigh(loss_of(w, x))
    halves = x.reshape(2, -1, x.shape[-1])
    grads, _ = jax.lax.scan(
        lambda sum_, x: (sum_ + jax.grad(loss)(w, x), None), jnp.zeros_like(w), halves
    )
    return grads


def microbatches_divided_after_the_sum(s):
    count = 2 * s.num_replicas_in_sync
    return lambda w, x: w - 0.1 * total(_accumulated(w, x)) / count


def microbatches_times_a_share_of_all(s):
    return lambda w, x: w - 0.1 * (total(_accumulated(w, x)) * (0.5 / s.num_replicas_in_sync))


def microbatches_weighted_in_the_loss(s):
    weigh = lambda loss: loss / (2 * s.num_replicas_in_sync)
    return lambda w, x: w - 0.1 * total(_accumulated(w, x, weigh))


def component_beside_an_argument(s):
    """A read of a replica's own component, that an argument is added to."""
    with s.scope():
        seen = dj.Variable(np.zeros(3, np.float32), synchronization=ON_READ, aggregation=SUM)
    return lambda w, x: seen.value + w


def dropout_of_an_equal_value(s):
    """A mask per replica: nothing is added to the argument."""
    return lambda w, x: (dj.layers.dropout(jax.random.key(0), 0.5, w), jnp.where(x > 0, w, 0))


TRAPS = [
    component_beside_an_argument,
    dropout_of_an_equal_value,
    optimizer_of_shares,
    sum_of_shares,
    divided_after_the_sum,
    mean_in_the_loss_and_of_the_gradient,
    penalty_over_the_replicas,
    half_a_mean,
    sum_over_outputs_and_a_global_batch,
    count_of_the_examples,
    momentum_given_as_equal,
    first_replica_with_equal_writes,
    mean_variable_of_a_reduced_value,
    sum_and_count_in_variables,
    examples_clipped_and_summed,
    examples_clipped_one_after_the_other,
    clip_after_the_mean,
    equal_noise_on_equal_gradients,
    layer_norm,
    synchronized_batch_norm,
    weighted_by_the_local_count,
    masked_by_rank,
    variances_within_and_between,
    law_of_total_variance,
]

#: Those with a factor that is, or has to do with, the number of replicas.
FACTORS = [
    critic_with_a_bias,
    weighted_shares,
    rate_over_the_replicas,
    weight_over_the_replicas,
    microbatches_divided_after_the_sum,
    microbatches_times_a_share_of_all,
    microbatches_weighted_in_the_loss,
]


@pytest.mark.parametrize("trap", TRAPS + FACTORS, ids=lambda trap: trap.__name__)
def test_what_only_looks_wrong_is_silent(two, trap):
    require_silence(two, trap(two), weights(), inputs(two))


@pytest.mark.parametrize("trap", FACTORS, ids=lambda trap: trap.__name__)
def test_factors_are_told_from_the_number_of_replicas(trap):
    for num_replicas in (3, 4, 8):
        strategy = dj.VirtualStrategy(num_replicas)
        require_silence(strategy, trap(strategy), weights(), inputs(strategy))


# -- lines and reasons ---------------------------------------------------------


def findings(step, *args, strategy):
    with pytest.raises(CheckError) as info:
        dj.check(step, *args, strategy=strategy, rules_only=True)
    return info.value.findings


def test_both_lines_are_named(two):
    def step(w, x):
        grads = jnp.clip(gradient(w, x), -1, 1)  # the clip
        return w - 0.1 * mean(grads)

    [finding] = findings(step, weights(), inputs(two), strategy=two)
    assert line_of(__file__, "the clip") in finding.text
    assert finding.text.count(".py:") == 2


def test_one_line_for_each_call_of_a_cached_function(two):
    def step(w, x):
        key = jax.random.key(0)
        a = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)  # first mask
        b = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)  # second mask
        return mean(jnp.mean(a) + jnp.mean(b))

    found = findings(step, weights(), inputs(two), strategy=two)
    lines = [finding.source.split(" ")[0] for finding in found]
    assert lines == [line_of(__file__, "first mask"), line_of(__file__, "second mask")]


def test_a_block_in_the_step_is_meant(two):
    def step(w, x):
        with dj.expect("clipped by replica, as in the paper"):
            grads = jnp.clip(gradient(w, x), -1, 1)
        return w - 0.1 * mean(grads)

    args = weights(), inputs(two)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        two.run(step, args=args)
    dj.check(step, *args, strategy=two, rules_only=True)
    [finding] = dj.explain(step, *args, strategy=two).findings
    assert finding.expected == "clipped by replica, as in the paper"


def test_why_a_callback_is_taken_to_be_equal(two):
    def step(w, x):
        with dj.expect("the vocabulary is a file that all have", differs=()):
            return jax.pure_callback(lambda w: w, w, w, vmap_method="sequential")

    [run] = dj.explain(step, weights(), inputs(two), strategy=two).runs
    [(_, letter, why)] = run.why
    assert letter == "M"
    assert why.startswith("pure_callback at ") and why.endswith("is a file that all have")


@pytest.mark.parametrize("wrap", [lambda f: f, dj.jit], ids=["run", "jit"])
def test_the_warning_is_given_by_a_plain_run(two, wrap):
    step = lambda w, x: w - 0.1 * total(gradient(w, x))
    run = wrap(lambda w, x: two.run(step, args=(w, x)))
    with pytest.warns(ReductionWarning, match="replica's batch needs to be averaged"):
        run(weights(), inputs(two))


@pytest.mark.parametrize("depth", [1, 5])
def test_loops_in_loops_are_walked_to_their_end(two, depth):
    def nest(w, x, depth):
        if depth == 0:
            return w - 0.1 * total(gradient(w, x))
        return jax.lax.scan(lambda w, _: (nest(w, x, depth - 1), None), w, None, length=2)[0]

    step = lambda w, x: nest(w, x, depth)
    [finding] = findings(step, weights(), inputs(two), strategy=two)
    assert finding.rule == "a sum of local means"


def test_state_that_is_meant_to_differ_is_wrapped_as_the_text_says(two):
    def step(state, x):
        w = state["w"] - 0.1 * mean(gradient(state["w"], x))
        return {"w": w, "seen": 0.9 * state["seen"] + 0.1 * x.mean(0)}

    state = {"w": weights(), "seen": weights()}
    [finding] = findings(step, state, inputs(two), strategy=two)
    assert finding.text.endswith("dj.expect(reason, differs=state['seen'])")
    meant = state | {"seen": dj.expect("statistics of local batches", differs=state["seen"])}
    dj.check(step, meant, inputs(two), strategy=two, rules_only=True)

    def forgetful(state, x):
        w = state["w"] - 0.1 * gradient(state["w"], x)
        return {"w": w, "seen": 0.9 * state["seen"] + 0.1 * x.mean(0)}

    texts = [f.text for f in findings(forgetful, meant, inputs(two), strategy=two)]
    assert any("at state['w']" in text for text in texts)
    # All of it differs: the whole state is named.
    texts = [f.text for f in findings(forgetful, state, inputs(two), strategy=two)]
    assert any(text.endswith("dj.expect(reason, differs=state)") for text in texts)


@pytest.mark.parametrize(
    "differing, equal, named",
    [
        (["s"], [], "s)"),
        (["s['w']", "s['b']"], ["x"], "s)"),
        (["s[1]", "s[2][0]", "s[2][1]"], ["s[0]['w']"], "s[1]), and the same for s[2]"),
        (["s.stats['a']", "s.stats['b']"], ["s.params['a']", "s.step"], "s.stats)"),
        (["s.a[0]", "s.b"], ["s.a[1]"], "s.a[0]), and the same for s.b"),
        (["s[<flat index 1>][0]", "s[<flat index 1>][1]"], ["s[<flat index 0>]", "m"], "s)"),
        (["s['it's.x']"], ["s['y']"], "s['it's.x'])"),
        (
            [f"s[{i}]" for i in range(6)],
            ["s[6]"],
            "s[0]), and the same for s[1], s[2], s[3] and 2 more parts",
        ),
    ],
)
def test_the_largest_parts_that_differ_as_a_whole_are_named(differing, equal, named):
    assert expected_state_fix(differing, equal).endswith(f"dj.expect(reason, differs={named}")


def test_parameters_averaged_after_adam_are_told_of_its_normalization(two):
    tx = optax.adam(0.1)

    def step(w, x):
        updates, _ = tx.update(gradient(w, x), tx.init(w), w)
        return mean(optax.apply_updates(w, updates))

    with pytest.warns(ReductionWarning) as warned:
        two.run(step, args=(weights(), inputs(two)))
    text = str(warned[0].message)
    assert text.startswith(
        "a reduction over the replicas needs gradients as they are, to clip or normalize afterwards"
    )
    assert "Got: a reduction of clipped or normalized gradients (Adam's updates are), at " in text
    assert "all_reduce('mean', grads), then clip or update; in an optax chain" in text


def test_a_read_mask_is_enough(two):
    step = lambda w, batch: total(dj.losses.average_loss(errors_of(w, batch.data), batch.mask))
    dj.check(step, weights(), dj.Batch(inputs(two), masks(two)), strategy=two, rules_only=True)
    only_outputs = lambda w, batch: batch.data @ w
    dj.check(
        only_outputs, weights(), dj.Batch(inputs(two), masks(two)), strategy=two, rules_only=True
    )


def test_metrics_of_flax_read_masks_too(two):
    metric = nnx.metrics.Average()

    def step(w, batch):
        metric.update(values=errors_of(w, batch.data))

    batch = dj.Batch(inputs(two), masks(two))
    [finding] = findings(step, weights(), batch, strategy=two)
    assert finding.rule == "padded examples counted"


def test_what_is_read_of_an_object_is_no_update_of_it(two):
    """Its state is updated in place; that of an array beside it, by a result."""
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    dj.check(
        lambda m, x: m.kernel[...] + x.sum(), linear, inputs(two), strategy=two, rules_only=True
    )
    with pytest.raises(CheckError, match="(?s)1 note.*an update of w that differs"):
        dj.check(
            lambda m, w, x: (m.kernel[...] + x.sum(), w + x.sum()),
            *(linear, weights(), inputs(two)),
            strategy=two,
            rules_only=True,
        )


@pytest.mark.parametrize("weight", [0.5, 0.3, 3.0, 0.05, 0.01, 0.125])
@pytest.mark.parametrize("gradients", ["whole", "accumulated"])
def test_a_weight_does_not_hide_a_sum_of_means(weight, gradients):
    four = dj.VirtualStrategy(4)
    compute = jax.grad(lambda w, x: weight * loss_of(w, x))
    if gradients == "accumulated":
        compute = lambda w, x: _accumulated(w, x, lambda loss: weight * loss)

    def step(w, x):
        grads = ctx().all_reduce("sum", compute(w, x))  # the sum
        return w - 0.1 * grads

    [finding] = findings(step, weights(), inputs(four), strategy=four)
    assert finding.rule == "a sum of local means"
    assert line_of(__file__, "the sum") in finding.text


def test_one_replica_is_looked_at_as_one_of_several():
    one = dj.VirtualStrategy(1)
    step = lambda w, x: w - 0.1 * total(gradient(w, x))
    x = one.distribute_values_from_function(lambda _: np.ones((BATCH, 3), np.float32))
    with pytest.raises(dj.errors.CheckError, match="one replica hides it; with more, the sum"):
        dj.check(step, weights(), x, strategy=one, rules_only=True)


def test_why_a_value_is_equal_or_not(two):
    with two.scope():
        seen = dj.metrics.Sum("seen")

    def step(w, x):
        grads = gradient(w, x)  # differs here
        seen.update(x)  # the metric
        results = {"own": grads, "all": mean(grads), "old": w * 2, "sum": total(grads)}  # results
        return {**results, "rows": x @ w}

    [run] = dj.explain(step, weights(), inputs(two), strategy=two).runs
    why = {name: (letter, text) for name, letter, text in run.why}
    assert why["['old']"] == ("M", "made of equal values only")
    assert why["['all']"][0] == "M" and why["['all']"][1].startswith("psum at ")
    letter, chain = why["['own']"]
    assert letter == "T" and chain.startswith("x, a value per replica -> ")
    assert chain.endswith(" (a share, R times too large: their mean is what one replica computes)")
    assert why["['sum']"][1].endswith(" (R times what one replica computes)")
    assert why["['rows']"][1].endswith(" (rows of the batch)")
    assert why["variable 'seen/total'"][0] == "T"


def test_explanations_are_json_too(two):
    import json

    found = dj.explain(lambda w, x: mean(gradient(w, x)), weights(), inputs(two), strategy=two)
    read = json.loads(found.to_json(indent=1))
    assert read["runs"][0]["why"][0][1] == "M" and read["findings"] == []
    assert "why:" in str(found) and "why" in found._repr_html_()


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: jnp.float32(1e30) ** 8 + x,
        lambda x: jnp.zeros(()) ** -1 + x,
        lambda x: jax.lax.optimization_barrier((x, x * 2))[1],
        lambda x: jnp.inf * jnp.ones(()) / 3 + x,
        lambda x: jnp.select([x > 0, x > 1], [x, x * 2], 0.0),
        lambda x: jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x),
        lambda x: jnp.linalg.svd(x)[1] + jnp.fft.rfft(x).real.sum(),
        lambda x: jax.lax.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] * 2), (0, x))[1],
        lambda x: x[:0].sum() + jnp.zeros((0, 3)).mean(0),
    ],
)
def test_odd_programs_are_walked(two, odd):
    dj.check(
        lambda w, x: (odd(x), mean(odd(x))), weights(), inputs(two), strategy=two, rules_only=True
    )


# -- the fixes, to the letter ----------------------------------------------------


def _text_of(strategy, step, *args):
    with pytest.warns(ReductionWarning) as caught:
        strategy.run(step, args=args)
    return str(caught[0].message)


def test_a_fix_names_what_reduces():
    s = dj.VirtualStrategy(4)
    x = inputs(s)
    means = lambda w, x: gradient(w, x)
    in_code = lambda w, x: w - 0.1 * total(means(w, x))
    assert "Fix: ctx.all_reduce('mean', grads); in an optax chain" in _text_of(
        s, in_code, weights(), x
    )
    for op, grads in (("sum", means), ("sum", lambda w, x: mean(means(w, x)))):
        with s.scope():
            v = dj.Variable(weights())
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), op)
        optimizer.init([v])

        def step(x, v=v, optimizer=optimizer, grads=grads):
            optimizer.apply_gradients([(grads(v.value, x), v)])

        assert _text_of(s, step, x).endswith("Fix: dj.optim.Optimizer(tx, reduce_op='mean')")
    with s.scope():
        v = dj.Variable(weights(), name="v", aggregation=SUM)
    text = _text_of(s, lambda x: v.assign_sub(means(v.value, x)), x)
    assert text.endswith("Fix: aggregation=dj.VariableAggregation.MEAN for 'v'")


def _a_mean_and_a_share(w, x):
    return 0.3 * loss_of(w, x) + 0.7 * dj.losses.average_loss(errors_of(w, x) ** 2)


def _a_mean_and_a_sum_over_a_count(w, x):
    own = jnp.sum(errors_of(w, x)) / total(jnp.sum(x[:, 0] > -9))
    return 0.3 * loss_of(w, x) + 0.7 * own


@pytest.mark.parametrize("loss", [_a_mean_and_a_share, _a_mean_and_a_sum_over_a_count])
def test_no_fix_is_told_where_none_helps(loss):
    """Neither a sum nor a mean is right; `dj.check` tells of these."""
    s = dj.VirtualStrategy(4)
    step = lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))
    require_silence(s, step, weights(), inputs(s))
    with pytest.raises(CheckError, match="numbers that depend on the number of replicas"):
        dj.check(step, weights(), inputs(s), strategy=s)


def test_a_quotient_about_local_means_is_told_of_the_means():
    s = dj.VirtualStrategy(4)

    def r2(w, x):
        y = x[:, 0]
        return mean(1 - jnp.sum((x @ w - y) ** 2) / jnp.sum((y - y.mean()) ** 2))

    quotient = lambda w, x: mean(jnp.sum(errors_of(w, x)) / jnp.sum((x[:, 0] - x.mean()) ** 2))
    text = _text_of(s, quotient, weights(), inputs(s))
    assert "where a mean that they are computed from is one over the replicas, too" in text
    s.run(r2, args=(weights(), inputs(s)))


# -- code that reaches no result ---------------------------------------------------


def test_dead_code_is_silent(two):
    """A model with dropout that is initialized in a step: its mask is not used."""
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))

    def init(x):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return Net().init(keys, x)

    def apply(x):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return mean(jnp.mean(Net().init_with_output(keys, x)[0]))

    require_silence(two, init, inputs(two))
    require_silence(two, jax.jit(init), inputs(two))
    with pytest.warns(ReductionWarning, match="a key per replica"):
        two.run(apply, args=(inputs(two),))


def test_statistics_that_are_averaged_once_more_are_silent(two):
    """A synchronized batch norm, and then the mean of its statistics, as in many examples."""
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        axis: str | None = None

        @linen.compact
        def __call__(self, x):
            norm = linen.BatchNorm(use_running_average=False, axis_name=self.axis)
            return linen.Dense(1)(norm(x))

    def step(state, x):
        def loss(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            out, new = Net(two.axis_name).apply(variables, x, mutable=["batch_stats"])
            return jnp.mean(out**2), new["batch_stats"]

        grads, statistics = jax.grad(loss, has_aux=True)(state["params"])
        grads, statistics = jax.lax.pmean((grads, statistics), two.axis_name)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "batch_stats": statistics}

    state = Net().init(jax.random.key(0), np.ones((2, 3), np.float32))
    require_silence(two, step, state, inputs(two))
    dj.check(step, state, inputs(two), strategy=two)
