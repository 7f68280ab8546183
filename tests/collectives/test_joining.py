"""Maps over the replicas that follow each other are one: fewer `shard_map`s, the same values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import distjax as dj
from distjax._src import jax_compat
from distjax._src.collectives.mapping import is_replica_map, join_maps, map_replicas
from tests.replicas import ids

R = 4
TOPOLOGY = dj.MirroredStrategy(jax.devices()[:R]).extended.topology
#: Whether a value is an array [R, 2], of which each replica sees a row, or [2].
SPLIT, EQUAL = True, False


def mapped(fn, ins, outs, topology=TOPOLOGY):
    def call(*args):
        results = map_replicas(topology, lambda *local: fn(*local), args, ins, outs)
        return results[0] if len(results) == 1 else results

    return call


def square(x):
    return mapped(lambda x: [x * x], [SPLIT], [SPLIT])(x)


def total(x):
    return mapped(lambda x: [lax.psum(x, "replica")], [SPLIT], [EQUAL])(x)


def maps(jaxpr):
    """The maps of a jaxpr, at any depth of what is in the global view."""
    for eqn in jaxpr.eqns:
        if is_replica_map(eqn):
            yield eqn
        else:
            for sub in jax_compat.sub_jaxprs(eqn):
                yield from maps(sub)


def joined(fn, *args, derivative=False):
    """Returns the number of maps of `fn`, before and after, having compared the values."""
    closed = jax.make_jaxpr(fn)(*args)
    jaxpr, consts = jax_compat.open_jaxpr(closed)
    after = join_maps(jaxpr)
    leaves = jax.tree.leaves(args)
    call = lambda code: functools.partial(jax_compat.eval_jaxpr, code, consts)
    for before, now in zip(*(jax.jit(call(c))(leaves) for c in (jaxpr, after)), strict=True):
        np.testing.assert_array_equal(before, now)
    if derivative:
        total = lambda code: jax.grad(lambda leaves: sum(map(jnp.sum, call(code)(leaves))))
        ours, theirs = jax.jit(lambda leaves: (total(after)(leaves), total(jaxpr)(leaves)))(leaves)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    assert [v.aval for v in after.outvars] == [v.aval for v in jaxpr.outvars]
    return len([*maps(jaxpr)]), len([*maps(after)])


@jax.custom_vjp
def clipped(x):
    return 2 * x


# Not linear in the cotangent: replicas' own ones have another result than their mean.
clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.clip(g, -1, 1),))

X = np.arange(2 * R, dtype=np.float32).reshape(R, 2)
ADD = mapped(lambda a, b: [a + b], [SPLIT, SPLIT], [SPLIT])


@pytest.mark.parametrize(
    "fn, counts",
    [
        (lambda x: total(square(x)), (2, 1)),
        (lambda x: total(square(square(x))), (3, 1)),
        # What is used elsewhere stays a result.
        (lambda x: (lambda y: (total(y), y + 1))(square(x)), (2, 1)),
        # One result, taken by two maps, between which there is other code.
        (lambda x: (lambda y: (total(y), jnp.sin(y).sum(), total(y)))(square(x)), (3, 1)),
        # The later of two is continued; an operand that was known before comes from outside.
        (lambda x: ADD(square(x), square(x + 1)), (3, 2)),
        (lambda x: ADD(square(x), x), (2, 1)),
        (lambda x: mapped(lambda x, y: [x * y], [SPLIT, EQUAL], [SPLIT])(square(x), 2.0), (2, 1)),
        # A result that is the map's operand, one that comes twice, and a number.
        (lambda x: total(mapped(lambda x: [x], [SPLIT], [SPLIT])(x)), (2, 1)),
        (lambda x: ADD(*mapped(lambda x: [x, x], [SPLIT], [SPLIT, SPLIT])(x)), (2, 1)),
        (
            lambda x: ADD(
                x, mapped(lambda x: [jnp.ones(2)], [SPLIT], [SPLIT])(square(x)) * np.float32(1)
            ),
            (3, 2),
        ),
        # What is equal on all replicas stays one value, also for derivatives.
        (lambda x: mapped(lambda s: [s + 1], [EQUAL], [EQUAL])(total(x)), (2, 2)),
        # Not split as it was left.
        (lambda x: mapped(lambda x: [x.sum()], [EQUAL], [EQUAL])(square(x)), (2, 2)),
        # Something else that it takes is not known where the other one is.
        (lambda x: (lambda y: ADD(y, y + 1))(square(x)), (2, 2)),
        (lambda x: total(square(x) + 1), (2, 2)),
    ],
)
def test_which_maps_are_joined(fn, counts):
    assert joined(fn, X) == counts


def test_maps_over_other_devices_are_not_joined():
    other = dj.MirroredStrategy(jax.devices()[:R][::-1]).extended.topology
    again = mapped(lambda x: [jnp.sin(x)], [SPLIT], [SPLIT], other)
    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: again(square(x)))(X))
    assert join_maps(jaxpr) is jaxpr


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_users_own_maps_are_left_alone(check_vma):
    spec = jax.P("replica")
    mine = jax.shard_map(
        jnp.sin, mesh=TOPOLOGY.mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: total(mine(mine(x))))(X))
    assert join_maps(jaxpr) is jaxpr


def test_settings_of_a_map_hold_for_it_alone():
    def fn(x):
        y = square(x)
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            return total(y)

    assert joined(fn, X) == (2, 2)


def test_effects_stay_in_their_order():
    def told(x):
        jax.debug.callback(lambda: None, ordered=True)
        return [x]

    # JAX orders effects on one device only.
    topology = dj.MirroredStrategy(jax.devices()[:1]).extended.topology
    tell = mapped(told, [SPLIT], [SPLIT], topology)
    plain = mapped(lambda x: [jnp.sin(x)], [SPLIT], [SPLIT], topology)
    assert joined(lambda x: plain(tell(x)), X[:1]) == (2, 1)
    assert joined(lambda x: tell(plain(x)), X[:1]) == (2, 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.scan(lambda c, _: (square(c) * total(square(c)), None), x, length=2)[0],
        lambda x: lax.cond(x.sum() > 0, lambda x: total(square(x)), lambda x: total(x) * 2, x),
        lambda x: lax.while_loop(lambda c: total(square(c)).sum() < 1, square, x),
        lambda x: jax.jit(lambda x: total(square(x)))(x),
    ],
    ids=["scan", "cond", "while", "jit"],
)
def test_in_loops_branches_and_calls(fn):
    before, after = joined(fn, X / 10)
    assert after < before


def test_code_without_such_maps_stays_the_same_object():
    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: jax.jit(square)(x) + total(x))(X))
    assert join_maps(jaxpr) is jaxpr


def test_code_that_is_called_twice_stays_one_object():
    inner = jax.jit(lambda x: square(x) / (1 + total(square(x))))
    fn = lambda x: inner(inner(inner(jnp.sin(x))))
    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(fn)(X))
    called = lambda jaxpr: [e.params["jaxpr"] for e in jaxpr.eqns if "jaxpr" in e.params]
    before, after = called(jaxpr), called(join_maps(jaxpr))
    assert before[1] is before[2] and after[1] is after[2] is not before[1]


def test_a_scope_of_all_maps_stays_around_them():
    def fn(x):
        with jax.named_scope("step"):
            return total(square(x))

    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(fn)(X))
    (joined_map,) = join_maps(jaxpr).eqns
    assert str(joined_map.source_info.name_stack) == "step"
    inside, _ = jax_compat.open_jaxpr(joined_map.params["jaxpr"])
    assert {str(eqn.source_info.name_stack) for eqn in inside.eqns} == {""}


def test_an_operation_keeps_its_name():
    def fn(x):
        with jax.named_scope("one"):
            y = square(x)
        with jax.named_scope("two"):
            return total(y)

    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(fn)(X))
    text = jax.jit(functools.partial(jax_compat.eval_jaxpr, join_maps(jaxpr), ())).lower([X])
    text = text.as_text(debug_info=True)
    assert "one/mul" in text and "two/psum" in text and "one/two" not in text


# -- in programs ---------------------------------------------------------------


def count_in(program, *args):
    return program.lower(*args).as_text().count("sdy.manual_computation")


def test_a_step_and_its_reduction_are_one_map():
    strategy = dj.MirroredStrategy(jax.devices()[:R])
    with strategy.scope():
        v = dj.Variable(np.zeros(2, np.float32))

    def merged(strategy, grads):
        mean = strategy.reduce("mean", grads)
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(mean,))
        return mean

    def step(x):
        return dj.get_replica_context().merge_call(merged, args=(x * jnp.ones(2),))

    @dj.jit
    def train(x):
        return strategy.run(step, args=(x,))

    mean = (R - 1) / 2
    assert train(ids(strategy)).tolist() == [mean, mean]
    assert v.value.tolist() == [-mean, -mean]
    assert count_in(train, ids(strategy)) == 1


def test_a_run_and_the_reduction_of_its_result_are_one_map():
    strategy = dj.MirroredStrategy(jax.devices()[:R])

    @dj.jit
    def train(x):
        return strategy.reduce("sum", strategy.run(lambda x: x * x, args=(x,)))

    assert float(train(ids(strategy))) == sum(r * r for r in range(R))
    assert count_in(train, ids(strategy)) == 1


def test_a_derivative_is_that_of_the_maps_apart():
    strategy = dj.MirroredStrategy(jax.devices()[:R])
    summed = lambda strategy, x: strategy.reduce("sum", x)

    def step(w, x):
        merged = lambda x: dj.get_replica_context().merge_call(summed, args=(x,))
        h = clipped(w)  # equal on all replicas
        s = merged(h * x)
        return merged(h * x * s)  # used again after a merge

    f = lambda w, x: strategy.run(step, args=(w, x))
    w, x = jnp.float32(0.7), strategy.per_replica(0.1 + 0.37 * np.arange(R, dtype=np.float32))
    of_joined, apart = jax.grad(dj.jit(f))(w, x), dj.jit(jax.grad(f))(w, x)
    np.testing.assert_allclose(of_joined, apart, rtol=1e-6)


# -- a law ---------------------------------------------------------------------


@st.composite
def programs(draw):
    """Steps of a program: (kind, which of the values so far are its operands)."""
    kinds = st.sampled_from(("local", "pair", "total", "equal", "outside"))
    number = st.integers(0, 100)
    return draw(st.lists(st.tuples(kinds, number, number), min_size=2, max_size=8))


def run_program(steps, x):
    """Evaluates a program and returns all its values, of the shape [R, 2]."""
    values = [x]
    for kind, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind == "local":
            values.append(mapped(lambda a: [jnp.sin(clipped(a))], [SPLIT], [SPLIT])(a))
        elif kind == "pair":
            values += mapped(lambda a, b: [a * b, a - b], [SPLIT, SPLIT], [SPLIT, SPLIT])(a, b)
        elif kind == "total":  # equal between two maps
            mean_of = lambda a: [clipped(lax.pmean(a, "replica"))]
            mean = mapped(mean_of, [SPLIT], [EQUAL])(a)
            mean = mean if j % 2 else 1.5 * mean
            values.append(mapped(lambda b, m: [b * m], [SPLIT, EQUAL], [SPLIT])(b, mean))
        elif kind == "equal":  # as a whole in each replica
            values.append(mapped(lambda a: [jnp.cos(a)], [EQUAL], [EQUAL])(a))
        else:
            values.append(a + 0.5 * b)
    return values


@settings(max_examples=20, deadline=None)
@given(programs())
def test_law_joined_maps_compute_the_same(steps):
    before, after = joined(functools.partial(run_program, steps), X, derivative=True)
    assert after <= before
