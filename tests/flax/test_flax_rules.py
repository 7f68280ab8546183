"""What each type of variable becomes at the end of a step, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import LocalityError, UnsupportedError
from tests.flax.image_loop import make_batches, make_state, values
from tests.replicas import ids


class Own(nnx.Variable):
    """A variable type that no one gave a rule."""


class Box(nnx.Module):
    """Holds one variable."""

    def __init__(self, variable):
        self.variable = variable


def write(box, value):
    box.variable[...] = value


def run_on_ids(strategy, fn, box):
    return strategy.run(fn, args=(box, ids(strategy)))


# -- parameters ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "kind"), [(nnx.Param, "Param"), (nnx.OptState, "OptState")], ids=["param", "slot"]
)
def test_parameters_that_differ_are_refused_by_name(pair, variable, kind):
    box = Box(variable(jnp.float32(5)))
    with pytest.raises(LocalityError, match=r"Box\.variable needs a value that is equal") as info:
        run_on_ids(pair, write, box)
    assert f"a {kind} that each replica wrote differently" in str(info.value)
    assert "all_reduce('mean', grads)" in str(info.value)
    assert float(box.variable[...]) == 5


def test_a_step_without_all_reduce_leaves_everything_as_it_was(pair):
    model, optimizer, metrics, rngs = state = make_state()
    before = values(state)

    def forgetful(model, optimizer, metrics, rngs, batch):
        loss, grads = nnx.value_and_grad(lambda m: m(batch["image"], rngs).mean())(model)
        metrics.update(loss=loss, logits=jnp.zeros((8, 10)), labels=batch["label"])
        optimizer.update(model, grads)

    (batch,) = pair.distribute_dataset(make_batches(1))
    with pytest.raises(LocalityError, match=r"Classifier\.hidden\.bias needs a value"):
        pair.run(forgetful, args=(*state, batch))
    for old, new in zip(before, values(state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_type_without_a_rule_needs_equal_values(pair):
    box = Box(Own(jnp.float32(0)))
    pair.run(lambda box: write(box, box.variable[...] + 1), args=(box,))
    assert float(box.variable[...]) == 1
    with pytest.raises(LocalityError, match=r"Box\.variable needs a rule") as info:
        run_on_ids(pair, write, box)
    assert 'dj.flax.set_rule(Own, "mean")' in str(info.value)


def test_a_bare_array_of_a_module_is_carried(pair):
    box = Box(jnp.float32(1))

    def double(box):
        box.variable = box.variable * 2

    pair.run(double, args=(box,))
    pair.run(double, args=(box,))
    assert float(box.variable) == 4


def test_a_bare_array_that_differs_is_refused(mirrored):
    def assign(box, x):
        box.variable = x

    with pytest.raises(LocalityError, match=r"^Box\.variable needs to be a variable, whose type"):
        run_on_ids(mirrored, assign, Box(jnp.float32(1)))


def test_a_new_parameter_that_differs_has_its_whole_path(mirrored):
    def add(box, x):
        box.new = nnx.Param(x)

    with pytest.raises(LocalityError, match=r"^Box\.new needs a value that is equal") as info:
        run_on_ids(mirrored, add, Box(nnx.Param(jnp.float32(1))))
    assert "a new Param, which each replica gave another value" in str(info.value)
    assert "make it before the step" in str(info.value)


def test_references_are_refused(pair):
    with pytest.raises(UnsupportedError, match="Param needs to hold an array"):
        pair.run(lambda box: None, args=(Box(nnx.Param(jnp.float32(0), ref=True)),))


# -- batch statistics ---------------------------------------------------------


def test_batch_statistics_are_averaged(strategy):
    box = Box(nnx.BatchStat(jnp.float32(5)))
    run_on_ids(strategy, write, box)
    assert float(box.variable[...]) == (strategy.num_replicas_in_sync - 1) / 2


def test_a_rule_for_one_object_wins_over_that_of_the_type(pair):
    box = Box(nnx.BatchStat(jnp.float32(5)))
    dj.flax.set_rule(box, "per_replica", nnx.BatchStat)
    add = lambda box, x: write(box, box.variable[...] + x)
    run_on_ids(pair, add, box)
    run_on_ids(pair, add, box)
    assert np.asarray(box.variable.get_raw_value().stacked).tolist() == [5, 7]


def test_a_rule_for_a_type():
    class Mine(nnx.Variable):
        pass

    strategy = dj.VirtualStrategy(2)
    box = Box(Mine(jnp.float32(0)))
    with pytest.raises(LocalityError, match="needs a rule"):
        run_on_ids(strategy, write, box)
    dj.flax.set_rule(Mine, "mean")
    run_on_ids(strategy, lambda box, x: write(box, x), box)
    assert float(box.variable[...]) == 0.5


def test_bad_rules():
    with pytest.raises(ValueError, match="set_rule needs one of the rules mirrored, mean"):
        dj.flax.set_rule(nnx.BatchStat, "average")
    with pytest.raises(ValueError, match=r"set_rule needs a type of nnx\.Variable or an NNX"):
        dj.flax.set_rule(3, "mean")


@pytest.mark.parametrize(
    ("rule", "only", "text"),
    [
        ("per_replica", nnx.Cache, "^set_rule needs a variable in Box to give the rule"),
        ("fold", nnx.BatchStat, "^set_rule needs a PRNG key in Box to give the rule 'fold'"),
        ("common", ..., "^set_rule needs a PRNG key in Box to give the rule 'common'"),
    ],
)
def test_a_rule_that_no_variable_gets_is_refused(rule, only, text):
    with pytest.raises(ValueError, match=text):
        dj.flax.set_rule(Box(nnx.BatchStat(jnp.float32(0))), rule, only)


# -- random streams -----------------------------------------------------------


def draws(strategy, rngs, stream):
    out = strategy.run(lambda rngs: jax.random.uniform(rngs[stream]()), args=(rngs,))
    return [float(x) for x in strategy.local_results(out)]


def test_each_replica_draws_numbers_of_its_own(pair):
    rngs = nnx.Rngs(0)
    key = np.asarray(jax.random.key_data(rngs.default.key[...]))
    first, second = draws(pair, rngs, "dropout"), draws(pair, rngs, "dropout")
    assert len({*first, *second}) == 4
    assert int(rngs.default.count[...]) == 2
    assert np.asarray(jax.random.key_data(rngs.default.key[...])).tolist() == key.tolist()
    folded = jax.random.fold_in(nnx.Rngs(0).default.key[...], 1)
    expected = jax.random.uniform(jax.random.fold_in(folded, 0))
    assert first[1] == pytest.approx(float(expected))


def test_parameters_are_drawn_from_a_common_stream(pair):
    first, second = draws(pair, nnx.Rngs(params=0), "params")
    assert first == second == pytest.approx(float(nnx.Rngs(params=0).params.uniform()))


def test_a_stream_can_be_made_common(pair):
    rngs = nnx.Rngs(dropout=0)
    dj.flax.set_rule(rngs.dropout, "common", nnx.RngKey)
    first, second = draws(pair, rngs, "dropout")
    assert first == second


def test_a_rule_of_keys_leaves_other_variables_their_own(pair):
    model = Box(nnx.BatchStat(jnp.float32(0)))
    model.rngs = nnx.Rngs(dropout=0)
    dj.flax.set_rule(model, "fold")
    run_on_ids(pair, write, model)
    assert float(model.variable[...]) == 0.5
    assert len(set(draws(pair, model.rngs, "dropout"))) == 2


def test_a_stack_of_keys_is_folded_key_by_key(pair):
    stream = nnx.Rngs(0).split(3)["default"]
    out = pair.run(lambda s: jax.vmap(jax.random.uniform)(s.key[...]), args=(stream,))
    rows = [np.asarray(x) for x in pair.local_results(out)]
    assert len({float(x) for row in rows for x in row}) == 6


def test_a_stream_that_a_step_makes_needs_one_seed(mirrored):
    def make(box, x):
        box.rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(0), x.astype(int)))

    box = Box(nnx.Param(jnp.float32(1)))
    with pytest.raises(LocalityError, match=r"^Box\.rngs\.default\.key needs a key that is equal"):
        run_on_ids(mirrored, make, box)
    mirrored.run(lambda box: setattr(box, "rngs", nnx.Rngs(3)), args=(box,))
    assert float(box.rngs.uniform()) == float(nnx.Rngs(3).uniform())


def test_a_key_stays_where_a_step_seeds_it_differently_and_changes_the_graph(pair):
    class Model(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(dropout=0)
            self.w = nnx.Param(jnp.arange(3.0))

    def step(model):
        model.a = nnx.Intermediate(jnp.float32(0))
        seed = dj.get_replica_context().fold_in(jax.random.key(7))
        model.rngs.dropout.key[...] = seed

    model = Model()
    pair.run(step, args=(model,))
    assert model.rngs.dropout.key[...] == jax.random.key(0)
    assert model.w[...].tolist() == [0, 1, 2]


# -- metrics ------------------------------------------------------------------

VALUES = np.arange(48.0, dtype=np.float32) ** 1.5


def update(metric, x):
    metric.update(values=x)


def updated(strategy, metric):
    for part in strategy.distribute_dataset([VALUES[:24], VALUES[24:]]):
        strategy.run(update, args=(metric, part))
    return metric


def test_average_and_welford_are_those_of_all_samples(strategy):
    metrics = nnx.MultiMetric(average=nnx.metrics.Average(), welford=nnx.metrics.Welford())
    for _ in range(2):
        metrics.reset()
        result = updated(strategy, metrics).compute()
        welford = jax.device_get(result["welford"])
        assert float(result["average"]) == pytest.approx(VALUES.mean())
        assert float(welford.mean) == pytest.approx(VALUES.mean(), rel=1e-5)
        assert float(welford.standard_deviation) == pytest.approx(VALUES.std(), rel=1e-5)
        error = VALUES.std() / 48**0.5
        assert float(welford.standard_error_of_mean) == pytest.approx(error, rel=1e-5)
    assert int(metrics.average.count[...]) == 48


def test_a_value_that_is_equal_on_all_replicas_counts_once_for_each(pair):
    metric = nnx.metrics.Average()
    for _ in range(2):
        pair.run(lambda m: m.update(values=jnp.float32(3)), args=(metric,))
    assert (float(metric.total[...]), int(metric.count[...])) == (12, 4)


def test_a_metric_that_is_reset_in_the_step_holds_that_step_only(pair):
    metric = updated(pair, nnx.metrics.Average())

    def step(metric, x):
        metric.reset()
        metric.update(values=x)

    (part,) = pair.distribute_dataset([VALUES[:4]])
    pair.run(step, args=(metric, part))
    assert float(metric.total[...]) == pytest.approx(VALUES[:4].sum())
    assert int(metric.count[...]) == 4


def test_a_metric_that_is_only_read_stays(pair):
    metric = updated(pair, nnx.metrics.Average())
    pair.run(lambda m: m.total[...] * 2, args=(metric,))
    assert float(metric.compute()) == pytest.approx(VALUES.mean())


class Largest(nnx.metrics.Metric):
    """The largest value seen."""

    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.float32(-jnp.inf))

    def reset(self):
        self.value[...] = jnp.float32(-jnp.inf)

    def update(self, values):
        self.value[...] = jnp.maximum(self.value[...], values.max())


def test_a_metric_without_a_rule_is_refused_until_it_has_one(pair):
    class Mine(Largest):
        pass

    metric = Mine()
    with pytest.raises(LocalityError, match=r"Mine\.value needs a rule") as info:
        updated(pair, metric)
    assert 'dj.flax.register_metric(Mine, "sum")' in str(info.value)
    assert float(metric.value[...]) == -np.inf
    dj.flax.register_metric(Mine, lambda parts: {"value": parts["value"].max(0)})
    assert float(updated(pair, metric).value[...]) == VALUES.max()


class Range(Largest):
    """The largest value seen, and the smallest of the updates that ask for it."""

    def __init__(self):
        super().__init__()
        self.low = nnx.metrics.MetricState(jnp.float32(jnp.inf))

    def reset(self):
        super().reset()
        self.low[...] = jnp.float32(jnp.inf)


dj.flax.register_metric(
    Range, lambda parts: {"value": parts["value"].max(0), "low": parts["low"].min(0)}
)


@pytest.mark.parametrize("restructure", [False, True])
def test_a_function_combines_all_state_where_only_some_changed(pair, restructure):
    metric = Range()
    metric.low[...] = jnp.float32(-4)

    def update(metric, x):
        metric.update(values=x)
        if restructure:
            metric.note = "changed"

    (part,) = pair.distribute_dataset([VALUES])
    pair.run(update, args=(metric, part))
    assert (float(metric.value[...]), float(metric.low[...])) == (VALUES.max(), -4)


@pytest.mark.parametrize("combine", [lambda parts: {}, lambda parts: parts["value"].max(0)])
def test_a_combination_without_a_value_for_each_name_is_refused(pair, combine):
    class Mine(Largest):
        pass

    dj.flax.register_metric(Mine, combine)
    with pytest.raises(ValueError, match="^the combine function of Mine needs to return the whole"):
        updated(pair, Mine())


def test_a_metric_that_a_step_makes_is_refused(mirrored):
    def make(box, x):
        box.metric = nnx.metrics.Average()
        box.metric.update(values=x)

    text = r"^Box\.metric\.total needs to be state of a metric that was made before the step"
    with pytest.raises(LocalityError, match=text):
        run_on_ids(mirrored, make, Box(nnx.Param(jnp.float32(1))))


def test_bad_registrations():
    with pytest.raises(ValueError, match="register_metric needs a subclass"):
        dj.flax.register_metric(int)
    with pytest.raises(ValueError, match='register_metric needs "sum" or a function'):
        dj.flax.register_metric(Largest, "mean")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_statistics_without_a_mean_that_differ(pair, dtype):
    """What the error names works: their sum, and another rule."""

    class Counts(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.zeros((), dtype))

    def write(model, reduce=lambda x: x):
        number = dj.get_replica_context().replica_id_in_sync_group
        model.count[...] = reduce(jnp.int32(number)).astype(dtype)

    model = Counts()
    with pytest.raises(LocalityError, match=r"^Counts\.count needs floating.*\n.*BatchStat of int"):
        pair.run(write, args=(model,))
    summed = lambda model: write(model, lambda x: dj.get_replica_context().all_reduce("sum", x))
    pair.run(summed, args=(model,))
    assert model.count[...] == 1
    dj.flax.set_rule(model, "per_replica")
    pair.run(write, args=(model,))
    np.testing.assert_array_equal(model.count.get_value().stacked, [0, 1])
