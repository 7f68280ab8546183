"""Errors in a replica function whose cause JAX does not know: each has a fix that works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import distjax as dj
from tests.replicas import ids, local


def zeros(x, count):
    return jnp.zeros(count) + x


def scanned(x, count):
    return lax.scan(lambda c, _: (c + x, None), 0.0 * x, None, length=count)[0]


def unrolled(x, count):
    return sum(x for _ in range(count))


@pytest.mark.parametrize("step", [zeros, scanned, unrolled])
def test_a_number_as_a_shape_or_length(pair, step):
    with pytest.raises(Exception) as found:
        pair.run(step, args=(1.0, 3))
    note = "\n".join(found.value.__notes__)
    assert f"argument count of {step.__name__} may change from call to call" in note
    assert "Fix: dj.static(count) in place of count, where the step is called" in note
    assert float(jnp.sum(pair.run(step, args=(1.0, dj.static(3))))) == 3
    mapped = dj.pmap(step, strategy=pair, static_broadcasted_argnums=1)
    assert float(jnp.sum(mapped(np.ones(2, np.float32), 3))) == 6


def noisy(state, x):
    return x + jax.random.normal(state["key"])


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_for_each_replica_is_not_one_key(pair, make):
    keys = jax.random.split(make(0), 2)
    with pytest.raises(ValueError, match="accepts a single key") as found:
        pair.run(noisy, args=({"key": keys}, 0.0))
    assert found.value.__notes__[0] == (
        "Argument state['key'] of noisy holds 2 keys, as many as there are replicas, and each "
        "replica sees all of them.\n"
        "  Fix: strategy.per_replica(state['key']) where the step is called; or one key there, and "
        "dj.get_replica_context().fold_in(key) in the step"
    )
    drawn = pair.run(noisy, args=({"key": pair.per_replica(keys)}, 0.0))
    assert local(pair, drawn) == [float(jax.random.normal(key)) for key in keys]
    with pytest.raises(ValueError, match="accepts a single key") as found:
        pair.run(noisy, args=({"key": jax.random.split(make(0), 3)}, 0.0))
    assert not any("each replica" in note for note in getattr(found.value, "__notes__", ()))


def test_an_array_of_strings(pair):
    names = np.array(["cat", "dog"])
    with pytest.raises(TypeError) as found:
        pair.run(lambda names: names, args=(names,))
    assert "An array of strings or of Python objects" in "\n".join(found.value.__notes__)
    numbers = np.unique(names, return_inverse=True)[1]
    assert pair.run(lambda x: x, args=(numbers,)).tolist() == [0, 1]


def test_pmap_and_shard_map_inside_of_a_body(pair):
    text = r"needs to leave devices to its strategy.\n  Got: .* over axes .*, at .*test_body_errors"
    mesh = jax.make_mesh((2,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("other"), out_specs=P("other"))
    for inner in (jax.pmap(lambda x: 2 * x), jax.jit(sharded)):
        with pytest.raises(dj.errors.MergeError, match=text):
            pair.run(lambda x, inner=inner: inner(x), args=(jnp.ones(2),))
    fixed = pair.run(lambda x: jax.vmap(lambda x: 2 * x)(x), args=(jnp.ones(2),))
    assert fixed.tolist() == [2, 2]


@pytest.mark.parametrize(
    "make", [dj.MirroredStrategy, dj.VirtualStrategy, dj.CentralStorageStrategy]
)
def test_pmap_and_shard_map_over_the_replica_axis_itself(make):
    own = make(2 if make is dj.VirtualStrategy else jax.devices()[:2], axis_name="batch")
    text = r"needs to leave devices to its strategy.\n  Got: .* over axes \('batch',\), at .*py:"
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    mean = lambda x: lax.pmean(x, "batch")
    sharded = jax.shard_map(mean, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    for inner in (jax.pmap(mean, axis_name="batch"), jax.jit(sharded)):
        body = lambda x, inner=inner: inner(x * 1.0)
        with pytest.raises(dj.errors.MergeError, match=text):
            own.run(body, args=(own.per_replica(np.ones((2, 2))),))
        with pytest.raises(dj.errors.MergeError, match=text):
            dj.pmap(body, axis_name="batch")(np.ones((2, 2)))


def test_a_shard_map_over_the_axis_of_one_replica():
    single = dj.MirroredStrategy(jax.devices()[:1])
    inner = jax.shard_map(
        lambda x: lax.pmean(x, "replica"),
        mesh=single.mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
    )
    assert single.run(lambda x: inner(x * 2), args=(jnp.ones(1),)).tolist() == [2]


def test_a_shard_map_over_the_model_axes_is_no_other_mesh():
    strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})

    def step(x):
        inner = jax.shard_map(
            lambda x: lax.psum(x, "model"),
            in_specs=P("model"),
            out_specs=P(),
            axis_names={"model"},
        )
        return inner(x)

    assert local(strategy, strategy.run(step, args=(jnp.arange(4.0),))) == [[2, 4], [2, 4]]


def checked(x):
    checkify.check(x < 1, "{x} is too large", x=x)
    return 2 * x


def test_checkify_says_which_replica(pair):
    error, out = pair.run(checkify.checkify(checked), args=(ids(pair),))
    assert local(pair, out) == [0, 2]
    first, second = pair.local_results(error)
    assert first.get() is None and "1.0 is too large" in second.get()
    error, out = dj.pmap(checkify.checkify(checked), strategy=pair)(jnp.arange(2.0))
    assert "at mapped index 1: 1.0 is too large" in error.get()
    with pytest.raises(checkify.JaxRuntimeError, match="1.0 is too large"):
        error.throw()


def test_a_strategy_under_a_mesh_of_the_user(pair):
    with jax.set_mesh(jax.make_mesh((8,), ("user",))):
        out = pair.run(lambda x: lax.psum(x, "replica"), args=(ids(pair),))
        assert float(pair.reduce("sum", ids(pair))) == float(out) == 1


def split(spec, mesh=None):
    where = spec if mesh is None else jax.sharding.NamedSharding(mesh, spec)
    return lambda x: lax.with_sharding_constraint(x, where)


def summed(x, **options):
    own = lambda x: lax.psum(x.sum(), "model")
    return jax.shard_map(own, in_specs=P("model"), out_specs=P(), **options)(x)


def test_axes_within_a_replica():
    """What a step for `jit` over the whole mesh says, and what a step of one replica may."""
    strategy = dj.MirroredStrategy(model_axes={"model": 2})
    whole, mesh = jnp.arange(8.0), strategy.mesh
    leave_out = "None in place of 'replica' in the spec, or in the rules that it comes from"
    fixes = {
        split(P(("replica", "model"))): leave_out,
        split(P("replica"), mesh): leave_out,
        lambda x: summed(x, mesh=mesh): "without mesh=, over axes within the replica: axis_names={",
        lambda x: lax.psum(x, "model"): "or, by hand, in the step: jax.shard_map(fn, in_specs=",
    }
    for step, fix in fixes.items():
        with pytest.raises((ValueError, NameError)) as found:
            strategy.run(step, args=(whole,))
        assert "  Fix: " in found.value.__notes__[-1] and fix in found.value.__notes__[-1]
    assert strategy.run(split(P("model"), mesh), args=(whole,)).sharding.spec == P("model")
    assert float(strategy.run(lambda x: summed(x, axis_names={"model"}), args=(whole,))) == 28


FORMATS = {
    "in a step": lambda s, x: s.run(lambda x: f"{x.sum():.3f}", args=(x,)),
    "in jit": lambda s, x: dj.jit(lambda x: f"{x.stacked.sum():.3f}")(x),
    "in vmap": lambda s, x: s.run(lambda x: jax.vmap(lambda v: f"{v:.1f}")(x), args=(x,)),
    "by format": lambda s, x: s.run(lambda x: format(x.sum(), ".1f"), args=(x,)),
    "by %": lambda s, x: s.run(lambda x: "%.3f" % x.sum(), args=(x,)),  # noqa: UP031
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_format_is_told_that_the_value_is_traced(pair, name):
    x = pair.per_replica(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError) as info:
        FORMATS[name](pair, x)
    notes = [n for n in info.value.__notes__ if n.startswith("Python needs the value of a traced")]
    assert len(notes) == 1 and "Fix: return it, and read it outside of the step" in notes[0]


CAPTURED = {
    "function": lambda s, b: s.run(lambda: jnp.sum(b)),
    "attribute": lambda s, b: s.run(lambda: b.sum()),
    "operator": lambda s, b: s.run(lambda x: b + x, args=(1.0,)),
    "operand": lambda s, b: s.run(lambda x: x + b, args=(1.0,)),
    "gradient": lambda s, b: s.run(jax.grad(lambda w: jnp.sum(w * b)), args=(1.0,)),
    "length": lambda s, b: s.run(lambda: len(b)),
    "lax": lambda s, b: s.run(lambda x: jax.lax.add(x, b), args=(1.0,)),
    "in jit": lambda s, b: dj.jit(lambda b: s.run(lambda: jnp.sum(b)))(b),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_per_replica_is_told_to_be_an_argument(pair, name):
    b = pair.per_replica(np.ones((2, 3), np.float32))
    with pytest.raises((TypeError, AttributeError)) as info:
        CAPTURED[name](pair, b)
    assert "PerReplica" in str(info.value)
    notes = [note for note in info.value.__notes__ if note.startswith("The PerReplica is not an")]
    assert len(notes) == 1 and notes[0].endswith(
        ": it has the values of all replicas there.\n"
        "  Fix: pass it as an argument: strategy.run(fn, args=(x,))"
    )
    assert local(pair, pair.run(lambda b: jnp.sum(b), args=(b,))) == [3, 3]
