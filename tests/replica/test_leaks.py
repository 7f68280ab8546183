"""Writes and reads that would leak out of a trace: an error that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import TraceLeakError
from tests.replicas import ids

AGG = dj.VariableAggregation


def make(strategy, initial_value=0.0, **options):
    with strategy.scope():
        return dj.Variable(initial_value, name="v", aggregation=AGG.SUM, **options)


def lines(caught):
    return [line.strip() for line in str(caught.value).splitlines()]


FIRST = "a {} of variable 'v' needs to happen in the function that distjax traces."
RETURN = "Fix: return the new value from the inner function and assign it outside"
NO_JIT = (
    "Fix: distjax.jit in place of jax.jit, or leave jit out: run and distjax.jit compile what they "
    "call; or return the new value from the inner function and assign it outside"
)
DJ_JIT = "Fix: compile the step with distjax.jit (dj.jit) in place of jax.jit: it follows variables"

LOOPS = {
    "scan": lambda write: lax.scan(lambda c, x: (write(c), x), jnp.float32(1), jnp.ones(2)),
    "fori_loop": lambda write: lax.fori_loop(0, 2, lambda i, c: write(c), jnp.float32(1)),
    "while_loop": lambda write: lax.while_loop(lambda c: c < 3, write, jnp.float32(1)),
    "cond": lambda write: lax.cond(jnp.bool_(True), write, lambda x: x, jnp.float32(1)),
    "switch": lambda write: lax.switch(
        jnp.int32(1), [write, lambda x: x, lambda x: -x], jnp.float32(1)
    ),
}
TRANSFORMS = {
    "jit": ("jit", lambda write: jax.jit(write)(jnp.float32(1))),
    "grad": ("grad", lambda write: jax.grad(write)(jnp.float32(1))),
    "value_and_grad": ("grad", lambda write: jax.value_and_grad(write)(jnp.float32(1))),
    "vmap": ("vmap", lambda write: jax.vmap(write)(jnp.ones(2))),
    "jvp": ("jvp", lambda write: jax.jvp(write, (jnp.float32(1),), (jnp.float32(1),))),
    "vjp": ("vjp", lambda write: jax.vjp(write, jnp.float32(1))),
    "checkpoint": ("checkpoint", lambda write: jax.checkpoint(write)(jnp.float32(1))),
}


def check(call, write, inside, fix, v):
    with pytest.raises(TraceLeakError) as caught:
        call(write)
    text = lines(caught)
    assert text[0] == FIRST.format("write")
    assert text[1] == f"Got: a write inside {inside}."
    assert text[3] == fix
    assert float(v.value) == 0


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("context", ["replica", "cross", "merge", "outside"])
def test_write_in_a_bare_loop_or_branch(pair, loop, context):
    v = make(pair)
    write = lambda x: v.assign_add(jnp.float32(0) + x)
    call = _in_context(pair, context, LOOPS[loop])
    fix = f"Fix: use distjax.lax.{loop}, which carries the variables that its body writes"
    check(call, write, f"jax.lax.{loop}", fix, v)


def _in_context(strategy, context, run):
    if context == "replica":
        return lambda write: strategy.run(lambda: run(write))
    if context == "cross":
        return lambda write: dj.jit(lambda: run(write))()
    if context == "merge":
        ctx = dj.get_replica_context
        return lambda write: strategy.run(lambda: ctx().merge_call(lambda strategy: run(write)))
    return run


@pytest.mark.pairwise
@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("context", ["replica", "cross", "merge", "outside"])
def test_write_in_an_inner_transformation(pair, transform, context):
    v = make(pair)
    inside, run = TRANSFORMS[transform]
    call = _in_context(pair, context, run)
    fix = RETURN
    if transform == "jit":
        fix = DJ_JIT if context == "outside" else NO_JIT
    check(call, lambda x: v.assign_add(x), f"jax.{inside}", fix, v)


def test_write_of_a_merge_in_a_bare_loop(pair):
    v = make(pair)

    def body(c, x):
        dj.get_replica_context().merge_call(lambda strategy: v.assign_add(1.0))
        return c, x

    with pytest.raises(TraceLeakError) as caught:
        pair.run(lambda: lax.scan(body, 0.0, jnp.ones(2)))
    assert lines(caught)[1] == "Got: a write inside jax.lax.scan."


def test_the_innermost_construct_of_the_user_is_named(pair):
    v = make(pair)
    write = lambda x: v.assign_add(jnp.float32(1))
    jit_in_loop = lambda: dj.lax.fori_loop(0, 2, lambda i, c: jax.jit(write)(c), 0.0)
    check(lambda _: pair.run(jit_in_loop), write, "jax.jit", NO_JIT, v)
    inner = lambda x: dj.lax.fori_loop(0, 2, lambda i, c: write(c), x)
    scan_fix = "Fix: use distjax.lax.scan, which carries the variables that its body writes"
    loop_in_bare_loop = lambda: lax.scan(lambda c, x: (inner(c), x), 0.0, jnp.ones(2))
    check(lambda _: pair.run(loop_in_bare_loop), write, "jax.lax.scan", scan_fix, v)
    check(lambda _: jax.jit(inner)(0.0), write, "jax.jit", DJ_JIT, v)
    in_tree_map = lambda: jax.vmap(lambda x: jax.tree.map(write, [x]))(jnp.ones(2))
    check(lambda _: pair.run(in_tree_map), write, "jax.vmap", RETURN, v)


def test_a_name_of_the_users_own_is_no_construct(pair):
    v = make(pair)

    def scan(x):
        return v.assign_add(x)

    check(
        lambda write: pair.run(lambda: jax.jit(write)(jnp.float32(1))), scan, "jax.jit", NO_JIT, v
    )


# -- reads --------------------------------------------------------------------

READ_BEFORE = (
    "Fix: read it before: value = v.value; or compile the code around it with distjax.jit, which "
    "follows variables"
)


@pytest.mark.parametrize(
    ("inside", "call"),
    [
        ("jax.lax.map", lambda read: lax.map(lambda x: x + read(), jnp.arange(2))),
        ("jax.checkpoint", lambda read: jax.checkpoint(lambda x: x + read())(1.0)),
        ("jax.eval_shape", lambda read: jax.eval_shape(lambda x: x + read(), 1.0)),
    ],
)
def test_read_in_a_construct_outside_of_a_step(pair, inside, call):
    v = make(pair)
    with pytest.raises(TraceLeakError) as caught:
        call(lambda: v.value)
    text = lines(caught)
    assert text[0] == FIRST.format("read")
    assert text[1] == f"Got: a read inside {inside}."
    assert text[3] == READ_BEFORE
    value = v.value
    call(lambda: value)
    dj.jit(lambda: (call(lambda: v.value), None)[1])()


# -- run in a trace of the user's ---------------------------------------------


@pytest.mark.parametrize("kind", ["reads", "writes"])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_run_with_variables_in_the_users_own_jit(pair, kind, warm):
    v = make(pair, 1.0)

    def train_step(x):
        return v.value + x if kind == "reads" else v.assign_add(x)

    if warm:
        pair.run(train_step, args=(jnp.float32(0),))
    before = float(v.value)
    with pytest.raises(TraceLeakError) as caught:
        jax.jit(lambda x: pair.run(train_step, args=(x,)))(jnp.float32(1))
    text = lines(caught)
    assert "train_step reads or writes variable 'v' and needs to be called outside" in text[0]
    assert "distjax.jit" in text[3]
    assert float(v.value) == before
    pair.run(train_step, args=(jnp.float32(1),))  # nothing is left behind
    assert float(v.value) == before + (2 if kind == "writes" else 0)


def test_run_without_variables_in_the_users_own_jit(pair):
    fn = lambda x: dj.get_replica_context().all_reduce("sum", x)
    step = jax.jit(lambda x: pair.run(fn, args=(x,)))
    assert float(step(jnp.float32(3))) == 6 and float(step(jnp.float32(4))) == 8


def test_run_that_reads_in_an_eager_grad(pair):
    v = make(pair, 3.0)
    loss = lambda x: pair.reduce("mean", pair.run(lambda x: v.value * x * x, args=(x,)))
    assert float(jax.grad(loss)(jnp.float32(2))) == 12
    v.assign(1.0)
    assert float(jax.grad(loss)(jnp.float32(2))) == 4


def test_run_that_writes_in_an_eager_grad(pair):
    v = make(pair)
    loss = lambda x: pair.reduce("mean", pair.run(lambda x: v.assign_add(x), args=(x,)))
    with pytest.raises(TraceLeakError, match="reads or writes variable 'v'"):
        jax.grad(loss)(jnp.float32(2))
    assert float(v.value) == 0


def test_grad_in_jit_around_run_that_reads(pair):
    v = make(pair, 3.0)
    x = ids(pair)
    fn = lambda w, x: v.value * w * (x + 1)
    grad = dj.jit(
        lambda x: jax.grad(lambda w: pair.reduce("sum", pair.run(fn, args=(w, x))))(jnp.float32(1))
    )
    assert float(grad(x)) == 9


@pytest.mark.usefixtures("collect_garbage")
def test_no_tracer_is_left_in_a_variable(pair):
    v = make(pair)
    for call in LOOPS.values():
        with pytest.raises(TraceLeakError):
            pair.run(lambda call=call: call(lambda x: v.assign_add(x)))
    with jax.checking_leaks():
        pair.run(lambda: v.assign_add(jnp.float32(1)))
    np.testing.assert_array_equal(v.value, 2)


@pytest.mark.usefixtures("collect_garbage")
def test_nothing_of_a_trace_is_kept(pair):
    """`jax.checking_leaks`, which users debug with, finds nothing of ours."""
    v = make(pair)

    def fn(x):
        def merge(strategy, x):
            return strategy.reduce("sum", x)

        total = dj.get_replica_context().merge_call(merge, args=(x,))
        with dj.expect("each replica adds the total"):
            dj.lax.fori_loop(0, 2, lambda i, c: v.assign_add(total), jnp.float32(0))
        return x, total

    with jax.checking_leaks():
        pair.run(fn, args=(ids(pair),))
        dj.jit(lambda x: pair.run(fn, args=(x,)))(ids(pair))
    assert float(v.value) == 8
