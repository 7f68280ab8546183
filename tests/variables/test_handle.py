"""A variable as a value: operators, conversions, looks, and what it refuses to hold."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError, LocalityError, StrategyMismatchError
from tests.replicas import local

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


def first_line(caught):
    return str(caught.value).splitlines()[0]


BINARY = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne",
]  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators(pair, name):
    v, w = make(pair, jnp.array([5.0, 2.0])), make(pair, 2.0)
    fn, x = getattr(operator, name), np.array([5.0, 2.0], np.float32)
    np.testing.assert_array_equal(fn(v, 2.0), fn(x, np.float32(2)))
    if name in ("eq", "ne"):
        assert fn(v, w) is (name == "ne") and fn(v, v) is (name == "eq")  # whether it is one
    else:
        np.testing.assert_array_equal(fn(v, w), fn(x, np.float32(2)))
    for other in (x, jnp.asarray(x), np.float32(2)):
        out = fn(other, v)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, fn(np.asarray(other), x))
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        np.testing.assert_array_equal(fn(2.0, v), fn(np.float32(2), x))
        np.testing.assert_array_equal(fn(jnp.float32(2), v), fn(np.float32(2), x))
    expected = fn(x, np.float32(2)).tolist()
    assert local(pair, pair.run(lambda: fn(v, w.value))) == [expected] * 2
    assert (
        local(pair, pair.run(lambda: fn(np.float32(2), v))) == [fn(np.float32(2), x).tolist()] * 2
    )


def test_a_comparison_decides_by_the_value(pair):
    step = make(pair, 0)
    choose = lambda: jax.lax.cond(step == 0, lambda: 1.0, lambda: 2.0)
    assert local(pair, pair.run(choose)) == [1.0, 1.0]
    assert step != "0" and step not in ["a", None] and len({step, step}) == 1


@pytest.mark.parametrize("name", ["and_", "or_", "xor", "lshift", "rshift"])
def test_bit_operators(pair, name):
    v, fn = make(pair, np.array([6, 1])), getattr(operator, name)
    assert fn(v, 3).tolist() == fn(np.array([6, 1]), 3).tolist()
    assert fn(3, v).tolist() == fn(3, np.array([6, 1])).tolist()


@pytest.mark.parametrize("name", ["neg", "pos", "abs"])
def test_unary_operators(pair, name):
    v = make(pair, np.array([-6.5, 1], np.float32))
    fn = getattr(operator, name)
    assert fn(v).tolist() == fn(np.array([-6.5, 1], np.float32)).tolist()
    assert operator.invert(make(pair, np.array([5]))).tolist() == [-6]


def test_matmul_divmod_round_index(pair):
    m = make(pair, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    np.testing.assert_array_equal(m @ m, x @ x)
    np.testing.assert_array_equal(x @ m, x @ x)
    assert [y.tolist() for y in divmod(m, 2.0)] == [y.tolist() for y in divmod(x, 2)]
    assert [y.tolist() for y in divmod(2.0, m)] == [y.tolist() for y in divmod(2, x)]
    assert round(m + 0.4).tolist() == x.tolist()
    assert m[0].tolist() == [1, 2] and m[..., 1].tolist() == [2, 4] and m[...].shape == (2, 2)
    assert [row.tolist() for row in m] == x.tolist() and len(m) == 2


def test_looks(pair):
    v = make(pair, jnp.zeros((2, 3)), name="w")
    assert (v.shape, v.ndim, v.size, v.dtype) == ((2, 3), 2, 6, jnp.float32)
    assert repr(v).startswith("Variable('w', float32[2, 3], ON_WRITE, NONE, of ")
    assert repr(pair) in repr(v) and str(v) == repr(v) == f"{v}"


def test_numpy_of_a_variable(pair):
    with pair.scope():
        v = dj.Variable(jnp.arange(3.0))
    mine = np.array(v)
    mine[0] = 7
    assert v.value[0] == 0 and np.array(v, copy=True).flags.writeable
    assert np.asarray(v, np.int32).dtype == np.int32
    assert np.shares_memory(np.asarray(v), np.asarray(v.value))


def test_a_variable_is_one_object(pair):
    """It is a key by identity, no array and no pytree node."""
    v, w = make(pair, 1.0), make(pair, 1.0)
    assert v == v and v != w and len({v, w}) == 2
    assert jax.tree.leaves({"a": v}) == [v] and not isinstance(v, jax.Array)


def test_variables_pass_through_run_as_themselves(pair, how):
    v = make(pair, 2.0, aggregation=AGG.SUM)

    def fn(tree, x):
        assert tree["v"] is v
        tree["v"].assign_add(x)
        return tree["v"], tree["v"].value

    step = how(lambda tree, x: pair.run(fn, args=(tree, x)))
    returned, value = step({"v": v}, jnp.float32(1))
    assert returned is v and local(pair, value) == [4, 4]


def test_variables_pass_through_merges_as_themselves(pair, how):
    v = make(pair, 2.0)

    def merge(strategy, variable, number):
        assert variable is v
        variable.assign(number)
        return variable

    fn = lambda: dj.get_replica_context().merge_call(merge, args=(v, 5.0))
    assert how(lambda: pair.run(fn))() is v and float(v.value) == 5


# -- what cannot be assigned --------------------------------------------------

DTYPE_ERRORS = [
    (jnp.int32, 1.5, "float"),
    (jnp.int32, np.float32(1), "float32"),
    (jnp.int32, jnp.ones(()), "float32"),
    (jnp.float32, 1j, "complex"),
    (jnp.bool_, 1, "int"),
    (jnp.float32, jax.random.key, "key"),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ["cross", "replica", "update", "jit"])
@pytest.mark.parametrize(("dtype", "value", "named"), DTYPE_ERRORS, ids=lambda x: str(x)[:20])
def test_dtype_error(pair, dtype, value, named, where):
    v = make(pair, False, name="v", dtype=dtype, aggregation=AGG.ONLY_FIRST_REPLICA)
    value = value(0) if value is jax.random.key else value
    write = {
        "cross": lambda: v.assign(value),
        "replica": lambda: pair.run(lambda: v.assign(value)),
        "update": lambda: pair.extended.update(v, lambda v: v.assign(value)),
        "jit": dj.jit(lambda: v.assign(value)),
    }[where]
    with pytest.raises(TypeError) as caught:
        write()
    assert first_line(caught) == (
        f"assign of variable 'v' needs a value of dtype {jnp.dtype(dtype)}."
    )
    assert named in str(caught.value).splitlines()[1]
    assert not v.value


def test_values_that_are_no_arrays(pair):
    v = make(pair, 0.0, name="v")
    for value in ("text", None, object(), {}):
        with pytest.raises(TypeError) as caught:
            v.assign(value)
        assert first_line(caught) == "assign of variable 'v' needs a value of dtype float32."
        fix = "v.assign(jnp.zeros(v.shape, v.dtype)), a number, or lists of numbers"
        assert str(caught.value).endswith(f"Fix: {fix}")


@pytest.mark.parametrize("x", [1.5, np.float64(1.5), jnp.float32(1.5)], ids=lambda x: str(type(x)))
def test_the_advised_cast_takes_python_numbers_too(pair, x):
    v = make(pair, 0, name="v")
    with pytest.raises(TypeError) as caught:
        v.assign(x)
    assert str(caught.value).endswith("Fix: v.assign(jnp.asarray(x).astype(v.dtype))")
    assert v.assign(jnp.asarray(x).astype(v.dtype)) == 1


def test_lists_of_traced_values(pair):
    v = make(pair, np.zeros(2, np.float32), name="v", aggregation=AGG.MEAN)
    pair.run(lambda x: v.assign([x, x + 1]), args=(jnp.float32(3),))
    assert v.value.tolist() == [3, 4]


@pytest.mark.parametrize("value", [["1", "2"], [[1], [1, 2]], np.array(["1", "2"])])
def test_lists_that_are_no_array_of_numbers(pair, value):
    v = make(pair, np.zeros(2, np.float32), name="v")
    with pytest.raises(TypeError) as caught:
        v.assign(value)
    assert first_line(caught) == "assign of variable 'v' needs a value of dtype float32."


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("initial", [True, jax.random.key(0)], ids=["bool", "key"])
def test_sums_of_what_has_none(pair, method, initial):
    v = make(pair, initial, name="v")
    with pytest.raises(TypeError) as caught:
        getattr(v, method)(initial)
    assert first_line(caught) == f"{method} of variable 'v' needs a dtype that has sums."
    key = jax.random.key(1)
    fix = "jax.random.split(key, v.shape)" if initial is not True else "v.value | x"
    assert str(caught.value).endswith(f"Fix: assign a new value: v.assign({fix})")
    v.assign(jax.random.split(key, v.shape) if initial is not True else v.value | initial)


def test_a_number_for_a_key(pair):
    v = make(pair, jax.random.key(0), name="k")
    with pytest.raises(TypeError) as caught:
        v.assign(3)
    assert first_line(caught) == "assign of variable 'k' needs a value of dtype key<fry>."


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [(), (2,), (1, 3), (3, 1)])
def test_shape_error(pair, method, shape):
    v = make(pair, np.zeros(3, np.float32), name="v", aggregation=AGG.SUM)
    value = np.ones(shape, np.float32)
    for write in (
        lambda: getattr(v, method)(value),
        lambda: pair.run(lambda: getattr(v, method)(value)),
        dj.jit(lambda: getattr(v, method)(value)),
        lambda: pair.extended.update(v, lambda v: getattr(v, method)(value)),
    ):
        with pytest.raises(ValueError) as caught:
            write()
        assert first_line(caught) == f"{method} of variable 'v' needs shape (3,)."
        assert f"Got: shape {shape}." in str(caught.value)
    assert v.value.tolist() == [0, 0, 0]


def test_a_variable_whose_creation_failed(pair):
    made = []

    def fn():
        if not made:
            made.append(dj.Variable(1.0, name="v"))
        raise KeyError

    with pytest.raises(KeyError):
        pair.run(fn)
    for use in (lambda: made[0].value, lambda: made[0].assign(1.0), made[0].local_results):
        with pytest.raises(ContextError) as caught:
            use()
        assert first_line(caught) == "variable 'v' needs an initial value."


# -- update -------------------------------------------------------------------


def test_update_of_what_is_no_variable(pair):
    with pytest.raises(TypeError) as caught:
        pair.extended.update(jnp.ones(2), lambda v: v)
    assert first_line(caught) == "update needs a distjax.Variable."


def test_update_of_another_strategys_variable(pair):
    v = make(dj.VirtualStrategy(3), 1.0, name="v")
    with pytest.raises(StrategyMismatchError, match="update needs a variable of"):
        pair.extended.update(v, lambda v: v.assign(2.0))


def test_sum_of_a_mirrored_variable_is_refused(pair):
    with pytest.raises(LocalityError):
        pair.reduce("sum", make(pair, 1.0))


IN_PLACE = (
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_are_refused(pair, name):
    with pair.scope():
        v = dj.Variable(2.0, name="v")
    with pytest.raises(TypeError, match="an in-place operator needs an array, not variable 'v'"):
        getattr(operator, name)(v, 3.0)
    assert float(v.value) == 2.0


WHY_NO_WRITE = (
    "  Got: jax.Array float32[3].\n"
    "  Why: a write is a call that returns the new value: in a replica, the values of all "
    "replicas are combined as the aggregation of the variable says.\n"
    "  Fix: v.assign(x); "
)


def test_the_writes_of_other_libraries_name_assign(pair):
    v = make(pair, jnp.zeros(3), name="v")
    with pytest.raises(AttributeError) as info:
        v.value = jnp.ones(3)
    assert str(info.value) == (
        "variable 'v' needs v.assign(x) in place of v.value = x.\n"
        f"{WHY_NO_WRITE}v.assign_add(x), v.assign_sub(x)"
    )
    with pytest.raises(TypeError) as info:
        v[...] = jnp.ones(3)
    assert str(info.value) == (
        "variable 'v' needs v.assign(x) in place of v[...] = x.\n"
        f"{WHY_NO_WRITE}of a part: v.assign(v.value.at[index].set(x)); v.assign_add(x), "
        "v.assign_sub(x)"
    )
    assert v.assign(v.value.at[0].set(1)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_in_a_trace_is_refused(pair, how):
    """It would hold a traced value."""
    w = make(pair, 1.0, name="w")
    message = "^a copy of variable 'w' needs to be made outside of traces"
    with pytest.raises(ContextError, match=message):
        pair.run(lambda: how(w))
    with pytest.raises(ContextError, match=message):
        dj.jit(lambda: how(w))()
    assert float(how(w).value) == 1


def test_a_copy_is_a_variable_of_its_own(pair):
    """As `copy.copy` of an array is an array of its own."""
    w = make(pair, 1.0, name="w")
    other = copy.copy(w)
    w.assign(2.0)
    assert (other.name, float(other.value), float(w.value)) == ("w", 1, 2)


def test_pickle_names_checkpoints(pair):
    w = make(pair, 1.0, name="w")
    with pytest.raises(TypeError) as caught:
        pickle.dumps({"state": [w]})
    assert str(caught.value) == (
        "variable 'w' needs to stay in its process.\n"
        "  Got: pickle of a variable, or of what holds one.\n"
        "  Why: its value lies on the devices of this process, as its strategy says.\n"
        "  Fix: dj.checkpoint.Checkpointer(directory).save(step, tree), and restore(tree) there; "
        "or pickle jax.device_get(v.value)"
    )
