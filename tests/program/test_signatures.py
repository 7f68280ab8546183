"""What a program is looked up by: shapes, dtypes, Python values; the warning about many of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import RecompilationWarning
from tests.replicas import counted, everywhere, ids, local


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


def doubled(x):
    return 2 * x


# -- signatures ---------------------------------------------------------------


def test_shapes_a_b_a_with_python_results(pair, how):
    """A Python result belongs to its signature, also at a hit that runs no Python."""

    @counted
    def fn(x):
        return {"size": x.shape[0], "total": jnp.sum(x), "name": f"n{x.shape[0]}", "none": None}

    step = how(lambda x: pair.run(fn, args=(x,)))
    for n in (2, 3, 2, 3, 2):
        got = step(jnp.ones(n))
        assert (got["size"], got["name"], got["none"]) == (n, f"n{n}", None)
        assert float(got["total"]) == n
    assert fn.calls == 2


def test_dj_jit_traces_once_per_signature(pair):
    @counted
    def step(x):
        return pair.run(replica, args=(x,))

    @counted
    def replica(x):
        return x + 1

    compiled = dj.jit(step)
    for n in (1, 2, 1, 2):
        compiled(jnp.ones(n))
    assert step.calls == replica.calls == 2


def test_an_unknown_variable_costs_one_trace(pair):
    known, late = make(pair, 1.0), make(pair, 2.0)

    @counted
    def fn(x, which):
        return x * (known if which == "known" else late).value

    for which, expected in [("known", 1), ("late", 2), ("known", 1), ("late", 2)]:
        assert local(pair, pair.run(fn, args=(jnp.float32(1), which))) == [expected] * 2
    assert fn.calls <= 4


def test_static_arguments_are_part_of_the_signature(pair):
    @counted
    def fn(x, mode, *, scale="one"):
        x = x + 1 if mode == "train" else x - 1
        return (x * 10 if scale == "ten" else x), mode

    for _ in range(2):
        for mode, scale, expected in [
            ("train", "one", 3),
            ("eval", "one", 1),
            ("train", "ten", 30),
        ]:
            y, seen = pair.run(fn, args=(jnp.float32(2), mode), kwargs={"scale": scale})
            assert local(pair, y) == [expected] * 2 and seen == mode
    assert fn.calls == 3


def test_a_bool_is_static_by_name(pair):
    @counted
    def step(x, training):
        return pair.run(lambda x: x + 1 if training else x - 1, args=(x,))

    compiled = dj.jit(step, static_argnames="training")
    for _ in range(2):
        assert float(compiled(jnp.float32(1), True)) == 2
        assert float(compiled(jnp.float32(1), training=False)) == 0
    assert step.calls == 2
    assert float(compiled(jnp.float32(1), training=1)) == 2  # 1 == True, another program
    assert step.calls == 3


class Flag:
    def __init__(self, on):
        self.on = on

    def __eq__(self, other):
        return isinstance(other, Flag) and self.on == other.on

    def __hash__(self):
        return hash(self.on)


def test_equal_objects_share_a_program(pair):
    fn = counted(lambda x, flag: x + flag.on)
    for on in (1, 2, 1, 2):
        assert float(pair.run(fn, args=(jnp.float32(1), Flag(on)))) == 1 + on
    assert fn.calls == 2


def test_keys_and_none(pair, how):
    def fn(key, nothing, tree):
        assert nothing is None and tree["b"] is None
        drawn = jax.random.uniform(dj.get_replica_context().fold_in(key))
        return drawn, key, nothing, {"b": None}

    step = how(lambda *args: pair.run(fn, args=args))
    key = jax.random.key(1)
    for _ in range(2):
        drawn, same, nothing, tree = step(key, None, {"a": jnp.ones(2), "b": None})
        expected = [float(jax.random.uniform(jax.random.fold_in(key, r))) for r in range(2)]
        np.testing.assert_allclose(local(pair, drawn), expected, rtol=1e-6)
        assert nothing is None and tree == {"b": None}
        np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(key))


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_an_argument_that_cannot_be_hashed(pair, first):
    def fn(x, options, *, more=None):
        return x

    if not first:
        pair.run(fn, args=(jnp.float32(1), jnp.float32(1)))
    for args, kwargs, name in [
        ((jnp.float32(1), set()), {}, "options"),
        ((jnp.float32(1), {"a": [set()]}), {}, "options['a'][0]"),
        ((jnp.float32(1), 1.0), {"more": set()}, "more"),
    ]:
        with pytest.raises(ValueError) as caught:
            pair.run(fn, args=args, kwargs=kwargs)
        assert str(caught.value).splitlines()[0] == (
            f"argument {name} needs an array, a number or a hashable object."
        )


def test_a_static_argument_that_cannot_be_hashed():
    """It could change, and a program made for what it was would be found."""
    step = dj.jit(lambda x, options: x + len(options), static_argnames="options")
    assert float(step(jnp.float32(1), (1, 2))) == 3
    for call in (lambda: step(jnp.float32(1), [1]), lambda: step(jnp.float32(1), options=[1])):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).splitlines()[0] == (
            "argument options needs an array, a number or a hashable object."
        )


@pytest.mark.parametrize("number", [1, -1, (1,)])
def test_static_arguments_by_number(number):
    @dj.jit(static_argnums=number)
    def repeated(x, times):
        return [x] * times

    assert repr(repeated) == "dj.jit(test_static_arguments_by_number.<locals>.repeated)"
    assert len(repeated(1.0, 3)) == 3 and len(repeated(1.0, times=2)) == 2


def test_a_static_number_that_is_no_parameter():
    with pytest.raises(ValueError) as caught:
        dj.jit(doubled, static_argnums=(0, 2))
    assert str(caught.value).splitlines() == [
        "jit: static_argnums needs positions of parameters of doubled.",
        "  Got: [2]; its positional parameters are ['x'].",
        "  Why: a static argument is found by the name of its parameter.",
        "  Fix: dj.jit(fn, static_argnums=(0,))",
    ]


def test_a_static_name_that_is_no_parameter():
    with pytest.raises(ValueError) as caught:
        dj.jit(lambda x: x, static_argnames=("training",))
    assert "static_argnames needs names of parameters of" in str(caught.value).splitlines()[0]


# -- the warning --------------------------------------------------------------


def test_a_warning_names_function_and_argument(pair):
    def train_step(images, labels):
        return images, labels

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(1, 9):
            pair.run(train_step, args=({"x": jnp.ones(n)}, jnp.float32(1)))
    # Files that other tests left to the garbage collector may be told of meanwhile.
    (warning,) = [w for w in caught if w.category is not ResourceWarning]
    assert warning.category is RecompilationWarning and warning.filename == __file__
    text = str(warning.message).splitlines()
    assert text[0].endswith(
        "train_step is compiled for the 8th time and needs arguments whose shapes stay the same."
    )
    assert text[1].strip() == "Got: a change of argument images['x']: float32[7] -> float32[8]."


def test_a_warning_about_a_python_value(pair):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn = lambda x, epoch: x
        for n in range(17):
            pair.run(fn, args=(ids(pair), f"epoch {n}"))
    caught = [w for w in caught if w.category is not ResourceWarning]
    assert [w.category for w in caught] == [RecompilationWarning] * 2  # at 8, and at 16
    assert "a change of argument epoch: 'epoch 6' -> 'epoch 7'" in str(caught[0].message)


def test_steady_calls_do_not_warn(pair):
    fn = lambda x, i: x + i
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(20):
            pair.run(fn, args=(ids(pair), i))
    assert caught == []


ARGUMENTS = {
    "numpy scalar": (np.float32(2), 4),
    "numpy float64": (np.float64(2), 4),
    "numpy int64": (np.int64(2), 4),
    "numpy bool": (np.bool_(True), 2),
    "python int": (2, 4),
    "python float": (2.0, 4),
    "numpy array": (np.full((), 2, np.int32), 4),
    "jax array": (jnp.int32(2), 4),
}


def test_numbers_of_every_kind(strategy):
    """Each alone, since what one call is given decides how the next is compiled."""
    for kind, (value, expected) in ARGUMENTS.items():
        fn = lambda x, kind=kind: x + x * 1 if kind != "numpy bool" else x * 2
        for _ in range(2):
            out = strategy.run(fn, args=(value,))
            assert local(strategy, out) == everywhere(strategy, expected), kind
