"""A merge function is traced for its shapes, and then with the arguments that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import MergeError
from tests.replica.merging import context, merge, sum_of
from tests.replicas import ids, local


@pytest.fixture
def seen():
    """The kinds of argument that a merge function got, a list per trace."""
    return []


def noted(seen, fn):
    """Returns ``fn`` noting the kinds of its arguments."""

    def call(strategy, *args):
        seen.append([type(a) is dj.PerReplica for a in args])
        return fn(strategy, *args)

    return call


def test_a_trace_for_shapes_and_one_for_the_values(pair, how, seen):
    """Of arguments that differ and that do not, of variables, and of another merge's results."""
    with pair.scope():
        v, count = dj.Variable(1.0), dj.Variable(0)

    def apply(strategy, gradient, rate):
        v.assign_sub(rate * strategy.reduce("mean", gradient))
        count.assign_add(1)
        return strategy.reduce("sum", gradient), gradient

    def step(x):
        total, again = merge(noted(seen, apply), x, jnp.float32(0.5))
        return merge(noted(seen, lambda s, x, y, z: s.reduce("sum", x) + y), again, total, v.value)

    assert float(how(lambda x: pair.run(step, args=(x,)))(ids(pair))) == 2.0
    assert (float(v.value), int(count.value)) == (0.75, 1)
    for_shapes, for_values = seen[:2], seen[2:]
    assert for_shapes == [[False, False], [False, False, False]]
    assert for_values == [[True, False], [True, False, False]]


def test_no_more_than_three_traces_in_a_derivative(pair, seen):
    """One for the shapes, one for the value and one for the derivative."""

    def step(x):
        squared = lambda x: merge(noted(seen, sum_of), x) ** 2
        return jax.grad(squared)(x + 1)

    assert local(pair, pair.run(step, args=(ids(pair),))) == [12.0, 12.0]
    assert seen[0] == [False] and 2 <= len(seen) <= 3
    assert all(kinds == [True] for kinds in seen[1:])


def by_kind(strategy, x):
    """A function that does another thing with a value that is equal on all replicas."""
    return strategy.reduce("mean" if isinstance(x, dj.PerReplica) else "sum", x)


def test_a_function_that_asks_for_the_kind(pair, how):
    """Traced with the wrong kind, its value would be wrong."""

    def step(x):
        def body(carry, _):
            return merge(by_kind, carry) + 0 * x, merge(by_kind, carry - carry + 1)

        looped, each = jax.lax.scan(body, x, None, 2)
        return merge(by_kind, x), merge(by_kind, jnp.float32(3)), looped, each

    differing, equal, looped, each = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert (float(differing), float(equal)) == (0.5, 6.0)
    assert local(pair, looped) == [0.5, 0.5]
    np.testing.assert_array_equal(jax.tree.leaves(local(pair, each)), 1.0)


def test_a_kind_that_is_not_known_after_a_derivative(pair, how):
    """The merge under `grad` may return what differs or not, and the next one takes it."""

    def step(x):
        value, _ = jax.value_and_grad(lambda x: merge(lambda s, x: x, x))(x)
        return merge(by_kind, value), merge(by_kind, merge(sum_of, value))

    first, second = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert (float(first), float(second)) == (0.5, 2.0)


def summed(x):
    return merge(sum_of, x)


DERIVED = {
    "vmap": (lambda x: summed(jax.vmap(summed)(jnp.stack([x, x]))), [2.0, 2.0]),
    "grad": (lambda x: summed(jax.grad(lambda w: summed(w * x))(jnp.float32(3))), 2.0),
    "jvp": (lambda x: summed(jax.jvp(lambda w: summed(w * x), (x,), (x,))[1]), 2.0),
}


@pytest.mark.parametrize("form", DERIVED)
def test_a_merge_of_what_depends_on_a_derived_merge(pair, how, form):
    step, expected = DERIVED[form]
    total = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    np.testing.assert_allclose(total, expected)


def by_structure(strategy, x):
    """A function with another structure of results for a value that differs."""
    if not isinstance(x, dj.PerReplica):
        return {"total": x}
    return {"total": strategy.reduce("sum", x), "each": x}


INSIDE = {
    "jit": lambda x: jax.jit(summed)(x),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + summed(x), jnp.float32(0)),
}


@pytest.mark.parametrize("form", INSIDE)
def test_a_value_that_is_equal_through_a_merge_inside(pair, how, form):
    """What differs and what does not is not known of a call or a loop that holds a merge."""
    step = lambda x: merge(by_structure, INSIDE[form](x))
    found = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert {k: float(v) for k, v in found.items()} == {"total": {"jit": 1.0, "loop": 2.0}[form]}


def test_a_value_of_the_enclosing_program_is_equal(pair):
    """Though it is a component of a variable there."""
    with pair.scope():
        v = dj.Variable(
            1.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
            trainable=False,
        )

    @dj.jit
    def outer():
        total = v.value
        return pair.run(lambda: merge(by_structure, total))

    assert {k: float(x) for k, x in outer().items()} == {"total": 2.0}


def test_rules_for_derivatives_that_close_over_values(pair, how):
    """They are called after the merge function, whose values they use."""
    with pair.scope():
        v = dj.Variable(3.0)

    def fn(strategy, x):
        factor = v.value

        @jax.custom_vjp
        def doubled(z):
            return z * 2

        doubled.defvjp(lambda z: (z * 2, None), lambda _, cotangent: (cotangent * factor,))
        return doubled(strategy.reduce("sum", x))

    step = jax.grad(lambda x: merge(fn, x))
    slopes = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert local(pair, slopes) == [6.0, 6.0]


@pytest.mark.parametrize("read", [jax.lax.axis_size, lambda name: jax.lax.psum(1, name)])
def test_the_replica_axis_has_no_size_in_it(pair, how, read):
    step = lambda x: merge(lambda s, x: s.reduce("sum", x) * read("replica"), x)
    with pytest.raises(NameError, match="unbound axis name: replica"):
        how(lambda x: pair.run(step, args=(x,)))(ids(pair))


def test_other_uses_of_what_differs(pair, how):
    """Results passed on, components taken, and an argument that nothing uses."""

    def fn(strategy, x, y, unused):
        if not isinstance(x, dj.PerReplica):
            return x, y
        return x, strategy.local_results(x)[-1] + strategy.reduce("sum", y)

    def step(x):
        return merge(fn, x, x * 2, x)

    same, total = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert local(pair, same) == [0.0, 1.0] and float(total) == 3.0


def test_another_structure_for_a_value_that_differs(pair):
    """The first trace is with arrays, and tells the structure."""
    with pytest.raises(MergeError) as info:
        pair.run(lambda x: merge(by_structure, x), args=(ids(pair),))
    assert "by_structure needs to do the same on every call" in str(info.value)
    assert "first with arrays in place of values per replica" in str(info.value)


def test_values_of_an_enclosing_program(pair):
    """A merge function may close over the arguments of the step around the run."""

    @dj.jit
    def outer(x, y):
        add = lambda strategy, x: strategy.reduce("sum", x) + y
        return pair.run(lambda x: merge(add, x), args=(x,))

    assert float(outer(ids(pair), jnp.float32(10))) == 11.0


def test_state_of_an_object_that_it_closes_over(mirrored):
    """A value of the replica function while it is bound, and of the program when it is emitted."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(x):
        return merge(lambda strategy, y: strategy.reduce("sum", y) + model.bias[...], model(x))

    x = mirrored.distribute_values_from_function(lambda ctx: jnp.ones(2))
    out = dj.jit(lambda x: mirrored.run(step, args=(x,)))(x)
    np.testing.assert_allclose(out, 2 * model.kernel[...].sum(0), rtol=1e-6)


def test_settings_around_a_merge_hold_in_it(mirrored):
    """The function is traced where it is called, not where the program is put together."""

    def step(x):
        with jax.default_matmul_precision("highest"):
            return merge(lambda strategy, x: (m := strategy.reduce("mean", x)) @ m, x)

    x = mirrored.distribute_values_from_function(lambda ctx: jnp.ones((2, 2)))
    text = dj.jit(lambda x: mirrored.run(step, args=(x,))).lower(x).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text


def test_an_argument_in_host_memory(mirrored, seen):
    """Its type is not that of the trace, so the function is called again."""
    spec = jax.sharding.PartitionSpec()
    on_host = jax.sharding.NamedSharding(mirrored.mesh, spec, memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(4.0), on_host)
    out = mirrored.run(lambda x: merge(noted(seen, lambda strategy, x: x), x), args=(x,))
    assert out.sharding.memory_kind == "pinned_host" and seen == [[False]] * 2


def test_variables_that_it_makes(pair, how, seen):
    """Made once, though the function is traced twice."""
    made = []

    def fn(strategy, x):
        v = dj.Variable(1.0, name="made")
        made.append(v)
        components = strategy.local_results(x) if isinstance(x, dj.PerReplica) else [x]
        v.assign_add(components[-1])
        return v.value

    def step(x):
        return merge(noted(seen, fn), x)

    run = how(lambda x: pair.run(step, args=(x,)))
    assert float(run(ids(pair))) == 2.0
    assert len({id(v) for v in made}) == 1 and len(seen) == 2


def test_a_value_that_it_leaves_elsewhere(pair):
    """A step's output is not a variable; it is that of the trace that becomes the program."""

    def step(outputs, x):
        def fn(strategy, x):
            outputs.set_last_step_output("x", x, reduce_op="sum")

        pair.run(lambda x: merge(fn, x), args=(x,))

    batches = iter(pair.distribute_dataset([jnp.arange(2.0)] * 2))
    outputs = pair.extended.run_steps_on_iterator(step, batches, 2)
    np.testing.assert_array_equal(outputs.last_step_outputs["x"], 1.0)


def test_context_is_forgotten(pair, collect_garbage):
    """A context that outlives its trace holds nothing of it."""
    kept = []

    def step(x):
        kept.append(context())
        return merge(sum_of, x * 2)

    with jax.checking_leaks():
        assert float(pair.run(step, args=(ids(pair),))) == 2.0
