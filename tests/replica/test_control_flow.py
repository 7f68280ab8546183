"""Merges inside loops, branches, jit and remat: values, locality, cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax.errors import MergeError


def merge_sum(value):
    return dj.get_replica_context().merge_call(lambda s, v: s.reduce("sum", v), args=(value,))


@pytest.fixture
def x(pair):
    return pair.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )


def values(strategy, out):
    return [float(v) for v in strategy.local_results(out)]


def test_scan_with_equal_and_different_carries_inputs_and_outputs(pair, x):
    per_step = pair.distribute_values_from_function(
        lambda ctx: np.arange(3, dtype=np.float32) * (ctx.replica_id_in_sync_group + 1)
    )

    def fn(x, steps):
        def body(carry, inputs):
            equal, own = carry
            mine, shared = inputs
            total = merge_sum(mine)
            return (equal + total, own + x * shared), (total, mine)

        return lax.scan(body, (0.0, x), (steps, jnp.ones(3)))

    (equal, own), (totals, mine) = pair.run(fn, args=(x, per_step))
    assert isinstance(equal, jax.Array)
    assert isinstance(totals, jax.Array)
    assert float(equal) == 9.0
    np.testing.assert_array_equal(totals, [0.0, 3.0, 6.0])
    assert values(pair, own) == [4.0, 8.0]
    np.testing.assert_array_equal(mine.stacked, [[0, 1, 2], [0, 2, 4]])


def test_scan_in_reverse_and_unrolled(pair, x):
    def fn(x):
        def body(carry, step):
            return 10 * carry + merge_sum(x) * step, carry

        return lax.scan(body, 0.0, jnp.arange(1.0, 4.0), reverse=True, unroll=2)

    final, carries = pair.run(fn, args=(x,))
    assert float(final) == 963.0
    np.testing.assert_array_equal(carries, [96.0, 9.0, 0.0])


def test_carry_that_becomes_different_by_the_merge(pair, x):
    def fn(x):
        def body(_, carry):
            # the merge hands each replica its own value back
            return dj.get_replica_context().merge_call(lambda s, v, c: v, args=(x, carry))

        return lax.fori_loop(0, 2, body, 0.0)

    assert values(pair, pair.run(fn, args=(x,))) == [1.0, 2.0]


def test_while_with_a_merge_in_its_condition(pair, x):
    def fn(x):
        return lax.while_loop(lambda c: merge_sum(c * x) < 100.0, lambda c: c * 2, 1.0)

    out = pair.run(fn, args=(x,))
    assert isinstance(out, jax.Array)
    assert float(out) == 64.0  # 3 * 32 < 100 <= 3 * 64


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_switch_joins_the_localities_of_its_branches(pair, x, choice):
    def fn(index, x):
        return lax.switch(index, [lambda: merge_sum(x), lambda: x, lambda: jnp.float32(7)])

    out = pair.run(fn, args=(np.int32(choice), x))
    assert values(pair, out) == [[3.0, 3.0], [1.0, 2.0], [7.0, 7.0]][choice]


def test_nested_constructs(pair, x):
    @jax.jit
    def inner(c, x):
        return lax.cond(c > 5.0, lambda: c + merge_sum(x), lambda: c + 1.0)

    def fn(x):
        def body(c, _):
            return lax.fori_loop(0, 2, lambda i, c: jax.checkpoint(inner)(c, x), c), None

        return lax.scan(body, 4.0, None, length=2)[0]

    assert float(pair.run(fn, args=(x,))) == 12.0  # 4, 5, 6, 9, 12


def test_merge_between_effects_keeps_them(x, pair):
    seen = []

    def fn(x):
        jax.debug.callback(lambda v: seen.append(("before", float(v))), x)
        total = merge_sum(x)
        jax.debug.callback(lambda v: seen.append(("after", float(v))), total)
        return total

    jax.block_until_ready(pair.run(fn, args=(x,)))
    jax.effects_barrier()
    assert sorted(v for when, v in seen if when == "before") == [1.0, 2.0]
    assert {v for when, v in seen if when == "after"} == {3.0}


def compiled_step(strategy, loss):
    """Returns the compiled gradient of ``loss(w, x)`` on every replica."""
    batch = strategy.distribute_values_from_function(lambda ctx: np.ones((64, 256), np.float32))
    weights = np.ones((8, 256, 256), np.float32)
    step = dj.jit(lambda w, x: strategy.run(jax.grad(loss), args=(w, x)))
    return step.lower(weights, batch).compile()


def layers(w, x, merge, remat):
    def layer(x, w):
        return jnp.tanh(merge(x @ w)), None

    return lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0].sum()


def merge_in_a_linear_solve(x):
    return lax.custom_linear_solve(merge_sum, x, lambda matvec, b: b)


def merge_in_a_shard_map(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[6:]), ("part",))
    options = dict(mesh=mesh, in_specs=P("part"), out_specs=P("part"), check_vma=False)
    return jax.shard_map(merge_sum, **options)(jnp.stack([x, x]))


@pytest.mark.parametrize("construct", ["custom_linear_solve", "shard_map"])
def test_a_merge_where_code_is_run_by_other_rules(pair, x, construct):
    fn = merge_in_a_linear_solve if construct == "custom_linear_solve" else merge_in_a_shard_map
    with pytest.raises(MergeError) as caught:
        pair.run(fn, args=(x,))
    first, got, why, fix = str(caught.value).splitlines()
    assert first == f"merge_call needs to be outside of {construct}."
    assert got.startswith("  Got: a merge_call inside of it, at ")
    assert "test_control_flow.py" in got
    assert why == (
        f"  Why: merge_call works in functions, loops and branches, but {construct} runs its "
        "function by its own rules."
    )
    assert fix == (
        "  Fix: ctx.all_reduce('sum', x) in place of the merge_call, or the merge_call before or "
        f"after {construct}"
    )


def test_remat_keeps_its_saving_around_a_merge():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    merge = lambda v: dj.get_replica_context().merge_call(lambda s, v: v, args=(v,))
    temp = {
        remat: compiled_step(strategy, lambda w, x, r=remat: layers(w, x, merge, r))
        .memory_analysis()
        .temp_size_in_bytes
        for remat in (True, False)
    }
    plain = {
        remat: compiled_step(strategy, lambda w, x, r=remat: layers(w, x, lambda v: v, r))
        .memory_analysis()
        .temp_size_in_bytes
        for remat in (True, False)
    }
    assert temp[True] < temp[False]
    assert temp[True] <= 1.05 * plain[True]


def test_one_all_reduce_per_merge_as_by_hand():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    x = strategy.distribute_values_from_function(lambda ctx: np.ones((4,), np.float32))
    ours = dj.jit(lambda x: strategy.run(lambda x: merge_sum(merge_sum(x * x) * x), args=(x,)))
    text = ours.lower(x).as_text()
    by_hand = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(lax.psum(x * x, "replica") * x, "replica"),
            mesh=strategy.mesh,
            in_specs=P("replica"),
            out_specs=P(),
            check_vma=False,
        )
    )
    expected = by_hand.lower(x.stacked).as_text().count("stablehlo.all_reduce")
    assert text.count("stablehlo.all_reduce") == expected == 2
