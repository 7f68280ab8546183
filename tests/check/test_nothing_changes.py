"""A check leaves everything as it was: also one that raises, or whose step raises."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import CheckError
from tests.check.problem import R, X, Y, batch_of, loss_of, params

#: How a checked step may end.
ENDS = ["right", "wrong", "raising"]


class OutOfPatience(Exception):
    """What a step raises."""


def reduction_of(end):
    return "sum" if end == "wrong" else "mean"


def check(step, *args, end, **options):
    """Checks a step that ends so."""
    errors = {"wrong": CheckError, "raising": OutOfPatience}
    expected = pytest.raises(errors[end]) if end in errors else contextlib.nullcontext()
    with expected:
        dj.check(step, *args, **options)


STRATEGIES = ["virtual", "mirrored", "central", "parameters"]


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    devices = jax.devices()[:R]
    return {
        "virtual": lambda: dj.VirtualStrategy(R),
        "mirrored": lambda: dj.MirroredStrategy(devices),
        "central": lambda: dj.CentralStorageStrategy(devices),
        "parameters": lambda: dj.ShardedStrategy(
            devices, partition="parameters", min_split_bytes=0
        ),
    }[request.param]()


@pytest.mark.parametrize(
    ("strategy", "end"),
    [*(("virtual", end) for end in ENDS), *((s, "wrong") for s in STRATEGIES[1:])],
    indirect=["strategy"],
)
def test_variables_and_optimizers(strategy, end):
    on_read = dj.VariableSynchronization.ON_READ
    with strategy.scope():
        variables = {k: dj.Variable(v, name=k) for k, v in params().items()}
        seen = dj.Variable(
            1.0, synchronization=on_read, aggregation=dj.VariableAggregation.SUM, name="seen"
        )
        optimizer = dj.optim.Optimizer(optax.adam(0.1), reduce_op=reduction_of(end))
        optimizer.init([*variables.values()])

    def step(x, y):
        seen.assign_add(len(x) if end == "right" else 1.0)
        grads = jax.grad(loss_of)({k: v.value for k, v in variables.items()}, x, y)
        optimizer.apply_gradients([(grads[k], v) for k, v in variables.items()])
        if end == "raising":
            raise OutOfPatience

    every = [*variables.values(), seen, *optimizer.variables]
    batch = batch_of(strategy)
    held = [v.value for v in every]
    before = [np.asarray(x).copy() for x in held]
    components = [np.asarray(c) for c in seen.local_results()]
    check(step, *batch, strategy=strategy, end=end)
    for v, array, value in zip(every, held, before, strict=True):
        assert np.array_equal(np.asarray(v.value), value), v.name
        assert not array.is_deleted(), v.name
    assert [np.asarray(c) for c in seen.local_results()] == components
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    if end == "right":  # the step runs as before
        strategy.run(step, args=batch)
        assert not np.array_equal(np.asarray(variables["w"].value), before[0])


@pytest.mark.parametrize(
    ("end", "way"), [*((end, "captured") for end in ENDS), ("wrong", "passed")]
)
def test_modules_and_their_random_numbers(end, way):
    nnx = pytest.importorskip("flax.nnx")
    strategy = dj.VirtualStrategy(R)
    with strategy.scope():
        model = dj.flax.create(
            lambda: nnx.Sequential(
                nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
            )
        )
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def passed(model, optimizer, x, y):
        grads = nnx.grad(lambda m: jnp.mean((m(x)[:, 0] - y) ** 2))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce(reduction_of(end), grads))
        if end == "raising":
            raise OutOfPatience

    captured = lambda x, y: passed(model, optimizer, x, y)
    step, given = (passed, (model, optimizer)) if way == "passed" else (captured, ())
    values = lambda: [
        np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for x in jax.tree.leaves(nnx.state((model, optimizer)))
    ]
    before, structure = values(), jax.tree.structure(nnx.state((model, optimizer)))
    check(step, *given, *batch_of(strategy), strategy=strategy, end=end)
    assert jax.tree.structure(nnx.state((model, optimizer))) == structure
    assert all(map(np.array_equal, values(), before))


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("end", ENDS)
def test_arguments_are_not_donated(end):
    """Though the compiled step gives its arguments' memory away."""
    strategy = dj.VirtualStrategy(R)

    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        grads = dj.get_replica_context().all_reduce(reduction_of(end), grads)
        if end == "raising":
            raise OutOfPatience
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    compiled = strategy.jit(step, donate_argnums=0)
    state, batch = params(), batch_of(strategy)
    check(compiled, state, *batch, end=end)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch)))
    check(compiled, state, *batch, end=end)
    if end == "right":
        compiled(state, *batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("end", ENDS)
def test_an_iterator_gives_its_next_batch(end):
    strategy = dj.VirtualStrategy(R)
    iterator = iter(strategy.distribute_dataset([(X, Y), (2 * X, Y)]))

    def step(x, y):
        if end == "raising":
            raise OutOfPatience
        return x.mean() if end == "right" else x.mean() ** 2

    check(step, *next(iterator), strategy=strategy, end=end)
    x, _ = next(iterator)
    assert np.allclose(np.concatenate(list(x.stacked)), 2 * X)


@pytest.mark.parametrize("end", ENDS)
def test_the_context_is_as_before(end):
    strategy = dj.VirtualStrategy(R)

    def step(x, y):
        assert dj.get_strategy() is strategy
        if end == "raising":
            raise OutOfPatience
        return x.mean() if end == "right" else x.mean() ** 2

    check(step, *batch_of(strategy), strategy=strategy, end=end)
    assert not dj.has_strategy() and not dj.in_cross_replica_context()  # the default
    assert strategy.num_replicas_in_sync == R
    out = strategy.run(lambda: dj.get_replica_context().num_replicas_in_sync)
    assert out == R


def test_other_threads_see_nothing_of_a_check():
    """While one thread checks a step, another runs it."""
    strategy = dj.VirtualStrategy(R)
    with strategy.scope():
        w = dj.Variable(0.0, name="w")
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def step(x, y):
        inside.set()
        assert go_on.wait(60)
        return dj.get_replica_context().all_reduce("mean", x.mean()) + w.value

    def other():
        assert inside.wait(60)
        try:
            seen.append(strategy.num_replicas_in_sync)
            seen.append(float(strategy.run(lambda: jax.lax.psum(1.0, "replica"))))
            seen.append(strategy.run(lambda: dj.get_replica_context().num_replicas_in_sync))
        finally:
            go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    dj.check(step, *batch_of(strategy), strategy=strategy)
    thread.join()
    assert seen == [R, R, R]
