"""What pmap refuses, and how it says so. Each line asserted has to stand alone."""

import enum

import jax
import numpy as np
import pytest
from jax import lax

import distjax as dj

ROWS = np.ones((2, 3), np.float32)


def body(x, y=None):
    return x


def test_more_rows_than_devices():
    with pytest.raises(ValueError, match="of body needs a device for each row.\n.*9 rows and 8"):
        dj.pmap(body)(np.ones(9))
    with pytest.raises(ValueError, match=r"(?s)strategy=dj.VirtualStrategy\(9\)"):
        dj.pmap(body)(np.ones(9))
    with pytest.raises(ValueError, match="needs a device for each row.\n.*2 rows and 1"):
        dj.pmap(body, devices=jax.devices()[:1])(ROWS)
    with pytest.raises(ValueError, match="needs a device for each row"):
        dj.pmap(body, devices=[])


def test_another_number_of_rows_than_replicas():
    strategy = dj.VirtualStrategy(4)
    text = "pmap of body needs 4 rows in each mapped argument, .*\n  Got: 2 rows"
    with pytest.raises(ValueError, match=text):
        dj.pmap(body, strategy=strategy)(ROWS)
    with strategy.scope(), pytest.raises(ValueError, match=text):
        dj.pmap(body)(ROWS)


def test_strategy_and_devices():
    text = "pmap needs devices, or a backend, or a strategy"
    with pytest.raises(ValueError, match=text):
        dj.pmap(body, strategy=dj.VirtualStrategy(2), devices=jax.devices())
    with pytest.raises(ValueError, match=text):
        dj.pmap(body, strategy=dj.VirtualStrategy(2), backend="cpu")
    with dj.VirtualStrategy(2).scope(), pytest.raises(ValueError, match=text):
        dj.pmap(body, devices=jax.devices())(ROWS)
    with pytest.raises(TypeError, match="pmap needs a distjax strategy, or None"):
        dj.pmap(body, strategy="mirrored")


def test_another_strategy_is_active():
    with dj.VirtualStrategy(2).scope(), pytest.raises(dj.errors.StrategyMismatchError):
        dj.pmap(body, strategy=dj.VirtualStrategy(2))(ROWS)


def test_rows_that_do_not_agree():
    with pytest.raises(
        ValueError,
        match=r"needs 2 rows in each mapped argument, one for each replica.\n"
        r"  Got: 3 rows along axis 0 of argument y\['a'\]",
    ):
        dj.pmap(body)(ROWS, {"a": np.ones(3)})


def test_nothing_is_mapped():
    text = "pmap of body requires at least one argument with a mapped axis"
    for options, arguments in (
        ({"in_axes": None}, (ROWS,)),
        ({"in_axes": (None,), "axis_size": 2}, (ROWS,)),
        ({}, ()),
        ({"axis_size": 2}, ()),
        ({"static_broadcasted_argnums": 0}, (3,)),
    ):
        with pytest.raises(ValueError, match=text):
            dj.pmap(body, **options)(*arguments)


def test_no_rows():
    text = "^pmap of body needs a row for each replica.\n  Got: 0 rows in the mapped arguments.\n"
    with pytest.raises(ValueError, match=text + ".*\n.*leave the call out where there is no data"):
        dj.pmap(body)(ROWS[:0])
    text = r"needs 2 rows in .*\n  Got: 0 rows along axis 0 of argument y.\n"
    with pytest.raises(ValueError, match=text):
        dj.pmap(body)(ROWS, ROWS[:0])


def test_a_variable_of_a_strategy_that_does_not_run():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(np.ones(3, np.float32), name="v")
    read = lambda x: x + v.value
    with pytest.raises(dj.errors.StrategyMismatchError) as caught:
        dj.pmap(read)(ROWS)
    assert str(caught.value).endswith("or dj.pmap(fn, strategy=strategy)")
    text = (
        r"inside jax.pmap or jax.shard_map.\n.*\n  Fix: dj.pmap\(fn, strategy=strategy\) in place"
    )
    with pytest.raises(dj.errors.TraceLeakError, match=text):
        jax.pmap(read)(ROWS)
    np.testing.assert_array_equal(dj.pmap(read, strategy=strategy)(ROWS), ROWS + 1)


def test_axis_size_is_checked():
    assert dj.pmap(body, axis_size=2)(ROWS).shape == (2, 3)
    with pytest.raises(ValueError, match="axis_size=3 needs to be the size of the mapped axes of"):
        dj.pmap(body, axis_size=3)(ROWS)


@pytest.mark.parametrize("argument", ["in_axes", "out_axes"])
def test_axes_that_are_none(argument):
    with pytest.raises(ValueError, match=f"pmap: {argument} needs ints of 0 or more, None"):
        dj.pmap(body, **{argument: -1})
    with pytest.raises(ValueError, match="-1"):
        dj.pmap(body, **{argument: (0, {"a": -1})})
    for axis in ("0", 0.5, True, ROWS):
        with pytest.raises(TypeError, match=f"pmap: {argument} needs ints of 0 or more, None"):
            dj.pmap(body, **{argument: axis})


def test_axes_that_are_no_prefix():
    text = r"pmap: in_axes=\(\(0, 0, 0\), 0\) needs to be a prefix of the positional arguments of"
    with pytest.raises(ValueError, match=text):
        dj.pmap(body, in_axes=((0, 0, 0), 0))((ROWS, ROWS), ROWS)
    with pytest.raises(ValueError, match="each argument passed by keyword is mapped"):
        dj.pmap(body, in_axes=(0, 0))(x=ROWS, y=ROWS)
    with pytest.raises(ValueError, match=r"out_axes=\(0, 0\) needs to be a prefix of what body"):
        dj.pmap(body, out_axes=(0, 0))(ROWS)
    with pytest.raises(ValueError, match="a dict of 1 where the tree has a tuple of 2"):
        dj.pmap(lambda x: (x, x), out_axes={"a": 0})(ROWS)


def test_arguments_without_rows():
    text = "pmap of body needs an array with rows along axis 0 as argument y"
    for value, got in ((3, "an array or a number of shape"), ("text", "str")):
        with pytest.raises(ValueError, match=rf"{text}.\n  Got: {got} \("):
            dj.pmap(body)(ROWS, value)
    with pytest.raises(ValueError, match=text):
        dj.pmap(body)(ROWS, np.float32(2))
    with pytest.raises(ValueError, match="needs an array with rows along axis 1 as argument x"):
        dj.pmap(body, in_axes=1)(np.ones(2))


def test_static_arguments():
    with pytest.raises(ValueError, match="argument y needs an array, a number or a hashable"):
        dj.pmap(body, static_broadcasted_argnums=1)(ROWS, [1])
    with pytest.raises(ValueError, match="needs all these arguments of body by position"):
        dj.pmap(body, static_broadcasted_argnums=1)(ROWS, y=3)
    for numbers in (-1, "x", (0, 1.5)):
        with pytest.raises(ValueError, match="static_broadcasted_argnums needs numbers of posit"):
            dj.pmap(body, static_broadcasted_argnums=numbers)
    with pytest.raises(ValueError, match="donate_argnums needs numbers of positional arguments"):
        dj.pmap(body, donate_argnums=-3)
    with pytest.raises(ValueError, match="and donate_argnums need to name different arguments"):
        dj.pmap(body, static_broadcasted_argnums=1, donate_argnums=(0, 1))


def test_arguments_of_pmap_itself():
    with pytest.raises(TypeError, match="pmap needs a function"):
        dj.pmap(ROWS)


def test_the_axis_of_a_strategy_has_a_name_of_its_own():
    strategy = dj.VirtualStrategy(2)
    text = (
        "pmap of body over axis 'batch' needs a strategy whose replica axis has this name.\n"
        "  Got: VirtualStrategy.*, whose axis is 'replica'.\n.*\n"
        r"  Fix: dj.MirroredStrategy\(axis_name='batch'\); or dj.pmap\(fn, 'replica'\)$"
    )
    with pytest.raises(ValueError, match=text):
        dj.pmap(body, "batch", strategy=strategy)
    with strategy.scope(), pytest.raises(ValueError, match=text):
        dj.pmap(body, "batch")(ROWS)
    assert dj.pmap(body, "replica", strategy=strategy)(ROWS).shape == (2, 3)


class Axis(enum.Enum):
    BATCH = "batch"


class NamedAxis(enum.StrEnum):
    ROWS = "rows"


@pytest.mark.parametrize("name", [3, 0, "", (), ("batch", 1), b"batch", Axis.BATCH, ["batch"]])
def test_an_axis_name_is_a_string(name):
    """`jax.pmap` takes these, and fails at the first collective over one of them."""
    with pytest.raises(ValueError, match="^axis_name needs a string\\.\n  Got: ") as found:
        dj.pmap(body, name)
    assert "Fix: dj.pmap(fn, axis_name='batch')" in str(found.value)


def test_an_axis_name_may_be_of_a_kind_of_string():
    step = lambda x: x / lax.psum(x, NamedAxis.ROWS)
    np.testing.assert_array_equal(dj.pmap(step, NamedAxis.ROWS)(ROWS), ROWS / 2)


def test_a_name_that_is_not_bound_says_how_to_bind_it():
    with pytest.raises(NameError, match="unbound axis name: batch") as found:
        dj.pmap(lambda x: lax.psum(x, "batch"))(ROWS)
    assert "dj.pmap(fn, 'batch')" in found.value.__notes__[-1]


def test_a_bare_collective_in_a_merge_function():
    def step(x):
        merge = lambda strategy, x: lax.psum(x, "batch")
        return dj.get_replica_context().merge_call(merge, args=(x,))

    with pytest.raises(dj.errors.MergeError, match="a bare psum over axis 'batch'"):
        dj.pmap(step, "batch")(ROWS)


def test_an_error_of_the_body_comes_out_unchanged():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        dj.pmap(fails)(ROWS)
    assert not dj.has_strategy()


def test_a_mapped_function_made_anew_at_each_call_is_told():
    with pytest.warns(dj.errors.RecompilationWarning, match="one function object"):
        for i in range(8):
            dj.pmap(lambda x, i=i: x + i)(np.ones(2))
