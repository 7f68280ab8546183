"""Variables that come to be while a function is traced (decision 17)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from distjax.errors import ContextError, TraceLeakError
from tests.replicas import ids, local, per_replica

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def first_line(caught):
    return str(caught.value).splitlines()[0]


class Layer:
    """A module that makes its variable at its first call."""

    def __init__(self, initial=lambda: jnp.ones(2), **options):
        self.v, self.initial, self.options, self.calls = None, initial, options, 0

    def __call__(self, x):
        self.calls += 1
        if self.v is None:
            self.v = dj.Variable(self.initial(), name="v", **self.options)
        return self.v.value * x


# -- guarded ------------------------------------------------------------------


def test_guarded_creation_traces_once_more(pair):
    layer = Layer()
    for _ in range(3):
        pair.run(layer, args=(jnp.float32(3),))
    assert layer.calls == 2


def test_the_call_that_creates_can_write(pair, how):
    layer = Layer(initial=lambda: jnp.zeros(()), aggregation=AGG.SUM)

    def fn(x):
        layer(x)
        return layer.v.assign_add(x)

    step = how(lambda x: pair.run(fn, args=(x,)))
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    assert local(pair, step(x)) == [3, 3]
    assert local(pair, step(x)) == [6, 6]
    assert float(layer.v.value) == 6


@pytest.mark.pairwise
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_replica_0_has_the_initial_value(pair, how, sync):
    """init 1 + id gives [1, 1]: later replicas' expressions are ignored."""
    number = lambda: jnp.float32(1 + dj.get_replica_context().replica_id_in_sync_group)
    layer = Layer(initial=number, synchronization=sync, aggregation=AGG.SUM)
    step = how(lambda: pair.run(layer, args=(1.0,)))
    with dj.expect("which replica's value counts is what is tested"):
        assert local(pair, step()) == [1, 1]
    assert [float(c) for c in layer.v.local_results()] == [1, 1]


def test_initial_values_of_arguments_and_other_variables(pair, how):
    with pair.scope():
        w = dj.Variable(2.0)
    layer = Layer(initial=lambda: w.value * 10)
    step = how(lambda x: pair.run(lambda x: layer(x), args=(x,)))
    assert local(pair, step(per_replica(pair, [np.float32(1), np.float32(2)]))) == [20, 40]
    second = []

    def fn(x):
        if not second:
            second.append(dj.Variable(x + layer.v.value, dtype=jnp.float16))
        return second[0].value

    with dj.expect("which replica's value counts is what is tested"):
        assert local(pair, pair.run(fn, args=(ids(pair),))) == [20, 20]
    assert second[0].dtype == jnp.float16


def test_creation_in_cross_replica_context_of_jit(pair):
    made = []

    @dj.jit
    def step(x):
        with pair.scope():
            if not made:
                made.append(dj.Variable(x, name="a", aggregation=AGG.SUM))
                made.append(dj.Variable(x, synchronization=SYNC.ON_READ, aggregation=AGG.MEAN))
        pair.run(lambda: (made[0].assign_add(x), made[1].assign_add(x)))
        return made[0].value, made[1].value

    assert [float(y) for y in step(jnp.float32(1))] == [3, 2]
    assert [float(y) for y in step(jnp.float32(1))] == [5, 3]
    assert made[0].strategy is pair and len(made) == 2


def test_creation_with_no_strategy_in_jit():
    made = []

    @dj.jit
    def step(x):
        if not made:
            made.append(dj.Variable(x))
        return made[0].assign_add(1.0)

    assert float(step(jnp.float32(1))) == 2 and float(step(jnp.float32(1))) == 3
    assert made[0].strategy is dj.get_strategy()


def test_a_second_branch_creates_more(pair):
    """A static argument that leads to new variables."""
    made = {}

    def fn(x, name):
        if name not in made:
            made[name] = dj.Variable(x, name=name, aggregation=AGG.MEAN)
        made[name].assign_add(x)
        return made[name].value

    for _ in range(2):
        pair.run(fn, args=(jnp.float32(1), "a"))
        pair.run(fn, args=(jnp.float32(10), "b"))
    assert {k: float(v.value) for k, v in made.items()} == {"a": 3, "b": 30}


def test_two_replica_functions_create_in_one_step(pair):
    first, second = Layer(), Layer(initial=lambda: jnp.zeros(()))

    @dj.jit
    def step(x):
        a = pair.run(first, args=(x,))
        b = pair.run(second, args=(x,))
        return a, b

    for _ in range(2):
        a, b = step(jnp.float32(2))
        assert local(pair, a) == [[2, 2]] * 2 and local(pair, b) == [0, 0]
    assert first.v is not second.v


# -- merge functions ----------------------------------------------------------

CONCRETE = {
    "number": lambda: 2.0,
    "numpy": lambda: np.float32(2),
    "list": lambda: [2.0][0],
    "function": lambda: lambda: jnp.zeros(()) + 2,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", list(CONCRETE))
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_creation_in_a_merge_function(pair, how, kind, sync):
    made = []

    def merge(strategy, x):
        if not made:
            made.append(
                dj.Variable(CONCRETE[kind](), name="m", synchronization=sync, aggregation=AGG.MEAN)
            )
        made[0].assign_add(x)
        return made[0].value

    fn = lambda x: dj.get_replica_context().merge_call(merge, args=(x,))
    step = how(lambda x: pair.run(fn, args=(x,)))
    assert local(pair, step(jnp.float32(1))) == [3, 3]
    assert local(pair, step(jnp.float32(1))) == [4, 4]
    assert len(made) == 1 and made[0].strategy is pair


@pytest.mark.parametrize("kind", ["value", "in a list", "variable"])
def test_creation_from_a_traced_value_in_a_merge_function(pair, kind):
    with pair.scope():
        other = dj.Variable(1.0)
    initial = {"value": lambda x: x, "in a list": lambda x: [x, 1.0], "variable": lambda x: other}
    fn = lambda x: dj.get_replica_context().merge_call(
        lambda strategy, x: dj.Variable(initial[kind](x), name="m").value, args=(x,)
    )
    with pytest.raises(TraceLeakError) as caught:
        pair.run(fn, args=(jnp.float32(1),))
    assert first_line(caught) == "variable 'm' needs to be created outside of inner traces."


# -- unguarded ----------------------------------------------------------------


def test_unguarded_creation_runs_once(pair, how):
    step = how(lambda x: pair.run(lambda x: dj.Variable(x, name="u").value + 1, args=(x,)))
    step = step if how is dj.jit else (lambda x, fn=_unguarded: pair.run(fn, args=(x,)))
    assert local(pair, step(jnp.float32(1))) == [2, 2]
    for x in (jnp.float32(1), jnp.ones(3)):  # a new shape does not make it legal
        with pytest.raises(ContextError) as caught:
            step(x)
        assert first_line(caught).endswith("needs to create its variables once.")
        assert "an unguarded constructor of 'u'." in str(caught.value)
        assert "if self.v is None" in str(caught.value)


def _unguarded(x):
    return dj.Variable(x, name="u").value + 1


def test_unguarded_creation_names_the_function(pair):
    def forgets_its_guard():
        return dj.Variable(1.0).value

    pair.run(forgets_its_guard)
    with pytest.raises(ContextError, match="forgets_its_guard needs to create its variables once"):
        pair.run(forgets_its_guard)


def test_unguarded_constructors_get_the_variables_of_their_places(pair):
    seen = []

    def fn():
        a = dj.Variable(1.0, name="a")
        b = dj.Variable(np.ones(2), name="b", synchronization=SYNC.ON_READ)
        seen.append((a, b))
        return a, b

    a, b = pair.run(fn)
    assert seen[0][0] is not seen[0][1] and seen[1] == (a, b) == seen[0]
    assert float(a.value) == 1 and [c.tolist() for c in b.local_results()] == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dict(name="a"), dict(name="b")),
        (dict(name="a"), dict(name="a", dtype=jnp.float16)),
        (dict(name="a", initial_value=1.0), dict(name="a", initial_value=np.ones(2))),
    ],
    ids=["name", "dtype", "shape"],
)
def test_another_variable_at_the_same_place(pair, first, second):
    options = iter([first, second])

    def fn():
        chosen = {"initial_value": 1.0, **next(options)}
        return dj.Variable(chosen.pop("initial_value"), **chosen).value

    with pytest.raises(ContextError) as caught:
        pair.run(fn)
    name = second["name"]
    assert first_line(caught) == (
        f"variable {name!r} needs to be created in the same order each time."
    )


def test_one_variable_more_in_the_second_trace(pair):
    traces = []

    def fn():
        traces.append(1)
        for _ in traces:
            dj.Variable(1.0, name="a")

    with pytest.raises(ContextError) as caught:
        pair.run(fn)
    assert first_line(caught) == "variable 'a' needs to be created in the same order each time."
    assert "one variable more than in the trace before" in str(caught.value)


# -- where creation is an error -----------------------------------------------

INNER = {
    "jit": lambda fn: jax.jit(fn)(1.0),
    "grad": lambda fn: jax.grad(fn)(1.0),
    "vmap": lambda fn: jax.vmap(fn)(jnp.ones(2)),
    "checkpoint": lambda fn: jax.checkpoint(fn)(1.0),
    "scan": lambda fn: lax.scan(lambda c, x: (fn(c), x), 1.0, jnp.ones(2)),
    "fori_loop": lambda fn: lax.fori_loop(0, 2, lambda i, c: fn(c), 1.0),
    "while_loop": lambda fn: lax.while_loop(lambda c: c < 0, fn, 1.0),
    "cond": lambda fn: lax.cond(True, fn, lambda x: x, 1.0),
    "dj.lax.scan": lambda fn: dj.lax.scan(lambda c, x: (fn(c), x), 1.0, jnp.ones(2)),
    "dj.lax.fori_loop": lambda fn: dj.lax.fori_loop(0, 2, lambda i, c: fn(c), 1.0),
    "dj.lax.while_loop": lambda fn: dj.lax.while_loop(lambda c: c < 0, fn, 1.0),
    "dj.lax.cond": lambda fn: dj.lax.cond(True, fn, lambda x: x, 1.0),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("inner", list(INNER))
def test_creation_in_an_inner_trace(pair, how, inner):
    made = []

    def create(x):
        made.append(dj.Variable(1.0, name="v"))
        return made[-1].value * x

    with pytest.raises(TraceLeakError) as caught:
        how(lambda: pair.run(lambda: INNER[inner](create)))()
    assert first_line(caught) == "variable 'v' needs to be created outside of inner traces."
    assert made == []


@pytest.mark.parametrize("transform", ["jit", "grad"])
def test_creation_by_run_in_a_trace_of_the_users(pair, transform):
    """The initial value would be a tracer of the user's trace."""
    layer = Layer(initial=lambda: jnp.ones(()))
    call = lambda x: pair.reduce("mean", pair.run(layer, args=(x,)))
    with pytest.raises(TraceLeakError) as caught:
        getattr(jax, transform)(call)(1.0)
    assert first_line(caught) == "variable 'v' needs to be created outside of inner traces."
    with pytest.raises(ContextError, match="variable 'v' needs an initial value"):
        layer.v.value  # noqa: B018


def test_r171_creation_on_some_replicas(pair):
    """Under one trace a branch on the replica's number is a `cond`, and holds no creation."""

    def fn():
        number = dj.get_replica_context().replica_id_in_sync_group
        create = lambda: dj.Variable(1.0, name="v").value
        return dj.lax.cond(number == 0, create, lambda: jnp.float32(0))

    with pytest.raises(TraceLeakError, match="variable 'v' needs to be created outside"):
        pair.run(fn)

    def by_python():
        if dj.get_replica_context().replica_id_in_sync_group == 0:
            dj.Variable(1.0)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        pair.run(by_python)


def test_creation_in_a_run_inside_a_merge_function(pair):
    layer = Layer(initial=lambda: 1.0)
    merge = lambda strategy: strategy.run(layer, args=(1.0,))
    with pytest.raises(TraceLeakError, match="needs to be created outside of inner traces"):
        pair.run(lambda: dj.get_replica_context().merge_call(merge))


def test_a_read_that_jax_evaluates_at_once(pair):
    """As after an interrupt that leaves JAX's state behind: the trace is not the current one."""
    with pair.scope():
        v = dj.Variable(1.0, name="w")
    with pytest.raises(dj.errors.TraceLeakError) as caught:
        with jax.ensure_compile_time_eval():
            pair.run(lambda: v.value + 1)
    assert first_line(caught) == "a read of variable 'w' needs to be traced with its step."
    assert "go on in a new thread, or restart the process" in str(caught.value)
    assert local(pair, pair.run(lambda: v.value + 1)) == [2, 2]


@pytest.mark.parametrize("make", ["replica", "jit", "optimizer"])
@pytest.mark.usefixtures("collect_garbage")
def test_no_tracer_outlives_the_trace_that_creates_variables(pair, make):
    """`jax.checking_leaks` looks for them when a trace ends."""
    made = []

    def create():
        if not made:
            made.append(dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.MEAN))
        return made[0]

    with jax.checking_leaks(), pair.scope():
        if make == "replica":
            pair.run(lambda: create().assign_add(jnp.ones(3)))
        elif make == "jit":
            dj.jit(lambda: create().assign_add(jnp.ones(3)))()
        else:
            optimizer = dj.optim.Optimizer(optax.sgd(-0.5, momentum=0.9))
            optimizer.init([create()])
            pair.run(lambda: optimizer.apply_gradients([(jnp.ones(3), made[0])]))
    assert made[0].value.tolist() == [1.0, 1.0, 1.0]
