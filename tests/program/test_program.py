"""The compiled program: effects, exceptions, results, arguments from elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.context import frames
from distjax.errors import LocalityError
from tests.replicas import ids, local, per_replica

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


# -- effects ------------------------------------------------------------------


def test_callbacks_run_on_every_replica(pair, how):
    seen = []

    def fn(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        y = dj.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), args=(x,))
        jax.debug.callback(lambda y: seen.append(10 * float(y)), x + y)
        dj.get_replica_context().merge_call(lambda s: None)
        jax.debug.callback(lambda x: seen.append(100 * float(x)), x)

    step = how(lambda x: pair.run(fn, args=(x,)))
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    for _ in range(2):
        step(x)
        jax.effects_barrier()
        assert sorted(seen) == [1, 2, 40, 50, 100, 200]
        seen.clear()


def test_a_callback_in_a_merge_function_runs_once(pair, how):
    seen = []

    def merge(strategy, x):
        jax.debug.callback(lambda t: seen.append(float(t)), strategy.reduce("sum", x))

    step = how(
        lambda x: pair.run(
            lambda x: dj.get_replica_context().merge_call(merge, args=(x,)), args=(x,)
        )
    )
    step(per_replica(pair, [np.float32(1), np.float32(2)]))
    jax.effects_barrier()
    assert seen == [3]


def test_debug_print_is_kept(pair, capfd):
    def fn(x):
        jax.debug.print("replica has {x}", x=x)

    pair.run(fn, args=(per_replica(pair, [np.int32(5), np.int32(6)]),))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.count("replica has 5") == out.count("replica has 6") == 1


def test_a_program_of_effects_alone(pair):
    """Nothing reads what the equations compute, and they run."""
    seen = []
    fn = lambda x: jax.debug.callback(lambda x: seen.append(float(x)), x * 2)
    for _ in range(2):
        pair.run(fn, args=(ids(pair),))
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 2, 2]


# -- exceptions ---------------------------------------------------------------


class Mine(Exception):
    pass


@pytest.mark.parametrize("place", ["start", "after a write", "merge", "loop", "inner jit"])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_an_exception_leaves_everything_as_it_was(pair, how, place, warm):
    v = make(pair, 1.0, aggregation=AGG.SUM)
    fail = []

    def raise_it(*_):
        if fail:
            raise Mine("text")
        return 0.0

    def fn(x):
        ctx = dj.get_replica_context()
        if place == "start":
            raise_it()
        v.assign_add(jnp.float32(1))
        if place == "after a write":
            raise_it()
        if place == "merge":
            ctx.merge_call(lambda strategy: raise_it())
        if place == "loop":
            dj.lax.fori_loop(0, 2, lambda i, c: raise_it() + c, 0.0)
        if place == "inner jit":
            jax.jit(lambda: raise_it())()
        return x

    step = how(lambda x: pair.run(fn, args=(x,)))
    if warm:
        step(jnp.ones(1))
    before = float(v.value)
    fail.append(1)
    for _ in range(2):
        with pytest.raises(Mine) as caught:
            step(jnp.ones(2))  # a new shape: traced again
        assert type(caught.value) is Mine and caught.value.args == ("text",)
        assert not dj.has_strategy() and not dj.in_cross_replica_context()
        assert float(v.value) == before
    fail.clear()
    step(jnp.ones(2))
    assert float(v.value) == before + 2


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_errors_of_the_users_keep_their_type(pair, error):
    def fn(x):
        if x.ndim:
            raise error("mine")
        return x

    for x in (jnp.ones(1), jnp.float32(1), jnp.ones(1), jnp.ones(2)):
        if x.ndim:
            with pytest.raises(error, match="mine"):
                pair.run(fn, args=(x,))
        else:
            pair.run(fn, args=(x,))


# -- arguments ----------------------------------------------------------------


def test_arrays_from_elsewhere_are_brought(pair, how):
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[5])
    v = make(pair, jnp.zeros(2), aggregation=AGG.MEAN)
    fn = lambda tree: v.assign_add(tree["x"])
    for _ in range(2):
        pair.run(fn, args=({"x": elsewhere},))
    assert v.value.tolist() == [2, 2] and elsewhere.devices() == {jax.devices()[5]}
    v.assign(elsewhere)
    assert v.value.devices() == set(pair.extended.worker_devices)


def test_args_and_kwargs_of_the_wrong_kind(pair):
    for args in (jnp.ones(2), 3, {"x": 1}):
        with pytest.raises(ValueError) as caught:
            pair.run(lambda x: x, args=args)
        assert str(caught.value).splitlines()[0] == (
            "run: positional args must be a list or tuple."
        )
    with pytest.raises(ValueError) as caught:
        pair.run(lambda x: x, args=(), kwargs=[1])
    assert str(caught.value).splitlines()[0] == "run: kwargs must be a dict."


def test_a_per_replica_of_another_strategy(pair):
    other = dj.VirtualStrategy(3)
    with pytest.raises(LocalityError) as caught:
        pair.run(lambda images: images, args=({"a": ids(other)},))
    first = str(caught.value).splitlines()[0]
    assert first.startswith("argument images['a'] of ") and "over 2 replicas" in first
    assert "over 3 replicas" in str(caught.value)


# -- results ------------------------------------------------------------------


def test_results_of_every_kind(pair, how):
    v = make(pair, 3.0)

    def fn(x):
        total = dj.get_replica_context().all_reduce("sum", x)
        return {"t": x, "m": total, "v": v, "none": None, "text": "a", "n": (1, 2.5, True)}

    x = per_replica(pair, [np.float32(1), np.float32(2)])
    got = how(lambda x: pair.run(fn, args=(x,)))(x)
    assert isinstance(got["t"], dj.PerReplica) and local(pair, got["t"]) == [1, 2]
    assert isinstance(got["m"], jax.Array) and float(got["m"]) == 3
    assert got["v"] is v and got["none"] is None and got["text"] == "a"
    assert got["n"] == (1, 2.5, True)


def test_lower_shows_one_program(pair):
    v = make(pair, jnp.zeros(4), aggregation=AGG.SUM)

    @dj.jit
    def step(x):
        return pair.run(lambda x: v.assign_add(x) * 2, args=(x,))

    text = step.lower(jnp.ones(4)).as_text()
    assert "func.func public @main" in text
    assert v.value.tolist() == [0] * 4  # lowered, not run
    assert step(jnp.ones(4)).tolist() == [4] * 4 and v.value.tolist() == [2] * 4


def test_jit_in_jit_and_in_run_is_the_function_itself(pair):
    v = make(pair, 0.0, aggregation=AGG.SUM)

    @dj.jit
    def inner(x):
        v.assign_add(x)
        return v.value

    assert float(dj.jit(lambda x: inner(x) + 1)(jnp.float32(1))) == 2
    assert local(pair, pair.run(lambda x: inner(x), args=(jnp.float32(1),))) == [3, 3]
    assert float(inner(jnp.float32(1))) == 4


def test_the_function_keeps_its_name_and_docs():
    @dj.jit
    def documented(x):
        """Docs."""
        return x

    assert documented.__name__ == "documented" and documented.__doc__ == "Docs."


def test_a_compiled_method_may_call_another():
    class Model:
        scale = 2.0

        @dj.jit
        def scaled(self, x):
            return x * self.scale

        @dj.jit
        def step(self, x):
            return self.scaled(x) + 1

    assert float(Model().step(jnp.float32(3))) == 7.0


def test_a_method_of_an_object_that_is_not_hashable_is_refused():
    """It would be found again by identity, with its former numbers in the program."""

    @dataclasses.dataclass
    class Model:
        scale: float

        @dj.jit
        def scaled(self, x):
            return x * self.scale

    with pytest.raises(ValueError, match="^argument self needs an array, a number or a hashable"):
        Model(2.0).scaled(jnp.float32(3))


def test_each_trace_has_the_context_of_its_own_call(pair):
    """A function that is traced again under another `colocate_vars_with` sees that one."""
    beside = [make(pair, 0.0), make(pair, 0.0)]
    seen = []
    fn = dj.jit(lambda x: (seen.append(frames.current().colocate_with), x)[1])
    with pair.scope():
        for size, variable in enumerate(beside, 1):
            with pair.extended.colocate_vars_with(variable):
                fn(jnp.ones(size))
        fn(jnp.ones(3))
    assert [beside.index(v) if v is not None else None for v in seen] == [0, 1, None]
