"""dj.lax: loops and branches that carry the variables which their bodies write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import DivergenceError, TraceLeakError
from tests.replicas import ids, local, per_replica

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation
ONE = np.float32(1)


def make(strategy, initial_value=0.0, aggregation=AGG.SUM, **options):
    with strategy.scope():
        return dj.Variable(initial_value, name="v", aggregation=aggregation, **options)


def both(strategy):
    """Returns a mirrored variable and a sync-on-read one."""
    return make(strategy), make(strategy, synchronization=SYNC.ON_READ)


def parts(variable):
    return [float(c) for c in variable.local_results()]


# -- replica context: each step adds 1 + 2 to v, and the replica's own to r ----


def scan_body(v, r, x):
    def body(carry, i):
        v.assign_add(x)
        r.assign_add(x * i)
        return carry + v.value, r.value

    return dj.lax.scan(body, jnp.float32(0), jnp.array([1.0, 2.0, 3.0]))


def test_scan_in_a_replica(pair, how):
    v, r = both(pair)
    step = how(lambda x: pair.run(lambda x: scan_body(v, r, x), args=(x,)))
    final, ys = step(per_replica(pair, [ONE, 2 * ONE]))
    assert local(pair, final) == [18, 18]
    assert local(pair, ys) == [[1, 3, 6], [2, 6, 12]]
    assert parts(v) == [9, 9] and parts(r) == [6, 12]


@pytest.mark.parametrize("context", ["eager", "scope", "jit"])
def test_scan_across_replicas(pair, context):
    v, r = make(pair), make(pair, aggregation=AGG.MEAN, synchronization=SYNC.ON_READ)

    def step():
        def body(carry, x):
            v.assign_add(x)
            r.assign(v.value * 2)
            return carry + v.value, r.value

        return dj.lax.scan(body, jnp.float32(0), jnp.array([1.0, 2.0, 3.0]))

    if context == "scope":
        with pair.scope():
            final, ys = step()
    else:
        final, ys = dj.jit(step)() if context == "jit" else step()
    assert float(final) == 10 and ys.tolist() == [2, 6, 12]
    assert parts(v) == [6, 6] and parts(r) == [12, 12]


@pytest.mark.parametrize("context", ["eager", "run", "jit"])
def test_loops_with_the_default_strategy(context):
    v = dj.Variable(0.0)

    def step():
        def body(carry, x):
            v.assign_add(x)
            return carry + v.value, v.value

        return dj.lax.scan(body, jnp.float32(0), jnp.array([1.0, 2.0, 3.0]))

    run = {"eager": step, "run": lambda: dj.get_strategy().run(step), "jit": dj.jit(step)}[context]
    final, ys = run()
    assert float(final) == 10 and ys.tolist() == [1, 3, 6] and float(v.value) == 6


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [dict(reverse=True), dict(unroll=2), dict(length=3)], ids=str)
def test_scan_has_the_options_of_jax(pair, how, options):
    v = make(pair)
    xs = jnp.array([1.0, 2.0, 4.0])

    def body(carry, x):
        v.assign(2 * v.value + x)
        return carry, v.value

    plain = lax.scan(lambda c, x: (2 * c + x,) * 2, jnp.float32(0), xs, **options)
    _, ys = how(lambda: dj.lax.scan(body, None, xs, **options))()
    assert ys.tolist() == plain[1].tolist() and float(v.value) == float(plain[0])


def test_scan_over_trees_and_over_nothing(pair, how):
    v = make(pair)

    def body(carry, x):
        v.assign_add(x["a"] + x["k"].shape[0] if x else 1.0)
        return carry, None

    xs = {"a": np.array([1.0, 2.0], np.float32), "k": jnp.ones((2, 3))}
    how(lambda: dj.lax.scan(body, 0, xs))()
    assert float(v.value) == 9
    how(lambda: dj.lax.scan(body, 0, None, length=4))()
    assert float(v.value) == 13


def test_scan_of_no_steps(pair):
    v = make(pair, 5.0)

    def body(carry, x):
        return carry + v.assign_add(x), x

    final, ys = dj.jit(lambda: dj.lax.scan(body, jnp.float32(0), jnp.zeros(0)))()
    assert float(final) == 0 and ys.shape == (0,) and float(v.value) == 5


def test_fori_loop(pair, how):
    v, r = both(pair)

    def fn(x, n):
        def body(i, carry):
            v.assign_add(x)
            r.assign_add(jnp.float32(i))
            return carry + 1

        return dj.lax.fori_loop(0, n, body, 0), v.value

    step = how(lambda x, n: pair.run(fn, args=(x, n)))
    x = per_replica(pair, [ONE, 2 * ONE])
    count, value = step(x, 4)  # the bound is traced
    assert local(pair, count) == [4, 4] and local(pair, value) == [12, 12]
    assert parts(v) == [12, 12] and parts(r) == [6, 6]
    assert local(pair, step(x, 0)[1]) == [12, 12]


def test_while_loop(pair, how):
    v, r = both(pair)

    def fn(x):
        def body(carry):
            v.assign_add(x)
            r.assign_sub(x)
            return carry + 1

        return dj.lax.while_loop(lambda carry: v.value < 10, body, 0)  # reads what is written

    step = how(lambda x: pair.run(fn, args=(x,)))
    assert local(pair, step(per_replica(pair, [ONE, 2 * ONE]))) == [4, 4]
    assert parts(v) == [12, 12] and parts(r) == [-4, -8]


def test_cond(pair, how):
    v, r = both(pair)

    def fn(p, x):
        def yes(x):
            v.assign_add(x)
            return v.value

        def no(x):
            r.assign_add(x)
            return r.value

        return dj.lax.cond(p, yes, no, x)

    step = how(lambda p, x: pair.run(fn, args=(p, x)))
    x = per_replica(pair, [ONE, 2 * ONE])
    assert local(pair, step(jnp.bool_(True), x)) == [3, 3]
    assert (parts(v), parts(r)) == ([3, 3], [0, 0])
    assert local(pair, step(jnp.bool_(False), x)) == [1, 2]
    assert (parts(v), parts(r)) == ([3, 3], [1, 2])


def test_switch(pair, how):
    v, r = both(pair)
    branches = [
        lambda x: v.assign_add(x),
        lambda x: r.assign_add(x),
        lambda x: x,
    ]
    step = how(lambda i, x: pair.run(lambda i, x: dj.lax.switch(i, branches, x), args=(i, x)))
    x = per_replica(pair, [ONE, 2 * ONE])
    assert local(pair, step(jnp.int32(0), x)) == [3, 3]
    assert local(pair, step(jnp.int32(1), x)) == [1, 2]
    assert local(pair, step(jnp.int32(2), x)) == [1, 2]
    assert (parts(v), parts(r)) == ([3, 3], [1, 2])


@pytest.mark.parametrize("name", ["cond", "switch", "while_loop", "fori_loop"])
def test_across_replicas(pair, how, name):
    v = make(pair)
    add = lambda *_: v.assign_add(2.0)
    run = {
        "cond": lambda n: dj.lax.cond(n > 0, add, lambda: v.value),
        "switch": lambda n: dj.lax.switch(n, [lambda: v.value, lambda: v.value, add]),
        "while_loop": lambda n: dj.lax.while_loop(lambda c: c < 2, add, jnp.float32(0)),
        "fori_loop": lambda n: dj.lax.fori_loop(1, n, add, jnp.float32(0)),
    }[name]
    assert float(how(run)(jnp.int32(2))) == 2 and parts(v) == [2, 2]


def test_loops_in_loops_and_branches(pair, how):
    v = make(pair)

    def fn(x):
        def outer(i, carry):
            def inner(carry, y):
                dj.lax.cond(y > 0, lambda: v.assign_add(x), lambda: v.value)
                return carry, v.value

            return dj.lax.scan(inner, carry, jnp.array([1.0, -1.0, 1.0]))[0]

        dj.lax.fori_loop(0, 2, outer, 0)
        return v.value

    step = how(lambda x: pair.run(fn, args=(x,)))
    assert local(pair, step(per_replica(pair, [ONE, 2 * ONE]))) == [12, 12]


def test_merges_in_loops_write_variables(pair, how):
    v, r = both(pair)

    def fn(x):
        def merge(strategy, x):
            v.assign_add(strategy.reduce("sum", x))

        def body(carry, _):
            r.assign_add(x)
            dj.get_replica_context().merge_call(merge, args=(r.value,))
            return carry, v.value

        return dj.lax.scan(body, 0, None, length=3)[1]

    step = how(lambda x: pair.run(fn, args=(x,)))
    assert local(pair, step(per_replica(pair, [ONE, 2 * ONE]))) == [[3, 9, 18]] * 2
    assert parts(v) == [18, 18] and parts(r) == [3, 6]


def test_steps_in_a_loop_around_run(pair):
    """dj.lax around `run`: many steps of training as one program."""
    v, r = both(pair)
    x = per_replica(pair, [ONE, 2 * ONE])

    def step(i, carry):
        pair.run(lambda x: (v.assign_add(x), r.assign_add(x), None)[2], args=(x,))
        return carry + pair.reduce("sum", pair.run(lambda: r.value))

    assert float(dj.jit(lambda: dj.lax.fori_loop(0, 3, step, jnp.float32(0)))()) == 18
    assert parts(v) == [9, 9] and parts(r) == [3, 6]


def test_variables_of_keys_and_integers_are_carried(pair, how):
    with pair.scope():
        key = dj.Variable(jax.random.key(0))
        count = dj.Variable(0)

    def step():
        def body(carry, _):
            new, use = jax.random.split(key.value)
            key.assign(new)
            count.assign_add(1)
            return carry, jax.random.uniform(use)

        return dj.lax.scan(body, 0, None, length=3)[1]

    drawn = how(step)()
    k, expected = jax.random.key(0), []
    for _ in range(3):
        k, use = jax.random.split(k)
        expected.append(float(jax.random.uniform(use)))
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert int(count.value) == 3
    np.testing.assert_array_equal(jax.random.key_data(key.value), jax.random.key_data(k))


def test_jax_refuses_what_it_refuses(pair):
    with pytest.raises(TypeError):
        dj.jit(lambda: dj.lax.fori_loop(0, 2, lambda i, c: (c, c), 0.0))()


# -- decision 28: a predicate that differs per replica -------------------------


def per_replica_control(name, write):
    """Returns a replica function in which only replica 1 (while: each 1 + id times) writes."""

    def fn(x):
        number = dj.get_replica_context().replica_id_in_sync_group
        if name == "cond":
            return dj.lax.cond(number == 1, lambda: write(x), lambda: x)
        if name == "switch":
            return dj.lax.switch(number, [lambda: x, lambda: write(x), lambda: -x])
        body = lambda carry: (carry[0] + 1, write(x))
        return dj.lax.while_loop(lambda c: c[0] < number, body, (0, x))[1]

    return fn


@pytest.mark.parametrize("name", ["cond", "switch", "while_loop"])
def test_local_writes_under_a_per_replica_predicate(pair, how, name):
    r = make(pair, synchronization=SYNC.ON_READ)
    fn = per_replica_control(name, lambda x: r.assign_add(10 * x))
    step = how(lambda x: pair.run(fn, args=(x,)))
    assert local(pair, step(per_replica(pair, [ONE, 2 * ONE]))) == [1, 20]
    assert parts(r) == [0, 20]


COLLECTIVE = {
    "aggregated write": lambda v, x: v.assign_add(x),
    "merge": lambda v, x: dj.get_replica_context().merge_call(
        lambda strategy, x: strategy.reduce("sum", x), args=(x,)
    ),
    "all_reduce": lambda v, x: dj.get_replica_context().all_reduce("sum", x),
    "bare": lambda v, x: lax.psum(x, "replica"),
}


@pytest.mark.parametrize("what", list(COLLECTIVE))
@pytest.mark.parametrize("name", ["cond", "switch", "while_loop"])
@pytest.mark.parametrize("count", [1, 2])
def test_collectives_under_a_per_replica_predicate(count, name, what):
    for strategy in (dj.MirroredStrategy(jax.devices()[:count]), dj.VirtualStrategy(count)):
        v = make(strategy)
        fn = per_replica_control(name, lambda x, v=v: COLLECTIVE[what](v, x))
        with pytest.raises(DivergenceError) as caught:
            strategy.run(fn, args=(ids(strategy),))
        first = str(caught.value).splitlines()[0]
        held = "merge_call" if what == "merge" else "psum"
        assert first.startswith(f"a lax.{name} that holds {held}")
        assert "needs a predicate that is equal on every replica" in first
        assert "test_lax.py" in str(caught.value)
        assert float(v.value) == 0


def test_a_first_replica_write_is_aggregated_too(pair):
    v = make(pair, aggregation=AGG.ONLY_FIRST_REPLICA)
    with pytest.raises(DivergenceError, match="needs a predicate that is equal"):
        pair.run(per_replica_control("cond", lambda x: v.assign(x)), args=(ids(pair),))


# -- conditions do not write --------------------------------------------------


def test_a_condition_that_writes(pair):
    v = make(pair)

    def condition(carry):
        v.assign_add(jnp.float32(1))
        return carry < 3

    for run in (
        lambda fn: pair.run(fn),
        lambda fn: dj.jit(fn)(),
    ):
        with pytest.raises(TraceLeakError) as caught:
            run(lambda: dj.lax.while_loop(condition, lambda c: c + 1, 0))
        assert str(caught.value).splitlines()[0] == (
            "cond_fun of while_loop needs to leave variable 'v' as it is."
        )
        assert str(caught.value).endswith("Fix: v.assign(x) in body_fun")
    assert float(v.value) == 0


def test_equal_numbers_whatever_the_context(pair):
    """The same body gives the same in eager cross-replica code, dj.jit and a merge."""

    def step(v):
        def body(i, carry):
            v.assign(v.value * 2 + i)
            return carry + v.value

        return dj.lax.fori_loop(0, 5, body, jnp.float32(0))

    results = []
    for run in (
        lambda fn: fn(),
        lambda fn: dj.jit(fn)(),
        lambda fn: pair.run(lambda: dj.get_replica_context().merge_call(lambda strategy: fn())),
    ):
        v = make(pair, 1.0)
        results.append((float(run(lambda v=v: step(v))), float(v.value)))
    assert results[0] == results[1] == results[2] == (2 + 5 + 12 + 27 + 58, 58)
