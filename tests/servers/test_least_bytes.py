"""What runs at the worker of a merge, so that the fewest bytes travel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj
from distjax._src.jax_compat import Literal
from distjax._src.servers.cutting import plans
from distjax._src.servers.cutting.stages import equations_at_worker, results_by_server
from tests.servers.serial import SerialStrategy
from tests.servers.test_cut import assert_same, train

GRADIENTS = 4 * (12 + 4)
METRIC = 2 * 4


def make(servers=1):
    return SerialStrategy(servers, cut="least_bytes")


@pytest.mark.parametrize(
    "tx, servers, more",
    [
        (optax.adam(0.1), 1, 0),  # its squares of gradients are made at the server
        (optax.adam(0.1), 2, 0),
        (optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)), 2, 0),
        (optax.apply_if_finite(optax.adam(0.1), 3), 2, 2),  # a truth value to each server
    ],
    ids=["adam-1", "adam-2", "clipped", "if finite"],
)
def test_each_server_takes_its_own_gradients_and_little_more(tx, servers, more):
    strategy = make(servers)
    assert_same(train(strategy, tx), train(dj.OneDeviceStrategy(), tx), rtol=2e-6)
    assert strategy.engine.pushed == 6 * (GRADIENTS + METRIC + more)
    assert strategy.engine.answered == 0


def test_an_accumulated_gradient_crosses_once():
    options = {"tx": optax.adam(0.1), "accumulate_steps": 3}
    strategy = make(2)
    assert_same(train(strategy, **options), train(dj.OneDeviceStrategy(), **options), rtol=2e-6)
    assert strategy.engine.pushed == 6 * (GRADIENTS + METRIC)


def push_bytes(merge, *args):
    """Returns the bytes sent and answered of one merge, and what it returned."""
    strategy = make()
    with strategy.scope():
        v = dj.Variable(jnp.zeros(8), name="v")
    step = lambda *args: dj.get_replica_context().merge_call(merge, args=(v, *args))
    result = strategy.run(step, args=args)
    return strategy.engine.pushed, strategy.engine.answered, result


@pytest.mark.parametrize(
    "amount, argument, sent",
    [
        (lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), jnp.ones(8), 16),
        (lambda g: jnp.mean(g, axis=0), jnp.ones((4, 8)), 32),
        (lambda i: jax.nn.one_hot(i, 8), jnp.int32(3), 4),  # small is sent, and made large
    ],
    ids=["cast", "mean", "one-hot"],
)
def test_the_cut_is_where_a_value_is_small(amount, argument, sent):
    def merge(strategy, v, x):
        v.assign_add(amount(x))

    assert push_bytes(merge, argument) == (sent, 0, None)


def test_an_answer_that_needs_no_server_is_not_asked_of_one():
    def merge(strategy, v, g):
        v.assign_add(g)
        return g * 2, jnp.ones(3), jnp.sum(v.value)

    pushed, answered, (doubled, ones, total) = push_bytes(merge, jnp.ones(8))
    assert (pushed, answered) == (32, 3 * 4 + 4)
    np.testing.assert_array_equal(doubled, 2 * np.ones(8))
    assert ones.shape == (3,) and float(total) == 8.0


def test_what_is_assigned_is_not_the_workers_array():
    strategy = make()
    with strategy.scope():
        v, w = dj.Variable(jnp.zeros(8), name="v"), dj.Variable(jnp.zeros(8), name="w")

    def step(x):
        v.assign(x)
        w.assign(x)
        return v.value

    plan, _ = strategy.cut_step(step, (jnp.ones(8),))
    (push,) = plan.stages[0].pushes
    outs = push.program.fn.jaxpr.outvars
    assert len(set(outs)) == len(outs) and not set(outs) & set(push.program.fn.jaxpr.invars)


# -- the law --------------------------------------------------------------------


def cost_of(update, early, num_servers):
    """Returns the bytes that travel where the worker runs the equations `early`."""
    code = update.code
    eqns, num_variables = code.jaxpr.eqns, len(update.parts)
    at_worker = set(code.inputs[num_variables:])
    at_worker.update(v for i in early for v in eqns[i].outvars)
    sent = 0
    for numbers in results_by_server(update, num_servers).values():
        part = code.cut_to(numbers).jaxpr
        late = [e for e in part.eqns if not at_worker.intersection(e.outvars)]
        written = part.outvars[: sum(n < len(update.written) for n in numbers)]
        read = {v for e in late for v in e.invars if not isinstance(v, Literal)} | set(written)
        sent += sum(v.aval.size * v.aval.dtype.itemsize for v in read & at_worker)
    return sent


def all_splits(update):
    """Yields every set of equations that a worker could run."""
    eqns = update.code.jaxpr.eqns
    current = set(update.code.inputs[: len(update.parts)])
    maker = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    needs = [{maker.get(v) for v in e.invars if not isinstance(v, Literal)} for e in eqns]
    free = [i for i, e in enumerate(eqns) if not current.intersection(_variables(e))]
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            if all(needs[i] - {None} <= set(chosen) for i in chosen):
                yield set(chosen)


def _variables(eqn):
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def shaped(x):
    return jnp.broadcast_to(x, (4, 3)).astype(jnp.float32)


OPERATIONS = {
    "sum": lambda a, b: jnp.sum(shaped(a), axis=0),
    "half": lambda a, b: a.astype(jnp.bfloat16),
    "square": lambda a, b: a * a,
    "both": lambda a, b: shaped(a) + shaped(b),
    "wide": lambda a, b: shaped(a) * 2,
    "late": lambda a, b: a,
}


DRAWN = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9))


@settings(max_examples=25, deadline=None)
@given(st.lists(DRAWN, min_size=1, max_size=6))
def test_no_other_split_sends_fewer_bytes(steps):
    strategy = make(2)
    with strategy.scope():
        variables = [dj.Variable(jnp.ones((4, 3)), name=name) for name in "vw"]

    def merge(strategy, x, y):
        values = [x, y]
        for name, i in steps:
            values.append(OPERATIONS[name](values[i % len(values)], values[-1]))
        for i, v in enumerate(variables):
            v.assign_add(shaped(values[-1 - i]) * (v.value if i else 1.0))

    seen, cut = [], plans.move_to_worker
    step = lambda *args: dj.get_replica_context().merge_call(merge, args=args)
    with pytest.MonkeyPatch.context() as patch:
        watched = lambda update, n: seen.append(update) or cut(update, n)
        patch.setattr(plans, "move_to_worker", watched)
        strategy.cut_step(step, (jnp.ones((4, 3)), jnp.ones(3)))
    (update,) = seen
    chosen = cost_of(update, equations_at_worker(update, 2), 2)
    assert chosen == min(cost_of(update, split, 2) for split in all_splits(update))
