"""Hand-written programs of variables, added to the table of `cases`."""

import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.differential.cases import (
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    SUM,
    case,
    context,
    ids,
    rid,
    rows,
    variable,
)
from tests.differential.outcomes import Case


@case
def seed_update_pattern(strategy):
    w = variable(strategy, 10.0, name="w")

    def merge(strategy, grad):
        grad = strategy.extended.reduce_to("sum", grad, w)
        return strategy.extended.update(w, lambda v, g: v.assign_sub(0.5 * g), args=(grad,))

    def fn():
        return context().merge_call(merge, (1 + rid(),)), w.value

    new = lambda R: 10 - 0.25 * R * (R + 1)
    step = lambda: strategy.run(fn)
    return Case(step, variables=[w], expected=lambda R: [[new(R)] * R] * 2)


@case
def writes_of_mirrored_variables(strategy):
    made = [
        variable(strategy, np.float32([10, 20]), name=a.name, aggregation=a)
        for a in (SUM, MEAN, FIRST)
    ]

    def fn(x):
        out = []
        for v in made:
            out += [v.assign_add(x), v.assign_sub(2 * x), v * x]
        out += [made[1].assign_add(jnp.ones(2)), made[0].assign(x), made[2].assign(x + rid())]
        return out, [v.value for v in made]

    def step(x):
        out = strategy.run(fn, args=(x,))
        made[0].assign_add(np.ones(2))
        made[1].assign(made[1] + made[2].value)
        return out, [made[0].assign_sub(np.ones(2)), *(v.value for v in made)]

    return Case(step, (rows(strategy, lambda r: r + np.arange(2.0)),), made)


@case
def writes_of_sync_on_read_variables(strategy):
    made = [
        variable(strategy, 10.0, name=a.name, synchronization=ON_READ, aggregation=a)
        for a in (SUM, MEAN, FIRST, NONE)
    ]

    def fn(x):
        out = []
        for v in made:
            out += [v.assign_add(x), v.assign_sub(1.0), v.assign(0.9 * v + x)]
        return out

    def step(x):
        out = strategy.run(fn, args=(x,))
        before = [v.value for v in made[:3]]
        made[0].assign(8.0)
        made[1].assign_add(1.0)
        made[2].assign_sub(1.0)
        totals = [strategy.reduce(op, v) for op in ("sum", "mean") for v in made]
        return out, before, [v.value for v in made[:3]], totals

    return Case(step, (rows(strategy, lambda r: 1.0 + r),), made)


@case
def counters_of_ints(strategy):
    count = variable(strategy, 0, name="count", aggregation=SUM)
    seen = variable(strategy, 0, name="seen", synchronization=ON_READ, aggregation=SUM)

    def fn(i):
        seen.assign_add(i + 1)
        return count.assign_add(i), seen.value

    def step(i):
        out = strategy.run(fn, args=(i,))
        total = seen.value
        seen.assign(7)
        return out, total, seen.value

    def expected(R):
        total = R * (R - 1) // 2
        return [[total] * R, ids(R) + 1, [total + R] * R, [7] * R]

    return Case(step, (rows(strategy, lambda r: r, np.int32),), [count, seen], expected)


@case
def metric_by_hand(strategy):
    modes = {"synchronization": ON_READ, "aggregation": SUM}
    total = variable(strategy, 0.0, name="total", **modes)
    count = variable(strategy, 0.0, name="count", **modes)

    def fn(x):
        total.assign_add(x.sum())
        count.assign_add(jnp.float32(x.size))

    def step(x):
        strategy.run(fn, args=(x,))
        strategy.run(fn, args=(x,))
        mean = total.value / count.value
        total.assign(0.0)
        return mean, count.value

    x = rows(strategy, lambda r: r + np.arange(4.0))
    expected = lambda R: [[(R - 1) / 2 + 1.5] * R, [8 * R] * R]
    return Case(step, (x,), [total, count], expected)


@case
def updates_of_sync_on_read_components(strategy):
    v = variable(strategy, 1.0, name="v", synchronization=ON_READ, aggregation=SUM)

    def merge(strategy, x, y):
        extended = strategy.extended
        first = extended.update(v, lambda v, x, y: v.assign_add(x + y), args=(x, y))
        return first, extended.update(v, lambda v: v.assign_sub(0.5))

    def fn(x):
        return context().merge_call(merge, (x, context().all_reduce("sum", x))), v.value

    step = lambda x: (strategy.run(fn, args=(x,)), v.value)

    def expected(R):
        after = ids(R) + 1 + R * (R - 1) / 2
        return [after, after - 0.5, after - 0.5, [(after - 0.5).sum()] * R]

    return Case(step, (rows(strategy, lambda r: r),), [v], expected)


@case
def variables_made_in_a_replica(strategy):
    made = {}

    def fn(x):
        if not made:
            made["w"] = dj.Variable(x + 5 + rid(), name="w", aggregation=SUM)
            made["s"] = dj.Variable(jnp.zeros(2), name="s", synchronization=ON_READ)
        made["s"].assign_add(jnp.full(2, rid()))
        return made["w"].assign_add(x), made["w"].value, made["s"].value

    def step(x):
        with dj.expect("replica 0's initial value wins: that is the case"):
            return strategy.run(fn, args=(x,)), strategy.run(fn, args=(x,))

    return Case(step, (rows(strategy, lambda r: 1.0 + r),))


@case
def values_read_before_a_write(strategy):
    v = variable(strategy, 1.0, name="v", aggregation=MEAN)

    def merge(strategy, x):
        before = v.value
        v.assign_add(strategy.reduce("sum", x))
        return before, v.value

    def fn(x):
        before = v.value
        after = v.assign_add(x)
        seen = context().merge_call(merge, (x,))
        return before, after, seen, v.value

    def step(x):
        return v.value, strategy.run(fn, args=(x,)), v.value

    return Case(step, (rows(strategy, lambda r: 2.0 * r),), [v])
