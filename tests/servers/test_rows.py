"""The law of shards: a code in shards gives what it gives whole, whatever it does to rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distjax._src.servers.cutting.code import trace_code
from distjax._src.servers.cutting.rows import in_shards

ROWS, COLUMNS = 10, 4
WHOLE = ()


def norm(a):
    return jnp.sum(jnp.abs(a), axis=1, keepdims=True)


#: (a, b, ids) -> another [10, 4]; `a` and `b` are such too, in shards or not, `ids` indices.
STEPS = {
    "elementwise": lambda a, b, ids: jnp.where(a > b, a * 2, jnp.tanh(b) - 1),
    "scalar": lambda a, b, ids: a * b[0, 0],
    "one row": lambda a, b, ids: a + b[3:4],
    "norm of rows": lambda a, b, ids: a / (1 + norm(b)),
    "sum of columns": lambda a, b, ids: a + jnp.sum(b, axis=0),
    "transposed": lambda a, b, ids: jnp.transpose(a) @ b @ jnp.ones((4, 1)) * jnp.ones(ROWS) + b.T,
    "flat": lambda a, b, ids: (a.reshape(ROWS, 2, 2) * 2).reshape(ROWS, COLUMNS) - b,
    "swapped": lambda a, b, ids: jnp.swapaxes(a.reshape(ROWS, 2, 2), 1, 2).reshape(a.shape) + b,
    "stacked": lambda a, b, ids: jnp.squeeze(a[None], 0) + b[:, None].reshape(b.shape),
    "rolled": lambda a, b, ids: jnp.roll(a, 1, axis=0) + b,
    "add at": lambda a, b, ids: a.at[ids].add(b[: ids.size]),
    "set at": lambda a, b, ids: a.at[ids[0]].set(b[1]),
    "max at": lambda a, b, ids: a.at[ids, 1].max(3.0, mode="drop"),
    "clipped at": lambda a, b, ids: a.at[ids].add(1.0, mode="clip"),
    "dense": lambda a, b, ids: a - jnp.zeros_like(a).at[ids].add(b[ids]),
    "taken": lambda a, b, ids: a + b[ids].sum(axis=0),
    "filled": lambda a, b, ids: a + jnp.nan_to_num(jnp.take(b, ids, axis=0, mode="fill")).sum(0),
    "of columns": lambda a, b, ids: a + b[ids, 2].sum(),
    "small ids": lambda a, b, ids: a + b[ids.astype(jnp.int8)].sum(),
    "row at": lambda a, b, ids: a * b[ids[0]],
    "row 7": lambda a, b, ids: a * jax.lax.dynamic_slice(b, (7, 1), (1, 1)),
    "added to itself": lambda a, b, ids: a.at[jnp.arange(ROWS)[::-1]].add(a) + b,
    "last row": lambda a, b, ids: a * b[-1] + b[4:7].sum(),
    "cond": lambda a, b, ids: jax.lax.cond(ids[0] > 2, lambda: (a + b) * 2, lambda: b),
    "cond of sums": lambda a, b, ids: jax.lax.cond(
        a.sum() > 0, lambda: a.at[ids].add(1.0), lambda: jnp.zeros_like(a)
    ),
    "jit": lambda a, b, ids: jax.jit(lambda a: jnp.clip(a, -2, 2) + b)(a),
    "scan": lambda a, b, ids: jax.lax.scan(lambda c, x: (c + x, None), a, jnp.stack([b, b]))[0],
    "called back": lambda a, b, ids: (jax.debug.callback(lambda x: None, a.sum()), a + b)[1],
    "noise": lambda a, b, ids: a + jax.random.normal(jax.random.key(ids[0]), a.shape),
}
TRANSPOSED = {"transposed"}  # gives [4, 10]

sizes = st.sampled_from([WHOLE, (5, 5), (4, 3, 3), (3, 3, 2, 2), (9, 1)])


def function_of(names):
    def fn(a, b, ids):
        for name in names:
            out = STEPS[name](a, b, ids)
            a, b = b, (out.T if name in TRANSPOSED else out)
        return a, b, b.sum()

    return fn


def assert_same_in_shards(names, taken, given_):
    fn = function_of(names)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    ids = np.array([7, -1, 3, 0, 7, 12, 2, -30], np.int32)
    whole = trace_code(fn, [jnp.asarray(x) for x in (a, b, ids)])
    shards = lambda x, s: np.split(x, np.cumsum(s)[:-1]) if s else [x]
    code = in_shards(whole, [*taken, WHOLE], [*given_, WHOLE])
    found = jax.jit(lambda *xs: list(code(*xs)))(
        *(row for x, s in zip((a, b), taken, strict=True) for row in shards(x, s)), ids
    )
    expected = jax.jit(fn)(a, b, ids)
    wanted = [row for x, s in zip(expected, [*given_, WHOLE], strict=True) for row in shards(x, s)]
    assert [x.shape for x in found] == [x.shape for x in wanted]
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_each_in_shards_is_what_it_is_whole(name):
    assert_same_in_shards([name, "elementwise"], [(4, 3, 3), (5, 5)], [(5, 5), (4, 3, 3)])


@settings(max_examples=15, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    taken=st.tuples(sizes, sizes),
    made=st.tuples(sizes, sizes),
)
def test_any_code_in_shards_is_what_it_is_whole(names, taken, made):
    assert_same_in_shards(names, taken, made)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "uint64"])
def test_indices_of_any_width(dtype):
    with jax.enable_x64(dtype == "uint64"):
        table, one = jnp.arange(1200.0).reshape(600, 2), jnp.array(120, dtype)
        ids = jnp.array([0, 100, 127, 3, 55], dtype)  # 55 is 311 in 8 bits
        beyond = jnp.array([599, np.iinfo(dtype).max] if one.itemsize > 1 else [255], dtype)

        def fn(table, ids, one, beyond):
            taken = [jnp.take(table, beyond, axis=0, mode=mode) for mode in ("clip", "fill")]
            return (
                table.at[ids].add(1.0),
                table.at[beyond].add(1.0),
                table[ids],
                jax.lax.dynamic_slice(table, (one, one * 0), (1, 2)),
                *taken,
            )

        arrays = [table, ids, one, beyond]
        code = trace_code(fn, arrays)
        code = in_shards(code, [(311, 289), *[WHOLE] * 3], [WHOLE] * len(code.outputs))
        found = code(table[:311], table[311:], *arrays[1:])
        jax.tree.map(np.testing.assert_array_equal, found, fn(*arrays))


def densely(a, b, ids):
    return a - jnp.zeros_like(a).at[ids].add(b[: ids.size])


@pytest.mark.parametrize(
    "steps, b_is_whole",
    [
        ("elementwise, norm of rows, flat, swapped, stacked, cond, jit", False),
        ("add at, set at, max at, elementwise", True),  # what is added may be for any row
        ("densely", True),
    ],
)
def test_rows_are_made_of_their_own_rows(steps, b_is_whole):
    def fn(a, b, ids):
        for name in steps.split(", "):
            a = {**STEPS, "densely": densely}[name](a, b, ids)
        return [a]

    arrays = [jnp.zeros((ROWS, COLUMNS))] * 2 + [jnp.zeros(3, jnp.int32)]
    taken = [(5, 5), WHOLE if b_is_whole else (5, 5), WHOLE]
    code = in_shards(trace_code(fn, arrays), taken, [(5, 5)])
    names = [f"{x}{i}" for x, s in zip("abi", taken, strict=True) for i in range(len(s) or 1)]
    used = [{n for n, u in zip(names, code.cut_to([i]).used, strict=True) if u} for i in (0, 1)]
    shared = {"b0", "i0"} if b_is_whole else {"i0"}
    assert used[0] - shared <= {"a0", "b0"}
    assert used[1] - shared <= {"a1", "b1"}
    assert {"a0", "b0"} <= used[0] and {"a1"} <= used[1]
