"""dj.explain shows the cut: what runs where, what travels, which variable lives where."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from tests.diagnostics.lines import line_of


def explained(cut):
    strategy = dj.ParameterServerStrategy(2, 2, cut=cut)
    with strategy.scope():
        w = dj.Variable(jnp.ones((3, 4)), name="w")
        rate = dj.Variable(jnp.float32(0.1), name="rate")
        optimizer = dj.optim.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
        optimizer.init([w, rate])

    def step(x):
        loss_fn = lambda w, rate: jnp.sum(jnp.tanh(x @ w)) * rate
        loss, grads = jax.value_and_grad(loss_fn, (0, 1))(w.value, rate.value)
        optimizer.apply_gradients(zip(grads, [w, rate], strict=True))
        return loss, w.value

    x = jnp.ones((5, 3))
    found = dj.explain(step, x, strategy=strategy)
    assert strategy.servers[0].version == 0  # nothing was run
    strategy.run(step, args=(x,))
    return found, strategy


def test_the_description_has_the_bytes_that_travel():
    sent = {"least_bytes": 48 + 4, "arguments": 2 * (48 + 4)}  # clipping takes all gradients
    for cut, pushed in sent.items():
        found, _ = explained(cut)
        described = found.cut
        assert (described.num_round_trips, described.pulled_bytes) == (1, 52)
        assert (described.pushed_bytes, described.answered_bytes) == (pushed, 48)
        worker, *servers = described.parts
        assert worker.where == "worker" and "dot_general" in worker.operations
        assert [part.where for part in servers] == ["server 0", "server 1"]
        assert all("sqrt" in part.operations for part in servers)
        assert not {"dot_general", "tanh"} & {op for part in servers for op in part.operations}


def test_it_says_where_each_variable_lives_and_how_it_is_used():
    found, _ = explained("least_bytes")
    uses = {v.name: (v.lives, v.num_bytes, v.use) for v in found.cut.variables}
    assert uses["w"] == ("at server 0", 48, "pulled, read now, written")
    assert uses["w/mu"] == ("at server 0", 48, "read now, written")
    assert uses["rate"] == ("at server 1", 4, "pulled, read now, written")
    assert uses["count"] == ("at every server", 4, "read now, written")
    text = " ".join(str(found).split())
    for words in ("round trips 1", "pushed 52 B", "w/mu at server 0 48 B read now, written"):
        assert words in text, str(found)
    assert json.loads(found.to_json())["cut"]["num_round_trips"] == 1
    other = dj.explain(lambda x: x, jnp.ones(3), strategy=dj.OneDeviceStrategy())
    assert other.cut is None and "cut, per step" not in str(other)


def explained_in_a_group(strategy):
    """Returns what is said of a step with collectives before and after a round trip."""
    with strategy.scope():
        w = dj.Variable(jnp.ones((3, 4)), name="w")
        total = dj.Variable(0.0, name="total", aggregation=dj.VariableAggregation.SUM)
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
        optimizer.init([w])

    def add(strategy, x):
        total.assign_add(strategy.reduce("sum", x))  # in the merge function
        return total.value

    def step(x):
        context = dj.get_replica_context()
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w.value)
        optimizer.apply_gradients([(grad, w)])
        total = context.merge_call(add, args=(loss,))
        neighbor = lax.ppermute(x, "replica", [(0, 1), (1, 0)])  # before
        return neighbor, context.all_reduce("sum", total * x[0, :2])  # after

    (x,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    return dj.explain(step, x, strategy=strategy)


def listed(collectives):
    return sorted((c.kind, c.result_bytes, c.source.split(" (")[0]) for c in collectives)


@pytest.mark.parametrize("cut", ["least_bytes", "arguments"])
def test_it_lists_what_each_worker_reduces_over_its_devices(cut):
    d = jax.devices()
    found = explained_in_a_group(dj.ParameterServerStrategy([d[:2], d[2:4]], 2, cut=cut))
    expected = explained_in_a_group(dj.MirroredStrategy(d[:2]))
    assert found.cut.num_round_trips == 1
    of_steps = [
        ("all-reduce", 2 * 4, line_of(__file__, "after")),
        ("collective-permute", 2 * 3 * 4, line_of(__file__, "before")),
    ]
    assert listed(found.written) == of_steps
    assert set(of_steps) < set(listed(expected.written))
    compiled, by_one = found.compiled_counts, expected.compiled_counts
    assert compiled["collective-permute"] == by_one["collective-permute"] == (1, 24)
    moved = 3 * 4 * 4 + 4 if cut == "least_bytes" else 0  # the gradient and the loss
    assert compiled["all-reduce"].result_bytes == 2 * 4 + moved
    assert by_one["all-reduce"].result_bytes == 2 * 4 + 3 * 4 * 4 + 4
    sources = {c.source.split(" (")[0] for c in found.compiled}
    assert sources <= {*(line for *_, line in of_steps), "a merge function", IN_MERGE}
    assert (len(sources) > 2) == (cut == "least_bytes")
    assert "as written, over the devices of each worker:" in str(found)


IN_MERGE = line_of(__file__, "in the merge function")


def test_a_worker_of_one_device_has_nothing_to_reduce_over():
    found, _ = explained("least_bytes")
    assert found.written == found.compiled == ()
