"""Merges, collectives and writes in loops, branches and transformations (decisions 5, 28)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import (
    DivergenceError,
    LocalityError,
    MergeError,
    TraceLeakError,
)
from tests.replica.merging import context, merge, sum_of
from tests.replicas import ids, local, per_replica

# -- inside control flow and transformations: decision 5 -----------------------


def scanned(x):
    def body(c, x):
        total = merge(sum_of, x)
        return c + total, total

    return lax.scan(body, jnp.zeros(()), jnp.stack([x, x, x]))[0]


WRAPPED = {
    "scan": scanned,
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + merge(sum_of, x), 0.0),
    "while_loop": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + merge(sum_of, x)), (0, 0.0)
    )[1],
    "cond": lambda x: lax.cond(
        context().all_reduce("sum", x) > 0, lambda: 3 * merge(sum_of, x), lambda: x
    ),
    "switch": lambda x: lax.switch(
        1, [lambda: x, lambda: 3 * merge(sum_of, x), lambda: 5 * merge(sum_of, x)]
    ),
    "jit": lambda x: jax.jit(lambda x: 3 * merge(sum_of, x))(x),
    "remat": lambda x: jax.checkpoint(lambda x: 3 * merge(sum_of, x))(x),
    "vmap": lambda x: jax.vmap(lambda x: merge(sum_of, x))(jnp.stack([x, x, x])).sum(),
    # d/dy of 1.5 * sum(y * y), the cotangents of both replicas summed: 6 y
    "grad": lambda x: jax.grad(lambda y: 1.5 * merge(sum_of, y * y))(x) / x * merge(sum_of, x) / 2,
    "jit in scan": lambda x: lax.scan(
        lambda c, _: (c + jax.jit(lambda x: merge(sum_of, x))(x), None), jnp.float32(0), length=3
    )[0],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("name", WRAPPED)
def test_merges_in_control_flow(pair, how, name):
    """Each computes three times the sum over replicas of 1 and 2."""
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    out = how(lambda x: pair.run(WRAPPED[name], args=(x,)))(x)
    assert local(pair, out) == [9.0, 9.0]


@pytest.mark.parametrize("name", [n for n in WRAPPED if n != "grad"])
def test_bare_collectives_in_control_flow(pair, name, monkeypatch):
    monkeypatch.setitem(globals(), "merge", lambda fn, x: context().all_reduce("sum", x))
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    assert local(pair, pair.run(WRAPPED[name], args=(x,))) == [9.0, 9.0]


DIVERGING = {
    "cond": lambda x, c: lax.cond(x > 0, lambda: c(x), lambda: x),
    "switch": lambda x, c: lax.switch(
        x.astype(jnp.int32), [lambda: x, lambda: c(x), lambda: x + 1]
    ),
    "while_loop": lambda x, c: lax.while_loop(lambda s: s < x, lambda s: s + c(x), x - 2),
}
COLLECTIVES = {
    "merge_call": lambda x: merge(sum_of, x),
    "psum": lambda x: lax.psum(x, "replica"),
    "all_gather": lambda x: lax.all_gather(x, "replica").sum(),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("construct", DIVERGING)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", ["mirrored1", "mirrored2", "virtual2", "one_device"])
def test_collectives_under_a_predicate_that_differs(construct, collective, kind, how):
    """Refused on every strategy, those of one replica too: a step must not depend on R."""
    from tests.conftest import STRATEGIES

    strategy = STRATEGIES[kind]()

    def fn():
        x = context().replica_id_in_sync_group.astype(jnp.float32)
        return DIVERGING[construct](x, COLLECTIVES[collective])

    with pytest.raises(DivergenceError) as info:
        how(lambda: strategy.run(fn))()
    first = str(info.value).splitlines()[0]
    assert first.startswith(f"a lax.{construct} that holds {collective} needs a predicate"), first
    assert __file__ in str(info.value)
    assert issubclass(DivergenceError, MergeError) and issubclass(DivergenceError, LocalityError)
    assert not dj.in_cross_replica_context()


def test_a_predicate_proved_equal_is_accepted(pair):
    def fn(x):
        p = context().all_reduce("sum", x) > 0
        return lax.cond(p, lambda: merge(sum_of, x), lambda: x)

    assert local(pair, pair.run(fn, args=(ids(pair),))) == [1.0, 1.0]


def test_a_branch_that_differs_without_collectives_is_fine(pair):
    out = pair.run(lambda x: lax.cond(x > 0, lambda: x * 10, lambda: x - 5), args=(ids(pair),))
    assert local(pair, out) == [-5.0, 10.0]


# -- references -----------------------------------------------------------------


def _read_after(x):
    ref = jax.new_ref(x)
    total = merge(sum_of, ref[...])
    ref[...] += total
    return ref[...]


def _written_in_a_loop(x):
    ref = jax.new_ref(x)

    def body(carry, _):
        ref[...] += merge(sum_of, carry)
        return carry, None

    lax.scan(body, x, length=2)
    return ref[...]


def _advised(x):
    value = jax.new_ref(x)[...]
    total = merge(sum_of, value)
    ref = jax.new_ref(value)
    ref[...] += total
    return ref[...]


@pytest.mark.parametrize("fn", [_read_after, _written_in_a_loop], ids=["after", "in a loop"])
def test_a_ref_across_a_merge_is_refused_on_devices(mirrored, fn, how):
    with pytest.raises(MergeError) as caught:
        how(lambda: mirrored.run(fn, args=(ids(mirrored),)))()
    lines = str(caught.value).splitlines()
    assert lines[0] == "a merge_call needs to come before or after all uses of a jax.new_ref."
    assert f"made at {__file__}" in lines[1]
    assert lines[3].startswith("  Fix: value = ref[...] before the merge_call, and ref = jax.new_r")
    total = mirrored.num_replicas_in_sync * (mirrored.num_replicas_in_sync - 1) / 2
    expected = [r + total for r in range(mirrored.num_replicas_in_sync)]
    assert local(mirrored, mirrored.run(_advised, args=(ids(mirrored),))) == expected


# -- the same for writes of variables ------------------------------------------

LEAKS = {
    "scan": lambda w: lax.scan(lambda c, x: (c, w()), 0.0, jnp.arange(2.0)),
    "fori_loop": lambda w: lax.fori_loop(0, 2, lambda i, c: c + w(), 0.0),
    "while_loop": lambda w: lax.while_loop(lambda c: c < 2, lambda c: c + w(), 0.0),
    "cond": lambda w: lax.cond(context().num_replicas_in_sync > jnp.int32(1), w, lambda: 0.0),
    "switch": lambda w: lax.switch(jnp.int32(1), [lambda: 0.0, w, lambda: 1.0]),
    "jit": lambda w: jax.jit(lambda: w())(),
    "grad": lambda w: jax.grad(lambda x: x * w())(1.0),
    "vmap": lambda w: jax.vmap(lambda x: x * w())(jnp.ones(2)),
}


@pytest.mark.parametrize("construct", LEAKS)
@pytest.mark.parametrize("where", ["replica", "merge", "cross"])
def test_writes_that_would_leak(pair, construct, where):
    """Decision 5: the variable named, and the dj.lax function in a loop or branch."""
    with pair.scope():
        v = dj.Variable(1.0, name="leaky", aggregation=dj.VariableAggregation.MEAN)

    def write():
        if where == "merge":
            return merge(lambda s: v.assign_add(1.0))
        return v.assign_add(1.0)

    run = {
        "replica": lambda: pair.run(lambda: LEAKS[construct](write)),
        "merge": lambda: pair.run(lambda: LEAKS[construct](write)),
        "cross": dj.jit(lambda: LEAKS[construct](write)),
    }[where]
    with pytest.raises(TraceLeakError) as info:
        run()
    text = str(info.value)
    assert text.splitlines()[0].startswith("a write of variable 'leaky' needs to happen"), text
    if construct in ("jit", "grad", "vmap"):
        assert "return the new value" in text
    else:
        assert f"distjax.lax.{construct}" in text
    assert float(v.value) == 1.0
