"""Tree code on a PerReplica: what it makes is a value per replica, one value, or an error.

The law: whatever JAX's tree functions and transformations make of a PerReplica, a step gets on each
replica what the same code gives for that replica alone, or one value where the code combined or
picked replicas, or it is a LocalityError. It never gets all R values in place of one.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import local

VALUES = np.arange(48, dtype=np.float32)  # [R, K, ...] of all shapes below


def weigh(x):
    """Sums so that no two orders of the elements have the same sum."""
    return (x * (1 + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape)) ** 2).sum()


def step(x):
    return dj.get_replica_context().all_reduce("sum", weigh(x))


#: Code of one replica's part [1, ...] of the array, or of all of it, that keeps the replicas apart.
OF_EACH = {
    "new axis": lambda a: a[..., None],
    "column": lambda a: a[:, 1],
    "traced column": lambda a: a[:, jnp.int32(1)],
    "columns": lambda a: a[:, jnp.array([1, 0])],
    "reshape": lambda a: a.reshape(a.shape[0], -1),
    "mean": lambda a: a.mean(-1),
    "matmul": lambda a: a.reshape(a.shape[0], -1, 4) @ jnp.ones((4, 5)),
    "softmax": lambda a: jax.nn.softmax(a.reshape(a.shape[0], -1)),
    "pad": lambda a: jnp.pad(a, [(0, 0)] + [(1, 0)] * (a.ndim - 1)),
    "stack inside": lambda a: jnp.stack([a, 2 * a], 1),
    "where": lambda a: jnp.where(a[:, :1] > 3, a[:, :1], 0.0),
}
#: Code that makes one value of all.
OF_ALL = {
    "row": lambda a: a[0],
    "rows' mean": lambda a: a.mean(0),
    "mean of all": jnp.mean,
    "traced row": lambda a: a[jnp.int32(1)],
}
#: Code after which nothing is a row of a replica.
MIXING = {
    "moved": lambda a: jnp.moveaxis(a, 1, 0),
    "flat": lambda a: a.reshape(-1),
    "stack": lambda a: jnp.stack([a, a, a]),
    "tile": lambda a: jnp.concatenate([a, a]),
    "tile by XLA": lambda a: jnp.tile(a, (2,) + (1,) * (a.ndim - 1)),  # it gives all to all
    "batch": lambda a: a[None],
}
#: In place of `jax.tree.map`.
BARE = {
    "leaf": lambda b: jax.tree.leaves(b)[0],
    "stacked": lambda b: b.stacked,
    "doubled leaf": lambda b: 2 * jax.tree.leaves(b)[0],
    "reduced": lambda b: jax.tree.reduce(jnp.add, [b, b]),
    "raveled": lambda b: ravel_pytree(b)[0],
}

WRAPPERS = {
    "eager": lambda call: call,
    "dj.jit": dj.jit,
    "jax.jit": jax.jit,
    "vmap": lambda call: lambda b: jax.vmap(lambda _: call(b))(jnp.arange(2))[0],
    "scan": lambda call: lambda b: lax.scan(lambda c, _: (c, call(b)), 0, jnp.arange(2))[1][0],
    "grad": lambda call: lambda b: jax.value_and_grad(lambda w: w * call(b))(1.0)[0],
}
STRATEGIES = {
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual2": lambda: dj.VirtualStrategy(2),
    "virtual3": lambda: dj.VirtualStrategy(3),
    "virtual1": lambda: dj.VirtualStrategy(1),
}


@pytest.fixture(params=STRATEGIES)
def any_strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    return WRAPPERS[request.param]


def rows_of(strategy, num_steps=4):
    count = strategy.num_replicas_in_sync
    return VALUES[: 8 * (48 // (8 * count)) * count].reshape(count, -1, 4, 2)[:, :num_steps]


def value_or_refusal(call, *args):
    try:
        return np.asarray(call(*args))
    except LocalityError:
        return None
    except (TypeError, AttributeError) as error:  # a PerReplica that the step captures
        assert "one value per replica" in str(error)
        return None


def as_argument(strategy, make):
    return lambda b: strategy.run(step, args=(make(b),))


def captured(strategy, make):
    def call(b):
        made = make(b)
        return strategy.run(lambda: step(made))

    return call


# -- the law ------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("name", OF_EACH)
def test_law_each_replica_gets_what_its_own_value_gives(any_strategy, wrap, name):
    """With axes of other sizes than R, it always works."""
    fn, rows = OF_EACH[name], rows_of(any_strategy)
    expected = sum(float(weigh(fn(rows[r : r + 1])[0])) for r in range(len(rows)))
    mapped = as_argument(any_strategy, lambda b: jax.tree.map(fn, b))
    found = value_or_refusal(wrap(mapped), any_strategy.per_replica(rows))
    outside = wrap in (WRAPPERS["eager"], WRAPPERS["vmap"], WRAPPERS["grad"])
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    else:  # a size that is R, where nothing but the size tells
        shared = rows.shape[0] in rows.shape[1:] + fn(rows).shape[1:]
        assert shared and any_strategy.extended.topology.mesh is None and outside


@pytest.mark.pairwise
@pytest.mark.parametrize("name", OF_ALL)
def test_law_one_value_of_all_goes_to_each(any_strategy, wrap, name):
    rows, fn = rows_of(any_strategy), OF_ALL[name]
    if name == "traced row" and len(rows) == 1:
        pytest.skip("there is no second row")
    expected = len(rows) * float(weigh(fn(rows)))
    for use in (as_argument, captured):
        call = wrap(use(any_strategy, lambda b: jax.tree.map(fn, b)))
        np.testing.assert_allclose(call(any_strategy.per_replica(rows)), expected, rtol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("use", [as_argument, captured])
@pytest.mark.parametrize("name", [*MIXING, *BARE])
def test_law_all_values_are_never_taken_as_one(any_strategy, wrap, name, use):
    make = BARE.get(name) or (lambda b: jax.tree.map(MIXING[name], b))
    rows = rows_of(any_strategy)
    found = value_or_refusal(wrap(use(any_strategy, make)), any_strategy.per_replica(rows))
    topology = any_strategy.extended.topology
    if name in ("doubled leaf", "raveled", "reduced") and topology.mesh is None:
        if wrap in (WRAPPERS["eager"], WRAPPERS["vmap"], WRAPPERS["grad"]):
            return  # docs/limits.md: on one device nothing tells what an array was made of
    assert found is None or len(rows) == 1


@pytest.mark.parametrize("door", ["reduce", "gather", "local_results", "update", "mask", "none"])
@pytest.mark.parametrize("name", ["flat", "moved", "stack"])
def test_law_every_door_refuses(name, door):
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        v = dj.Variable(jnp.zeros(()))

    def enter(b):
        made = jax.tree.map(MIXING[name], b)
        if door == "reduce":
            return strategy.reduce("sum", {"x": made})
        if door == "gather":
            return strategy.gather(made, axis=0)
        if door == "local_results":
            return strategy.local_results(made)
        if door == "mask":
            return strategy.reduce("mean", b, axis=0, mask=made)
        if door == "update":
            return strategy.extended.update(v, lambda v, x: v.assign(x.sum()), args=(made,))
        return strategy.extended.update_non_slot(
            strategy.extended.non_slot_devices([]), lambda x: x.sum(), args=(made,)
        )

    b = strategy.per_replica(rows_of(strategy))
    for wrapped in (enter, dj.jit(enter)):
        with pytest.raises(LocalityError, match="needs to be a PerReplica, or one value that each"):
            wrapped(b)
    assert float(v.value) == 0


def test_the_error_and_its_ways_out(pair):
    b = pair.per_replica(rows_of(pair))

    def call(b, cure):
        leaf = jax.tree.leaves(b)[0]
        return pair.run(lambda x: x.sum(), args=(cure(leaf),))

    with pytest.raises(LocalityError) as info:
        dj.jit(lambda b: call(b, lambda x: x))(b)
    assert str(info.value) == (
        "argument x of test_the_error_and_its_ways_out.<locals>.call.<locals>.<lambda> needs to be "
        "a PerReplica, or one value that each replica holds.\n"
        "  Got: an array made of the values of the 2 replicas: traced float32[2, 3, 4, 2].\n"
        "  Why: it was computed from the array [R, ...] of a PerReplica, as jax.tree.map and "
        "jax.tree.leaves see it, and each replica would get all of it.\n"
        "  Fix: strategy.per_replica(x) if row r is the value of replica r; strategy.first(x) if "
        "the rows are equal; strategy.broadcast(x) if all of it is one value"
    )
    rows = rows_of(pair)
    for wrap in (lambda f: f, dj.jit):
        each = wrap(lambda b: call(b, pair.per_replica))(b)
        assert local(pair, each) == rows.sum((1, 2, 3)).tolist()
        assert float(wrap(lambda b: call(b, pair.first))(b)) == rows[0].sum()
        assert float(wrap(lambda b: call(b, pair.extended.broadcast_to))(b)) == rows.sum()


@pytest.mark.parametrize("name", ["mirrored2", "virtual2"])
def test_a_captured_array_is_named(name):
    strategy = STRATEGIES[name]()
    leaf = jax.tree.leaves(strategy.per_replica(rows_of(strategy)))[0]

    def sums():
        return weigh(leaf)

    with pytest.raises(LocalityError, match="^an array that .*sums captures needs to be a PerRep"):
        strategy.run(sums)


@pytest.mark.parametrize("how", [lambda f: f, dj.jit])
def test_rows_end_to_end_are_refused_as_an_argument_of_jit(how):
    """A global batch that was split by hand: each replica would get all of it."""
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(np.ones((8, 2), np.float32), split)
    total = lambda x: dj.get_replica_context().all_reduce("sum", x.sum())
    for made in (lambda x: x, lambda x: 2 * x):
        with pytest.raises(LocalityError, match="needs to be a PerReplica"):
            how(lambda x, made=made: strategy.run(total, args=(made(x),)))(x)
    of_all = how(lambda x: strategy.run(total, args=((2 * x).sum(0),)))
    assert float(of_all(x)) == 64  # one value: each of the two has the sum, 32


# -- epochs stacked as [R, K, ...] ----------------------------------------------------------


@pytest.mark.parametrize("num_steps", [2, 3])
@pytest.mark.parametrize("name", ["mirrored2", "virtual2", "virtual3"])
def test_stacked_steps_are_sliced_in_a_loop(name, num_steps):
    """As pmap code does, where K or a batch may be R."""
    strategy = STRATEGIES[name]()
    rows = rows_of(strategy, num_steps)
    num_steps = rows.shape[1]
    b = {"x": strategy.per_replica(rows)}
    expected = [sum(float(weigh(rows[r, k])) for r in range(len(rows))) for k in range(num_steps)]

    @dj.jit
    def in_python(b):
        take = lambda k: jax.tree.map(lambda a: a[:, k], b)
        return jnp.stack([strategy.run(step, args=(take(k)["x"],)) for k in range(num_steps)])

    @dj.jit
    def in_lax(b):
        def one(k, losses):
            batch = jax.tree.map(lambda a: a[:, k], b)
            assert dj.is_per_replica(batch["x"])
            return losses.at[k].set(strategy.run(step, args=(batch["x"],)))

        return lax.fori_loop(0, num_steps, one, jnp.zeros(num_steps))

    for epoch in (in_python, in_lax):
        np.testing.assert_allclose(epoch(b), expected, rtol=1e-5)


def test_eager_slices_of_stacked_steps():
    pair = STRATEGIES["mirrored2"]()
    rows = rows_of(pair, 2)  # K is R: the layout on the devices tells
    b = pair.per_replica(rows)
    for k in range(2):
        batch = jax.tree.map(lambda a: a[:, k], b)  # noqa: B023
        assert local(pair, batch) == rows[:, k].tolist()


def test_vmap_over_an_inner_axis(any_strategy, wrap):
    rows = rows_of(any_strategy, 3)
    fn = jax.vmap(lambda b: jax.tree.map(lambda a: a**2, b), in_axes=1, out_axes=1)
    found = value_or_refusal(wrap(as_argument(any_strategy, fn)), any_strategy.per_replica(rows))
    if any_strategy.num_replicas_in_sync != 2 or any_strategy.extended.topology.mesh is not None:
        expected = sum(float(weigh(row**2)) for row in rows)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("jit", [dj.jit, jax.jit])
def test_a_loop_over_the_rows_is_refused_in_a_trace(pair, jit):
    """Nothing tells of what it returns whose it is; `x.map` does."""
    b = pair.per_replica(rows_of(pair))
    looped = lambda b: jax.tree.map(lambda a: lax.map(lambda row: row.sum(-1), a), b)
    with pytest.raises(LocalityError, match="^argument x of step needs to be a PerReplica"):
        jit(as_argument(pair, looped))(b)
    mapped = jit(as_argument(pair, lambda b: b.map(lambda row: row.sum(-1))))
    expected = sum(float(weigh(row.sum(-1))) for row in rows_of(pair))
    np.testing.assert_allclose(mapped(b), expected, rtol=1e-5)


def test_a_square_turned_on_its_side_is_refused_in_a_trace(pair):
    b = pair.per_replica(np.arange(4, dtype=np.float32).reshape(2, 2))
    turned = lambda b: pair.run(step, args=(jax.tree.map(jnp.transpose, b),))
    is_told = pair.extended.topology.mesh is not None  # by the layout; else see docs/limits.md
    for wrap in (lambda f: f, dj.jit, jax.jit)[not is_told :]:
        with pytest.raises(LocalityError) as info:
            wrap(turned)(b)
        assert str(info.value) == (
            "argument x of step needs the replica axis in front of a PerReplica.\n"
            "  Got: a PerReplica of 2 values of shape (2,), whose axes were put in another order.\n"
            "  Why: jax.tree.map sees the array [R, ...], and row r of it is the value of replica "
            "r.\n"
            "  Fix: x.map(jnp.transpose), which sees the value of each replica"
        )


def test_what_a_step_or_a_reduction_gives_is_one_value(any_strategy):
    """None of distjax's own results is refused, whatever it was computed from."""
    rows = rows_of(any_strategy)
    with any_strategy.scope():
        v = dj.Variable(jnp.zeros(rows.shape[1:]))

    @dj.jit
    def program(b):
        total = any_strategy.run(lambda x: dj.get_replica_context().all_reduce("sum", x), (b,))
        v.assign(any_strategy.reduce("mean", b))
        made = [
            total,
            any_strategy.reduce("sum", b),
            any_strategy.gather(b, axis=0),
            any_strategy.first(b),
            any_strategy.broadcast(b.stacked),
            any_strategy.local_results(b)[0],
            v.value,
        ]
        return [any_strategy.run(jnp.sum, args=(jnp.sin(x),)) for x in made]

    for value in program(any_strategy.per_replica(rows)):
        assert np.shape(value) == ()


def test_what_goes_into_dj_jit_is_known_inside():
    strategy = dj.VirtualStrategy(2)
    b = strategy.per_replica(rows_of(strategy))
    inner = dj.jit(lambda x: strategy.run(step, args=(x,)))
    with pytest.raises(LocalityError, match="^argument x of step needs to be a PerReplica"):
        inner(jax.tree.leaves(b)[0])
    mirrored = dj.MirroredStrategy(jax.devices()[:2])
    inner = dj.jit(lambda x: mirrored.run(step, args=(x,)))
    with pytest.raises(LocalityError, match="^argument x of step needs to be a PerReplica"):
        inner(jax.tree.leaves(mirrored.per_replica(rows_of(mirrored)))[0])


def test_a_size_that_is_r_by_chance(pair):
    """Bare arrays of one value may have any size."""
    for wrap, shape in itertools.product((lambda f: f, dj.jit, jax.jit), ((2,), (2, 2), (2, 3))):
        whole = jnp.ones(shape)
        assert float(wrap(lambda x: pair.run(jnp.sum, args=(x,)))(whole)) == whole.size
