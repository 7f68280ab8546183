"""Hand-written programs: each makes a Case for a strategy. Those of variables: `variable_cases`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import distjax as dj
from tests.differential.outcomes import Case

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST, NONE = dj.VariableAggregation.ONLY_FIRST_REPLICA, dj.VariableAggregation.NONE
ON_READ = dj.VariableSynchronization.ON_READ

CASES = {}


def case(make):
    """Adds a maker of cases to the table."""
    CASES[make.__name__] = make
    return make


def variable(strategy, initial, **modes):
    """Returns a variable of `strategy`."""
    with strategy.scope():
        return dj.Variable(initial, **modes)


def rows(strategy, fn, dtype=np.float32):
    """Returns a PerReplica of ``fn(replica number)``."""
    return strategy.distribute_values_from_function(
        lambda ctx: np.asarray(fn(ctx.replica_id_in_sync_group), dtype)
    )


def context():
    """Returns the replica context."""
    return dj.get_replica_context()


def rid():
    """Returns this replica's number as a float32."""
    return jnp.float32(context().replica_id_in_sync_group)


def ids(R):
    """Returns [0, ..., R - 1]."""
    return np.arange(R)


# -- merges and reductions ----------------------------------------------------


@case
def seed_example(strategy):
    def fn(three):
        v = three + context().replica_id_in_sync_group
        s = context().merge_call(lambda strategy, v: sum(strategy.local_results(v)), args=(v,))
        return s + v

    total = lambda R: 3 * R + R * (R - 1) // 2
    return Case(
        lambda x: strategy.run(fn, args=(x,)), (3,), expected=lambda R: [total(R) + 3 + ids(R)]
    )


@case
def reductions_in_both_views(strategy):
    def fn(x):
        ctx = context()
        return x, ctx.all_reduce("sum", x), ctx.all_reduce("mean", x), ctx.all_gather(x[None], 0)

    def step(x):
        x, total, mean, gathered = strategy.run(fn, args=(x,))
        return (
            *(total, mean, gathered),
            *(strategy.reduce("sum", x), strategy.reduce("mean", x)),
            *(strategy.reduce("sum", x, axis=0), strategy.reduce("mean", x, axis=0)),
            *(strategy.reduce("sum", total), strategy.reduce("mean", total)),
            *(strategy.gather(x, 0), strategy.gather(total, 0)),
        )

    def expected(R):
        x = np.stack([r + np.arange(3.0) for r in range(R)])
        total, mean = x.sum(0), x.mean(0)
        everywhere = [
            *(total, mean, x, total, mean, x.sum(), x.mean()),
            *(R * total, total, x.reshape(-1), np.concatenate([total] * R)),
        ]
        return [[v] * R for v in everywhere]

    x = rows(strategy, lambda r: r + np.arange(3.0))
    return Case(step, (x,), expected=expected)


@case
def reductions_of_ints_and_bools(strategy):
    def fn(i):
        ctx = context()
        b = i > 0
        return [ctx.all_reduce(op, v) for op in ("sum", "mean") for v in (i, b, 2, {"n": i + 1})]

    def step(i):
        doubled = strategy.run(lambda i: (2 * i, i > 0), args=(i,))
        return strategy.run(fn, args=(i,)), [strategy.reduce(op, doubled) for op in ("sum", "mean")]

    return Case(step, (rows(strategy, lambda r: r, np.int32),))


@case
def masked_means(strategy):
    mask = rows(strategy, lambda r: np.arange(3) <= r, np.bool_)

    def step(x, mask):
        both = [strategy.reduce(op, x, axis=0, mask=mask) for op in ("sum", "mean")]
        return both, strategy.reduce("sum", x, mask=mask)

    return Case(step, (rows(strategy, lambda r: r + np.arange(3.0)), mask))


@case
def merge_results(strategy):
    def merge(strategy, x, y, word, number):
        assert word == "word" and number is None
        return {"each": x, "sum": strategy.reduce("sum", x), "same": y + 1, "word": word}

    def fn(x):
        out = context().merge_call(
            merge, (x, context().all_reduce("sum", x)), {"word": "word", "number": None}
        )
        assert out["word"] == "word"
        return out["each"] * 2, out["sum"], out["same"]

    def expected(R):
        total = R * (R - 1) / 2
        return [2.0 * ids(R), [total] * R, [total + 1] * R]

    step = lambda x: strategy.run(fn, args=(x,))
    return Case(step, (rows(strategy, lambda r: r),), expected=expected)


@case
def nested_run_in_a_merge(strategy):
    def inner(x):
        deeper = lambda strategy, x: strategy.reduce("mean", x)
        return x + rid() + context().merge_call(deeper, (x * 2,))

    def fn(x):
        y = context().merge_call(lambda strategy, x: strategy.run(inner, (x,)), (x,))
        return y, context().all_reduce("sum", y)

    def expected(R):
        y = 2.0 * ids(R) + (R - 1)
        return [y, [y.sum()] * R]

    step = lambda x: strategy.run(fn, args=(x,))
    return Case(step, (rows(strategy, lambda r: r),), expected=expected)


@case
def derivatives_of_reductions(strategy):
    def fn(x):
        ctx = context()
        weight = 1 + rid()
        loss = lambda op: lambda x: weight * ctx.all_reduce(op, x**2).sum()
        tangent = jax.jvp(lambda x: ctx.all_reduce("mean", x**2), (x,), (x,))[1]
        mapped = jax.vmap(lambda x: ctx.all_reduce("sum", x) * x)(x)
        return [jax.grad(loss(op))(x) for op in ("sum", "mean")], tangent, mapped

    def expected(R):
        x = ids(R)[:, None] + np.arange(2.0)
        total = R * (R + 1) / 2
        tangent, mapped = 2 * (x**2).mean(0), x.sum(0) * x
        return [2 * total * x, 2 * total / R * x, [tangent] * R, mapped]

    step = lambda x: strategy.run(fn, args=(x,))
    return Case(step, (rows(strategy, lambda r: r + np.arange(2.0)),), expected=expected)


@case
def keys_of_replicas(strategy):
    def fn(key):
        own = jax.random.uniform(context().fold_in(key))
        return own, jax.random.uniform(key)

    def expected(R):
        key = jax.random.key(7)
        own = [jax.random.uniform(jax.random.fold_in(key, r)) for r in range(R)]
        return [own, [jax.random.uniform(key)] * R]

    step = lambda seed: strategy.run(fn, args=(jax.random.key(seed),))
    return Case(step, (7,), expected=expected)


# -- control flow -------------------------------------------------------------


@case
def meetings_in_jax_loops(strategy):
    w = variable(strategy, 2.0, name="w")

    def fn(x):
        def body(c, x):
            merged = context().merge_call(lambda s, c: s.reduce("mean", c) * w.value, (c + x,))
            return c + context().all_reduce("sum", x), merged

        inner = jax.jit(lambda i, c: c + context().all_reduce("mean", x * w.value) * i)
        return lax.scan(body, rid(), jnp.arange(3.0)), lax.fori_loop(0, 3, inner, rid())

    return Case(lambda x: strategy.run(fn, args=(x,)), (rows(strategy, lambda r: 1.0 + r),), [w])


@case
def writes_in_dj_loops(strategy):
    w = variable(strategy, 1.0, name="w", aggregation=SUM)
    s = variable(strategy, 1.0, name="s", synchronization=ON_READ, aggregation=SUM)

    def merge(strategy, x):
        w.assign_sub(0.125 * strategy.reduce("mean", x))
        return w.value

    def fn(x):
        def body(i, c):
            w.assign_add(c)
            s.assign_add(w.value * i)
            return 0.5 * c + 0.125 * context().merge_call(merge, (c,))

        def scanned(c, x):
            return c + s.assign_sub(x), w.assign_add(x)

        def go_on(c):
            return c[0] < 3

        def again(c):
            return c[0] + 1, c[1] + w.assign_add(0.5 * c[1])

        first = dj.lax.fori_loop(0, 3, body, x)
        return (
            first,
            dj.lax.scan(scanned, x, jnp.arange(3.0)),
            dj.lax.while_loop(go_on, again, (0, x)),
        )

    return Case(lambda x: strategy.run(fn, args=(x,)), (rows(strategy, lambda r: 1.0 + r),), [w, s])


@case
def branches_with_equal_predicates(strategy):
    w = variable(strategy, 1.0, name="w", aggregation=MEAN)

    def fn(flag, x):
        meet = lambda x: context().merge_call(lambda s, x: s.reduce("sum", x), (x,))
        first = dj.lax.cond(flag > 0, lambda x: w.assign_add(x), lambda x: x, x)
        second = dj.lax.cond(flag > 1, lambda: x, lambda: context().all_reduce("mean", x))
        third = lax.cond(flag > 0, meet, lambda x: -x, x)
        return first, second, third, dj.lax.switch(flag, [lambda: x, lambda: w.assign_sub(x)])

    step = lambda flag, x: strategy.run(fn, args=(flag, x))
    return Case(step, (1, rows(strategy, lambda r: 1.0 + r)), [w])


@case
def branches_with_own_predicates(strategy):
    s = variable(strategy, 1.0, name="s", synchronization=ON_READ, aggregation=SUM)

    def fn(x):
        return dj.lax.cond(x > 0, lambda: s.assign_add(x), lambda: s.assign(-1.0)), s.value

    def expected(R):
        new = np.where(ids(R) > 0, ids(R) + 1.0, -1.0)
        return [new, new]

    step = lambda x: strategy.run(fn, args=(x,))
    return Case(step, (rows(strategy, lambda r: r),), [s], expected)


@case
def training(strategy):
    w = variable(strategy, np.zeros(2, np.float32), name="w")

    def fn(x, y):
        def loss(w):
            return jnp.mean((x @ w - y) ** 2)

        value, grad = jax.value_and_grad(loss)(w.value)

        def apply(strategy, grad):
            grad = strategy.reduce("mean", grad)
            strategy.extended.update(w, lambda v, g: v.assign_sub(0.05 * g), args=(grad,))

        context().merge_call(apply, (grad,))
        return value

    def step(x, y):
        return [strategy.reduce("mean", strategy.run(fn, args=(x, y))) for _ in range(2)]

    x = rows(strategy, lambda r: np.sin(np.arange(8.0) + 8 * r).reshape(4, 2))
    y = rows(strategy, lambda r: np.cos(np.arange(4.0) + 4 * r))
    return Case(step, (x, y), [w])
