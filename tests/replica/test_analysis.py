"""What the locality analysis proves, and what it must not."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import distjax as dj
from distjax._src.replica import analysis
from distjax.errors import DivergenceError
from tests.replica.blindness import blind

AXIS = "replica"


@pytest.fixture
def x(pair):
    return pair.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )


def is_equal(strategy, fn, *args):
    """Returns whether the result of ``fn`` comes back proved equal."""
    out = strategy.run(fn, args=args)
    assert isinstance(out, (jax.Array, dj.PerReplica))
    return isinstance(out, jax.Array)


W = np.float32(3)


def exchanged(y):
    return lax.ppermute(y, AXIS, [(0, 1), (1, 0)])


def called_back(y):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(lambda y: y, shape, y, vmap_method="sequential")


def declared(call, differs=()):
    """Returns what ``call()`` does in a block in which nothing differs."""
    with dj.expect("a table that every process has", differs=differs):
        return call()


def shared_with_a_block(w, in_block):
    """Returns what one jitted function returns in a declared block, or outside of it."""
    call = jax.jit(called_back)
    inside, outside = declared(lambda: call(w)), call(w)
    return inside if in_block else outside


def looked_up(y):
    """As `called_back`, by a function that keeps Python state."""
    shape = jax.ShapeDtypeStruct((), np.float32)
    return io_callback(lambda y: y, shape, y)


def root(w, last):
    """Returns ``last(w)``, as the root of ``v - w``."""
    return lax.custom_root(lambda v: v - w, w, lambda f, guess: last(guess), lambda g, y: y)


def solution(w, last):
    """Returns ``last(w)``, as the solution of ``v = w``."""
    return lax.custom_linear_solve(lambda v: v, w, lambda matvec, b: last(b))


def iterated(matvec, b):
    """Returns the solution of ``matvec(v) = b``, by a loop that ends when it is near."""
    return jax.scipy.sparse.linalg.cg(matvec, b[None], maxiter=3)[0][0]


PROVED = {
    "argument": lambda w, x: w,
    "arithmetic": lambda w, x: w * 2 + 1,
    "psum": lambda w, x: lax.psum(x, AXIS),
    "pmean": lambda w, x: lax.pmean(x, AXIS),
    "pmax": lambda w, x: lax.pmax(x, AXIS),
    "pmin": lambda w, x: lax.pmin(x, AXIS),
    "all_gather": lambda w, x: lax.all_gather(x, AXIS),
    "constant": lambda w, x: jnp.ones(3),
    "random bits of an equal key": lambda w, x: jax.random.normal(jax.random.key(0)),
    "jit": lambda w, x: jax.jit(lambda w, x: w + lax.psum(x, AXIS))(w, x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w: jnp.sin(w))(w),
    "scan whose carry stays equal": lambda w, x: lax.scan(
        lambda c, _: (c + lax.psum(x, AXIS), None), w, None, length=3
    )[0],
    "scan that writes nothing of x into one carry": lambda w, x: lax.scan(
        lambda c, _: ((c[0] * 2, c[1] + x), None), (w, w), None, length=3
    )[0][0],
    "while of an equal predicate": lambda w, x: lax.while_loop(
        lambda c: c < 50, lambda c: c * 2, w
    ),
    "cond of an equal predicate": lambda w, x: lax.cond(w > 0, lambda: w, lambda: w + 1),
    "custom_jvp": lambda w, x: jax.nn.relu(w),
    "custom_root": lambda w, x: root(w, lambda y: y),
    "custom_linear_solve": lambda w, x: solution(w, lambda y: y),
    "custom_root of a reduced equation": lambda w, x: root(lax.psum(x, AXIS), lambda y: y + w),
    "custom_linear_solve that reduces": lambda w, x: lax.custom_linear_solve(
        lambda v: v * x, w, lambda matvec, b: lax.pmean(matvec(b), AXIS), symmetric=True
    ),
    "cg on a reduced product": lambda w, x: iterated(lambda v: lax.pmean(x * v, AXIS), w),
    "gradient of cg on a reduced product": lambda w, x: jax.grad(
        lambda w: iterated(lambda v: lax.pmean(x * v, AXIS), w)
    )(w),
    "callback declared equal": lambda w, x: declared(lambda: called_back(w)),
    "callback declared equal in a loop": lambda w, x: lax.scan(
        lambda c, _: (declared(lambda: called_back(c)), None), w, length=2
    )[0],
    "scan of a callback in a declared block": lambda w, x: declared(
        lambda: lax.scan(lambda c, _: (called_back(c), None), w, length=2)[0]
    ),
    "while of a callback in a declared block": lambda w, x: declared(
        lambda: lax.while_loop(lambda c: c[1] < 2, lambda c: (called_back(c[0]), c[1] + 1), (w, 0))
    )[0],
    "cond of a callback in a declared block": lambda w, x: declared(
        lambda: lax.cond(w > 0, called_back, lambda w: w, w)
    ),
    "jit of a callback in a declared block": lambda w, x: shared_with_a_block(w, in_block=True),
    "callback declared equal in custom_root": lambda w, x: root(
        w, lambda y: declared(lambda: called_back(y))
    ),
    "optimization_barrier beside x": lambda w, x: lax.optimization_barrier((x, w))[1],
    "device_put beside x": lambda w, x: jax.device_put((x, w))[1],
    "checkpoint_name": lambda w, x: checkpoint_name(w, "w"),
    "gradient of an equal function": lambda w, x: jax.grad(jnp.sin)(w),
}

DIFFERENT = {
    "argument": lambda w, x: x,
    "axis_index": lambda w, x: lax.axis_index(AXIS),
    "mixed": lambda w, x: w + x,
    "ppermute": lambda w, x: lax.ppermute(w, AXIS, [(0, 1), (1, 0)]),
    "psum_scatter": lambda w, x: lax.psum_scatter(jnp.ones(2) * w, AXIS, scatter_dimension=0),
    "all_to_all": lambda w, x: lax.all_to_all(jnp.ones((2, 2)) * w, AXIS, 0, 0),
    "callback": lambda w, x: jax.pure_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32), vmap_method="sequential"
    ),
    "jit of a callback outside of a declared block": lambda w, x: shared_with_a_block(
        w, in_block=False
    ),
    "scan of a callback of x in a declared block": lambda w, x: declared(
        lambda: lax.scan(lambda c, _: (called_back(c + x), None), w, length=2)[0]
    ),
    "callback in custom_root": lambda w, x: root(w, called_back),
    "callback of x declared equal": lambda w, x: declared(lambda: called_back(x)),
    "callback meant, and not declared equal": lambda w, x: declared(
        lambda: called_back(w), differs=W
    ),
    "ordered callback in a declared block": lambda w, x: declared(lambda: looked_up(w)),
    "replica's number in a declared block": lambda w, x: declared(lambda: lax.axis_index(AXIS)),
    "ppermute in custom_root": lambda w, x: root(w, exchanged),
    "ppermute in custom_linear_solve": lambda w, x: solution(w, exchanged),
    "cg on a product that differs": lambda w, x: iterated(lambda v: x * v, w),
    "optimization_barrier of x": lambda w, x: lax.optimization_barrier((x, w))[0],
    "memory that nobody wrote": lambda w, x: lax.empty((2,), jnp.float32),
    "exported program": lambda w, x: jax.export.export(jax.jit(jnp.sin))(W).call(w),
    "scan whose carry takes x": lambda w, x: lax.scan(
        lambda c, _: (c + x, None), w, None, length=3
    )[0],
    "scan in two rounds of the fixpoint": lambda w, x: lax.scan(
        lambda c, _: ((c[1], c[2], x), None), (w, w, w), None, length=3
    )[0][0],
    "while of a predicate that differs": lambda w, x: lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (x, w)
    )[1],
    "cond of a predicate that differs": lambda w, x: lax.cond(x > 1, lambda: w + 1, lambda: w + 2),
    "switch of an index that differs": lambda w, x: lax.switch(
        x.astype(int), [lambda: w, lambda: w + 1, lambda: w]
    ),
    "select by x": lambda w, x: jnp.where(x > 1, w, w + 1),
    "random bits of a key that differs": lambda w, x: jax.random.normal(
        dj.get_replica_context().fold_in(jax.random.key(0))
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_proved_equal(pair, x, name):
    assert is_equal(pair, PROVED[name], W, x)


@pytest.mark.parametrize("name", DIFFERENT)
def test_may_differ(pair, x, name):
    assert not is_equal(pair, DIFFERENT[name], W, x)


def _ref_program(write_x):
    def fn(w, x):
        ref = jax.new_ref(w)
        ref[...] = x if write_x else w + 1
        return ref[...]

    return fn


@pytest.mark.parametrize("write_x", [True, False])
def test_what_comes_out_of_a_ref_is_never_proved(write_x):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    x = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    out = strategy.run(_ref_program(write_x), args=(W, x))
    expected = [0.0, 1.0] if write_x else [4.0, 4.0]
    assert [float(v) for v in strategy.local_results(out)] == expected
    assert isinstance(out, dj.PerReplica)


def collective_under(construct, collective):
    def cond(w, x):
        return lax.cond(x > 1, lambda: collective(w), lambda: w)

    def switch(w, x):
        branches = [lambda: w, lambda: collective(w), lambda: w]
        return lax.switch(x.astype(int), branches)

    def while_loop(w, x):
        return lax.while_loop(lambda c: c < x, lambda c: collective(c) + 1, w)

    return {"cond": cond, "switch": switch, "while_loop": while_loop}[construct]


COLLECTIVES = {
    "merge_call": lambda w: dj.get_replica_context().merge_call(lambda s, v: v, args=(w,)),
    "psum": lambda w: lax.psum(w, AXIS),
    "all_gather": lambda w: lax.all_gather(w, AXIS)[0],
    "psum in scan": lambda w: lax.scan(lambda c, _: (lax.psum(c, AXIS), None), w, None, length=2)[
        0
    ],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["mirrored", "virtual", "one_device"])
@pytest.mark.parametrize("construct", ["cond", "switch", "while_loop"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_under_a_predicate_that_differs(kind, count, construct, collective):
    if kind == "one_device":
        strategy = dj.OneDeviceStrategy()
    elif kind == "mirrored":
        strategy = dj.MirroredStrategy(jax.devices()[:count])
    else:
        strategy = dj.VirtualStrategy(count)
    program = collective_under(construct, COLLECTIVES[collective])

    def fn(w):
        return program(w, dj.get_replica_context().replica_id_in_sync_group.astype(float))

    needle = rf"a lax.{construct} that holds .* needs a predicate that is equal on every replica"
    with pytest.raises(DivergenceError, match=needle) as caught:
        strategy.run(fn, args=(W,))
    assert "test_analysis.py" in str(caught.value)  # names the user's lines
    assert "all_reduce" in str(caught.value)  # and the way out


def test_a_collective_in_a_function_that_jax_keeps_to_itself(pair, x):
    def fn(w, x):
        return lax.cond(x > 1, lambda: root(w, lambda y: lax.psum(y, AXIS)), lambda: w)

    with pytest.raises(DivergenceError, match="a lax.cond that holds psum needs a predicate"):
        pair.run(fn, args=(W, x))


def test_blind_analysis_proves_nothing(pair, x):
    with blind():
        assert not is_equal(pair, lambda w, x: lax.psum(x, AXIS), W, x)
    assert is_equal(pair, lambda w, x: lax.psum(x, AXIS), W, x)


@pytest.mark.parametrize("depth", [2, 6])
def test_rounds_of_nested_loops_do_not_multiply(monkeypatch, depth):
    walked, outputs = [], analysis.Analysis.outputs_of
    monkeypatch.setattr(
        analysis.Analysis, "outputs_of", lambda *args: walked.append(args) or outputs(*args)
    )

    def nest(carry, x, depth):
        if depth:
            step = lambda carry, _: (nest(carry, x, depth - 1), None)
            carry = lax.scan(step, carry, length=2)[0]
        return carry[1], carry[2], carry[2] + x  # what differs goes from carry to carry

    jaxpr = jax.make_jaxpr(lambda w, x: nest((w, w, w), x, depth)[0])(W, W).jaxpr
    assert analysis.Analysis(AXIS).outputs(jaxpr, [False, True]) == [True]
    assert len(walked) <= 2 + 4 * depth


def test_groups_of_replicas_are_not_the_whole_axis():
    strategy = dj.MirroredStrategy(jax.devices()[:4])
    x = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    out = strategy.run(lambda x: lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]), args=(x,))
    assert [float(v) for v in strategy.local_results(out)] == [1.0, 1.0, 5.0, 5.0]


def average_with_others(v):
    return 2 * v + 0.1 * dj.get_replica_context().all_reduce("mean", v)


def iterated_root(b):
    """The root of ``average_with_others(v) - b``, by a loop that ends when its replica is near."""

    def solve(f, guess):
        return lax.while_loop(lambda v: jnp.abs(f(v)) > 1e-4, lambda v: v - 0.3 * f(v), guess)

    equation = lambda v: average_with_others(v) - b
    return lax.custom_root(equation, jnp.zeros_like(b), solve, lambda g, y: y / g(jnp.ones_like(y)))


def iterated_solution(b):
    def solve(matvec, b):
        far = lambda v: jnp.abs(matvec(v) - b) > 1e-4
        return lax.while_loop(far, lambda v: v + 0.3 * (b - matvec(v)), jnp.zeros_like(b))

    return lax.custom_linear_solve(average_with_others, b, solve, symmetric=True)


def solved_by(solver):
    return lambda b: solver(average_with_others, b[None], maxiter=3)[0][0]


SOLVERS = {
    "custom_root": iterated_root,
    "custom_linear_solve": iterated_solution,
    "cg": solved_by(jax.scipy.sparse.linalg.cg),
    "bicgstab": solved_by(jax.scipy.sparse.linalg.bicgstab),
    "gmres": solved_by(jax.scipy.sparse.linalg.gmres),
}


@pytest.mark.parametrize("place", ["plain", "in jit", "derivative"])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_that_ends_when_its_replica_is_near_holds_no_collective(x, pair, name, place):
    """Before anything is launched: on devices the others would wait for ever."""
    fn = SOLVERS[name]
    if place == "in jit":
        fn = jax.jit(fn)
    elif place == "derivative":
        fn = jax.grad(fn)
    with pytest.raises(DivergenceError, match=r"a lax\.\w+ that holds psum needs a predicate"):
        dj.jit(lambda x: pair.run(fn, args=(x,))).lower(x)


def test_a_solver_without_collectives_may_end_when_its_replica_is_near(pair, x):
    solve = lambda b: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, b[None], maxiter=5)[0][0]
    values, solved = (pair.local_results(y) for y in (x, pair.run(solve, args=(x,))))
    assert [float(y) for y in solved] == pytest.approx([float(v) / 2 for v in values])


@pytest.mark.parametrize("name", ["custom_root", "custom_linear_solve", "cg"])
def test_a_solver_whose_loop_ends_everywhere_at_once_may_hold_one(pair, name):
    out = pair.run(SOLVERS[name], args=(W,))
    assert isinstance(out, jax.Array)  # and its result is proved equal
    assert float(out) == pytest.approx(W / 2.1, rel=1e-3)


def test_a_direct_solve_may_hold_a_collective(pair, x):
    """It waits for the others once on every replica."""
    matvec = lambda v: 2 * v + lax.pmean(v, AXIS)
    solve = lambda _, b: b / 2 - lax.pmean(b, AXIS) / 6
    out = pair.run(lambda x: lax.custom_linear_solve(matvec, x, solve), args=(x,))
    assert [float(v) for v in pair.local_results(out)] == [0.25, 0.75]


def test_a_loop_with_a_collective_in_a_construct_of_rules_of_its_own(pair, x):
    """What its predicate depends on is not known."""

    @jax.custom_batching.custom_vmap
    def own(w):
        return lax.while_loop(lambda c: c < 3, lambda c: lax.psum(c, AXIS), w)

    own.def_vmap(lambda size, batched, w: (w, batched[0]))
    with pytest.raises(DivergenceError, match="a lax.while_loop that holds psum needs"):
        pair.run(own, args=(x,))
