"""dj.explain counts the collectives of known steps, and names the user's lines."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import distjax as dj
from tests.diagnostics.lines import line_of
from tests.replicas import per_replica

MEAN = dj.VariableAggregation.MEAN
F32 = 4


def vectors(strategy, size=4):
    """Returns a float32[size] of its own for each replica."""
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, [np.full(size, r, np.float32) for r in range(count)])


def at(marker):
    return line_of(__file__, marker)


def lines(collectives):
    """Returns (kind, bytes, "file:line") of each."""
    return sorted((c.kind, c.result_bytes, c.source.split(" ")[0]) for c in collectives)


def step_of_every_kind(x):
    ctx = dj.get_replica_context()
    total = ctx.all_reduce("sum", x)  # all-reduce
    gathered = ctx.all_gather(x, 0)  # all-gather
    maximum = lax.pmax(x[:2], "replica")  # pmax
    passed = lax.ppermute(x, "replica", [(0, 0)])  # ppermute
    return total, gathered, maximum, passed


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_collective_has_kind_bytes_and_line(count):
    strategy = dj.MirroredStrategy(jax.devices()[:count])
    found = dj.explain(step_of_every_kind, vectors(strategy), strategy=strategy)
    assert lines(found.written) == [
        ("all-gather", count * 4 * F32, at("all-gather")),
        ("all-reduce", 2 * F32, at("pmax")),
        ("all-reduce", 4 * F32, at("all-reduce")),
        ("collective-permute", 4 * F32, at("ppermute")),
    ]
    assert found.written_counts["all-reduce"] == (2, 6 * F32)
    assert found.written[0].source.endswith("(step_of_every_kind)")
    if count > 1:
        assert found.compiled_counts["all-reduce"] == (2, 6 * F32)  # a sum and a maximum
        assert found.compiled_counts["all-gather"] == (1, count * 4 * F32)


def test_xla_combines_reductions_that_are_written_apart():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    def step(x):
        ctx = dj.get_replica_context()
        return [ctx.all_reduce("sum", x * k) for k in range(1, 4)]

    found = dj.explain(step, vectors(strategy), strategy=strategy)
    assert found.written_counts == {"all-reduce": (3, 3 * 4 * F32)}
    assert found.compiled_counts == {"all-reduce": (1, 3 * 4 * F32)}


@pytest.mark.parametrize(
    "make", [lambda: dj.VirtualStrategy(8), dj.OneDeviceStrategy, lambda: dj.get_strategy()]
)
def test_on_one_device_nothing_travels(make):
    strategy = make()

    def step(x):
        return dj.get_replica_context().all_reduce("sum", x)

    found = dj.explain(step, vectors(strategy), strategy=strategy)
    assert found.written == found.compiled == ()
    assert "none" in str(found)


def test_a_step_in_cross_replica_code():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = dj.Variable(jnp.ones((3, 2)), name="w", aggregation=MEAN)

    def replica(x):
        w.assign_sub(jnp.ones((3, 2)) * x[0])  # write
        return x

    def step(x):
        return strategy.reduce("mean", strategy.run(replica, args=(x,)))  # reduce

    expected = [("all-reduce", 4 * F32, at("reduce")), ("all-reduce", 6 * F32, at("write"))]
    for fn in (step, dj.jit(step)):
        assert lines(dj.explain(fn, vectors(strategy)).written) == expected
        with strategy.scope():
            assert lines(dj.explain(fn, vectors(strategy)).written) == expected


def test_a_merge_function_has_its_own_lines():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    def merge(strategy, x):
        return strategy.reduce("mean", x)  # in the merge function

    def step(x):
        return lax.scan(
            lambda c, _: (dj.get_replica_context().merge_call(merge, args=(c + x,)), None),
            x,
            None,
            length=3,
        )[0]

    found = dj.explain(step, vectors(strategy), strategy=strategy)
    assert lines(found.written) == [("all-reduce", 4 * F32, at("in the merge function"))]


def test_a_call_of_a_jitted_function_counts_in_its_body():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    @jax.jit
    def inner(x):
        return lax.psum(x, "replica")  # in jit

    found = dj.explain(lambda x: inner(x), vectors(strategy), strategy=strategy)
    assert lines(found.written) == [("all-reduce", 4 * F32, at("in jit"))]


# -- training state that is split ----------------------------------------------

ROWS, COLUMNS = 16, 4


def zero_step(strategy):
    with strategy.scope():
        w = dj.Variable(jnp.ones((ROWS, COLUMNS)), name="w", aggregation=MEAN)
        optimizer = dj.optim.Optimizer(optax.adam(1e-3))
        optimizer.init([w])

    def step(x):
        value = w.value  # read
        gradient = jax.grad(lambda v: ((v @ x) ** 2).sum())(value)
        optimizer.apply_gradients([(gradient, w)])  # apply

    return step


def test_zero_3_gathers_on_read_and_scatters_gradients():
    strategy = dj.ShardedStrategy(jax.devices(), partition="parameters", min_split_bytes=0)
    found = dj.explain(zero_step(strategy), vectors(strategy), strategy=strategy)
    whole = ROWS * COLUMNS * F32
    assert lines(found.written) == [
        ("all-gather", whole, at("read")),
        ("reduce-scatter", whole // 8, at("apply")),
    ]
    assert found.written_counts == found.compiled_counts
    places = {v.name: (v.locality, v.placement) for v in found.variables}
    assert places["w"] == places["w/mu"] == ("V", "partitioned on axis 0")
    assert places["count"] == ("M", "mirrored")
    split = 3 * whole // 8  # w and Adam's two moments
    assert found.memory.donated_bytes == split + 4  # and the count
    assert found.memory.argument_bytes == split + 4 + 4 * F32


def test_what_xla_puts_in_for_split_state_is_listed_as_compiled():
    strategy = dj.ShardedStrategy(jax.devices(), partition="optimizer", min_split_bytes=0)
    found = dj.explain(zero_step(strategy), vectors(strategy), strategy=strategy)
    whole = ROWS * COLUMNS * F32
    assert lines(found.written) == [("all-reduce", whole, at("apply"))]
    assert lines(found.compiled) == [
        ("all-gather", whole, at("apply")),
        ("all-reduce", whole, at("apply")),
    ]


def test_central_storage_copies_in_from_the_host():
    strategy = dj.CentralStorageStrategy(jax.devices()[:2])
    found = dj.explain(zero_step(strategy), vectors(strategy), strategy=strategy)
    assert lines(found.written) == [("all-reduce", ROWS * COLUMNS * F32, at("apply"))]
    assert {(v.locality, v.placement) for v in found.variables} == {("V", "host memory")}


def test_bytes_follow_the_dtype():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    def step(x):
        as_bool = lax.all_gather(x > 0, "replica")
        return as_bool, lax.psum(x.astype(jnp.bfloat16), "replica"), lax.psum(1j * x, "replica")

    found = dj.explain(step, vectors(strategy), strategy=strategy)
    assert found.written_counts == {"all-gather": (1, 2 * 4), "all-reduce": (2, 4 * 2 + 4 * 8)}


def nnx_step(strategy, update):
    model = nnx.Linear(COLUMNS, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def step(model, optimizer, metrics, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        metrics.update(loss=loss)
        update(optimizer, model, grads)

    (x,) = strategy.distribute_dataset([np.ones((16, COLUMNS), np.float32)])
    return dj.explain(step, model, optimizer, metrics, x, strategy=strategy)


def updates_whole(optimizer, model, grads):
    grads = dj.get_replica_context().all_reduce("mean", grads)  # averages
    optimizer.update(model, grads)  # gathers


def test_optimizer_state_that_is_gathered_is_named_with_the_line_that_needs_it():
    strategy = dj.ShardedStrategy(partition="optimizer", min_split_bytes=0)
    found = nnx_step(strategy, updates_whole)
    gathered = [c for c in found.written if c.kind == "all-gather"]
    assert sum(c.result_bytes for c in gathered) >= 2 * 16 * COLUMNS * F32
    told = "parts of Optimizer.opt_state, gathered for the step"
    assert {c.source for c in gathered} == {told}
    assert {c.source for c in found.compiled if c.kind == "all-gather"} == {told}
    (note,) = found.findings
    line = f"{at('gathers')} (updates_whole)"
    assert (note.level, note.source) == ("note", line)
    assert note.rule == "ZeRO undone: dj.flax.apply_gradients keeps the parts"
    assert note.text.splitlines() == [
        "Optimizer.opt_state, which is split over the replicas, needs to be updated in parts.",
        f"  Got: whole arrays, gathered on every device for {line}.",
        "  Why: optimizer.update computes with whole arrays: nothing is saved while the step runs.",
        "  Fix: dj.flax.apply_gradients(optimizer, model, grads), with each replica's own "
        "gradients, in place of all_reduce and optimizer.update",
    ]
    assert note.rule in str(found) and "gathered at" not in str(found)
    assert {why for run in found.runs for path, _, why in run.why if "kernel" in path} == {
        f"psum at {at('averages')} (updates_whole)"
    }
    assert nnx_step(strategy, dj.flax.apply_gradients).findings == ()


def test_what_is_combined_after_the_step_is_not_a_line_of_the_user():
    found = nnx_step(dj.MirroredStrategy(jax.devices()[:2]), updates_whole)
    after = "metrics and statistics, combined after the step"
    assert sum(c.result_bytes for c in found.written if c.source == after) == 2 * F32
