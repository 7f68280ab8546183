"""Right steps are passed and wrong ones found, however a step is written."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from tests.check.problem import (
    RULE,
    R,
    X,
    Y,
    batch_of,
    descend,
    finding_of,
    is_at,
    is_right,
    loss_of,
    params,
)
from tests.drill_mark import all_drills_but

AGGREGATION = {"sum": dj.VariableAggregation.SUM, "mean": dj.VariableAggregation.MEAN}
REDUCTIONS = [("mean", True), ("sum", False)]
both = pytest.mark.parametrize(("op", "right"), REDUCTIONS, ids=["right", "wrong"])


def outcome(step, *args, **options):
    """Returns whether a step is right, as dj.check sees it."""
    try:
        dj.check(step, *args, **options)
    except dj.errors.CheckError as error:
        assert {f.rule for f in error.findings} == {RULE}
        return False
    return True


def ctx():
    return dj.get_replica_context()


# -- functions -----------------------------------------------------------------


def make_step(op):
    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return descend(params, ctx().all_reduce(op, grads)), ctx().all_reduce("mean", loss)

    return step


@both
def test_a_function(strategy, op, right):
    batch = batch_of(strategy)
    assert outcome(make_step(op), params(), *batch, strategy=strategy) == right


@both
def test_a_compiled_function(strategy, op, right):
    assert outcome(strategy.jit(make_step(op)), params(), *batch_of(strategy)) == right


@both
def test_cross_replica_code(strategy, op, right):
    step = make_step(op)
    called = lambda *args: strategy.run(step, args=args)
    assert outcome(called, params(), *batch_of(strategy)) == right


@both
def test_compiled_cross_replica_code_that_reduces(strategy, op, right):
    """The gradients of the replicas are reduced outside of the replica function."""

    @dj.jit
    def step(params, x, y):
        grads = strategy.run(jax.grad(loss_of), args=(params, x, y))
        return descend(params, strategy.reduce(op, grads))

    assert outcome(step, params(), *batch_of(strategy)) == right


@both
def test_a_derivative_around_run_of_functions_with_rules_of_their_own(strategy, op, right):
    how = "sum" if op == "mean" else "mean"  # the right step sums its counts

    def sums(params, x, y):
        margin = (x @ params["w"]) * jnp.sign(y)
        return jnp.sum(jnp.logaddexp(0.0, -margin)), jnp.float32(len(y))

    @dj.jit
    def step(params, x, y):
        def objective(params):
            loss, count = strategy.run(sums, args=(params, x, y))
            return strategy.reduce("sum", loss) / strategy.reduce(how, count)

        return descend(params, jax.grad(objective)(params))

    assert outcome(step, params(), *batch_of(strategy)) == right


def test_keyword_arguments(strategy):
    x, y = batch_of(strategy)
    step = make_step("sum")
    by_name = lambda x, *, params, y: step(params, x, y)
    finding = finding_of(by_name, x, params=params(), y=y, strategy=strategy)
    assert "by the factor 4" in finding.text


def test_a_loss_of_each_replica_s_own_may_be_returned(strategy):
    """Its mean is that of one replica, and rows are rows."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return descend(params, lax.pmean(grads, "replica")), {"loss": loss, "of": x @ params["w"]}

    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


def test_a_value_that_is_not_linear_in_local_means_is_found(strategy):
    def step(params, x, y):
        return jnp.sqrt(loss_of(params, x, y))

    finding = finding_of(step, params(), *batch_of(strategy), strategy=strategy)
    assert "has another mean and another sum" in finding.text


# -- variables -----------------------------------------------------------------


def make_variables(strategy, **options):
    with strategy.scope():
        return {k: dj.Variable(v, name=k, **options) for k, v in params().items()}


@pytest.mark.parametrize("weighted", [False, True])
def test_an_optimizer_that_accumulates(strategy, weighted):
    with strategy.scope():
        variables = make_variables(strategy)
        options = {"reduce_op": "mean", "accumulate_steps": 2, "weighted": weighted}
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), **options)
        optimizer.init([*variables.values()])

    def step(x, y):
        values = {k: v.value for k, v in variables.items()}
        grads = jax.grad(loss_of)(values, x, y)
        weight = {"weight": jnp.float32(len(x))} if weighted else {}
        optimizer.apply_gradients([(grads[k], v) for k, v in variables.items()], **weight)

    assert is_right(step, *batch_of(strategy), strategy=strategy)


@both
def test_variables_with_an_optimizer(strategy, op, right):
    with strategy.scope():
        variables = make_variables(strategy)
        optimizer = dj.optim.Optimizer(optax.sgd(0.1, momentum=0.9), reduce_op=op)
        optimizer.init([*variables.values()])

    def step(x, y):
        values = {k: v.value for k, v in variables.items()}
        grads = jax.grad(loss_of)(values, x, y)
        optimizer.apply_gradients([(grads[k], v) for k, v in variables.items()])

    assert outcome(step, *batch_of(strategy), strategy=strategy) == right


@both
def test_variables_that_aggregate(strategy, op, right):
    variables = make_variables(strategy, aggregation=AGGREGATION[op])

    def step(x, y):
        grads = jax.grad(loss_of)({k: v.value for k, v in variables.items()}, x, y)
        for k, v in variables.items():
            v.assign_sub(0.1 * grads[k])

    assert outcome(step, *batch_of(strategy), strategy=strategy) == right


@both
def test_merge_call(strategy, op, right):
    variables = make_variables(strategy)

    def update(strategy, grads):
        for k, v in variables.items():
            grad = strategy.extended.reduce_to(op, grads[k], v)
            strategy.extended.update(v, lambda v, g: v.assign_sub(0.1 * g), args=(grad,))

    def step(x, y):
        grads = jax.grad(loss_of)({k: v.value for k, v in variables.items()}, x, y)
        ctx().merge_call(update, args=(grads,))

    assert outcome(step, *batch_of(strategy), strategy=strategy) == right


@pytest.mark.parametrize(("op", "right"), [("sum", True), ("mean", False)], ids=["right", "wrong"])
def test_a_counter_read_as_the_sum_of_components(strategy, op, right):
    on_read = dj.VariableSynchronization.ON_READ
    with strategy.scope():
        seen = dj.Variable(0.0, synchronization=on_read, aggregation=AGGREGATION[op], name="seen")

    def step(x, y):
        seen.assign_add(jnp.sum(y > 0).astype(jnp.float32))

    assert outcome(step, *batch_of(strategy), strategy=strategy) == right


def test_metrics(strategy):
    with strategy.scope():
        mean = dj.metrics.Mean()

    def step(x, y):
        mean.update(y)
        return x.mean()

    assert is_right(step, *batch_of(strategy), strategy=strategy)


def test_a_step_of_steps_on_an_iterator(strategy):
    """An iterator is read outside of traces: what is checked is the step, on a batch."""
    w = make_variables(strategy, aggregation=AGGREGATION["mean"])["w"]

    def update(x, y):
        w.assign_sub(0.1 * jax.grad(lambda w: loss_of(params() | {"w": w}, x, y))(w.value))
        return y.mean()

    def step(context, batch):
        context.set_last_step_output("loss", strategy.run(update, args=batch), "mean")

    iterator = iter(strategy.distribute_dataset([(X, Y)] * 2))
    strategy.extended.run_steps_on_iterator(step, iterator, 2)
    assert is_right(lambda x, y: strategy.run(update, args=(x, y)), *batch_of(strategy))


# -- Flax and Equinox --------------------------------------------------------------


@both
def test_a_train_state(strategy, op, right):
    linen, train_state = (
        pytest.importorskip("flax.linen"),
        pytest.importorskip("flax.training.train_state"),
    )
    net = linen.Dense(1)
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), X)["params"], tx=optax.sgd(0.1)
    )

    def step(state, x, y):
        loss = lambda p: jnp.mean((state.apply_fn({"params": p}, x)[:, 0] - y) ** 2)
        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=ctx().all_reduce(op, grads))

    assert outcome(step, state, *batch_of(strategy), strategy=strategy) == right


def make_module(strategy):
    nnx = pytest.importorskip("flax.nnx")
    with strategy.scope():
        module = dj.flax.create(lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        return module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)


def train_module(module, optimizer, x, y, op):
    nnx = pytest.importorskip("flax.nnx")
    grads = nnx.grad(lambda m: jnp.mean((m(x)[:, 0] - y) ** 2))(module)
    optimizer.update(module, ctx().all_reduce(op, grads))


@both
@pytest.mark.parametrize("way", ["passed", "captured"])
def test_a_module(strategy, op, right, way):
    module, optimizer = make_module(strategy)
    passed = lambda m, o, x, y: train_module(m, o, x, y, op)
    captured = lambda x, y: train_module(module, optimizer, x, y, op)
    step, args = (passed, (module, optimizer)) if way == "passed" else (captured, ())
    assert outcome(step, *args, *batch_of(strategy), strategy=strategy) == right


@both
def test_equinox(strategy, op, right):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))

    def step(model, x, y):
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x)[:, 0] - y) ** 2))(model)
        grads = ctx().all_reduce(op, eqx.filter(grads, eqx.is_array))
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    assert outcome(step, model, *batch_of(strategy), strategy=strategy) == right


# -- dj.pmap --------------------------------------------------------------------


def mapped_step(op):
    reduce = lax.pmean if op == "mean" else lax.psum

    def step(params, x, y):
        return descend(params, reduce(jax.grad(loss_of)(params, x, y), "replica"))

    return step


@both
def test_pmap_of_replicated_weights(strategy, op, right):
    """As in files written for `jax.pmap`: a row of weights for each device."""
    step = dj.pmap(mapped_step(op), "replica", strategy=strategy)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (R, *x.shape)), params())
    assert outcome(step, rows, X.reshape(R, -1, 3), Y.reshape(R, -1)) == right


@both
def test_pmap_of_weights_without_rows(strategy, op, right):
    axes = {"in_axes": (None, 0, 0), "out_axes": None}
    step = dj.pmap(mapped_step(op), "replica", strategy=strategy, **axes)
    assert outcome(step, params(), X.reshape(R, -1, 3), Y.reshape(R, -1)) == right


def test_pmap_that_loses_values(strategy):
    axes = {"in_axes": (None, 0), "out_axes": None}
    step = dj.pmap(lambda w, x: w - x.mean(), "replica", strategy=strategy, **axes)
    finding = finding_of(step, jnp.float32(1), X.reshape(R, -1, 3))
    assert finding.rule == RULE


# -- strategies -------------------------------------------------------------------


STRATEGIES = {
    "virtual": lambda: dj.VirtualStrategy(R),
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:R]),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:R]),
    **{
        part: lambda part=part: dj.ShardedStrategy(
            jax.devices()[:R], partition=part, min_split_bytes=0
        )
        for part in ("optimizer", "gradients", "parameters")
    },
    "model axes": lambda: dj.MirroredStrategy(model_axes={"model": 2}),
}


@both
@pytest.mark.parametrize(
    "kind", all_drills_but(["mirrored", "central", "parameters", "model axes"], STRATEGIES)
)
def test_each_strategy(kind, op, right):
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        variables = make_variables(strategy)
        optimizer = dj.optim.Optimizer(optax.adam(0.1), reduce_op="mean")
        optimizer.init([*variables.values()])

    def step(x, y):
        grads = jax.grad(loss_of)({k: v.value for k, v in variables.items()}, x, y)
        optimizer.apply_gradients([(grads[k], v) for k, v in variables.items()])
        return ctx().all_reduce(op, loss_of({k: v.value for k, v in variables.items()}, x, y))

    assert outcome(step, *batch_of(strategy), strategy=strategy) == right


@both
@pytest.mark.parametrize("named", ["spec", "sharding"])
def test_constraints_over_model_axes_name_no_device_of_a_check(named, op, right):
    strategy = dj.MirroredStrategy(model_axes={"model": 2})

    def body(product, row):
        spec = P("model")
        if named == "sharding":
            spec = NamedSharding(strategy.mesh, spec)  # the strategy's, in a check too
        row = jax.lax.with_sharding_constraint(jnp.append(row, 1.0), spec)
        return product, row @ product

    @jax.checkpoint
    def loss(w, x, y):
        return jnp.mean((jax.lax.scan(body, w, x)[1] - y) ** 2)

    def step(w, x, y):
        return w - 0.1 * ctx().all_reduce(op, jax.grad(loss)(w, x, y))

    w = jnp.array([0.5, -1.0, 2.0, 0.1])
    assert outcome(step, w, *batch_of(strategy), strategy=strategy) == right


@both
@pytest.mark.parametrize("axes", [{}, {"model": 2}], ids=["replicas", "model axes"])
def test_what_cross_replica_code_places_stays_on_the_device_of_a_check(axes, op, right):
    strategy = dj.MirroredStrategy(model_axes=axes)
    step = make_step(op)
    outer = NamedSharding(strategy.mesh, P())

    @dj.jit
    def called(given, x, y):
        given = jax.tree.map(lambda v: jax.lax.with_sharding_constraint(v, outer), given)
        given, loss = strategy.run(step, args=(given, x, y))
        own = NamedSharding(strategy.mesh, P())  # the strategy's, in a check too
        constrained = jax.jit(lambda v: jax.lax.with_sharding_constraint(v, own))
        return jax.tree.map(constrained, given), jax.device_put(loss, own)

    assert outcome(called, params(), *batch_of(strategy)) == right


@both
@pytest.mark.parametrize("kind", ["one", "mirrored1", "virtual1"])
def test_one_replica_is_checked_as_two(kind, op, right):
    """So a mistake is found on a laptop."""
    make = {"one": dj.OneDeviceStrategy, "virtual1": lambda: dj.VirtualStrategy(1)}
    strategy = make.get(kind, lambda: dj.MirroredStrategy(jax.devices()[:1]))()
    step, batch = make_step(op), batch_of(strategy)
    assert outcome(step, params(), *batch, strategy=strategy) == right
    if not right:
        finding = finding_of(step, params(), *batch, strategy=strategy)
        assert "for 2 replicas as for one" in finding.text
        assert "by the factor 2" in finding.text


def test_the_loss_line_of_a_module_is_named(strategy):
    """The line in the user's file, not one of Flax."""
    nnx = pytest.importorskip("flax.nnx")
    module, optimizer = make_module(strategy)

    def step(module, optimizer, x, y):
        grads = nnx.grad(lambda m: jnp.mean((m(x)[:, 0] - y) ** 2))(module)
        optimizer.update(module, lax.psum(grads, "replica"))  # the module's sum

    finding = finding_of(step, module, optimizer, *batch_of(strategy), strategy=strategy)
    assert is_at(finding, __file__, "the module's sum")
    assert "Linear.kernel" in finding.text and np.isfinite(np.asarray(module.kernel[...])).all()
