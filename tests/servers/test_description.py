"""dj.explain shows the cut: what runs where, what travels, which variable lives where."""

import json

import jax
import jax.numpy as jnp
import optax

import distjax as dj


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
