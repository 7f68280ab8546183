"""Collectives are counted right in the HLO text of every supported JAX version."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from distjax._src.diagnostics.collectives import count_collectives, type_bytes

REPLICAS = 8


def compiled_text(fn, *args, out_specs=PartitionSpec("replica")):
    mesh = Mesh(jax.devices()[:REPLICAS], "replica")
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=PartitionSpec("replica"),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped).lower(*args).compile().as_text()


def test_one_tuple_shaped_all_reduce_is_one_operation():
    text = """
  %all-reduce = (f32[4,4]{1,0}, f32[3]{0}, f32[]) all-reduce(%x, %y, %z), \
channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %get-tuple-element.1 = f32[3]{0} get-tuple-element(%all-reduce), index=1
"""
    assert count_collectives(text) == {"all-reduce": (1, 4 * (16 + 3 + 1))}


def test_index_comments_in_long_tuples_are_not_read_as_types():
    text = (
        "%all-to-all = (f32[1,2]{1,0}, /*index=5*/f32[1,2]{1,0}) "
        "all-to-all(%a, /*index=1*/%b), channel_id=1"
    )
    assert count_collectives(text) == {"all-to-all": (1, 16)}


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param("{{0,1,2,3,4,5,6,7}}", id="jax-0.10"),
        pytest.param("[1,8]<=[8]", id="iota"),
        pytest.param("mesh['replica'=8] {'replica'}", id="jax-0.12"),
    ],
)
def test_every_way_to_write_replica_groups(groups):
    text = (
        f"ROOT %psum.3 = f32[5]{{0}} all-reduce(%x), channel_id=1, "
        f'replica_groups={groups}, metadata={{op_name="jit(f)/psum"}}'
    )
    assert count_collectives(text) == {"all-reduce": (1, 20)}


@pytest.mark.parametrize(
    ("kind", "start_type", "result"),
    [
        ("all-reduce", "f32[16]{0}", "f32[16]{0}"),
        ("all-gather", "(f32[2]{0}, f32[16]{0})", "f32[16]{0}"),
        ("reduce-scatter", "((f32[128]{0}), f32[16]{0}, u32[])", "f32[16]{0}"),
        ("collective-permute", "(f32[16], f32[16], u32[], u32[])", "f32[16]{0}"),
    ],
)
def test_asynchronous_pair_counts_once_with_the_bytes_of_its_result(kind, start_type, result):
    text = f"""
  %start = {start_type} {kind}-start(f32[2]{{0}} %x), channel_id=1
  %done = {result} {kind}-done({start_type} %start)
"""
    assert count_collectives(text) == {kind: (1, 64)}


def test_wrapped_asynchronous_computation_counts_once():
    text = """
%async_computation (p: f32[128]) -> f32[16] {
  %p = f32[128]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[16]{0} reduce-scatter(%p), dimensions={0}
}
ENTRY %main (x: f32[128]) -> f32[16] {
  %start = ((f32[128]), f32[16]) async-start(%x), calls=%async_computation
  ROOT %done = f32[16]{0} async-done(%start)
}
"""
    assert count_collectives(text) == {"reduce-scatter": (1, 64)}


@pytest.mark.parametrize(
    "line",
    [
        "%fusion = f32[] fusion(%all-reduce.3, %all-gather), kind=kLoop",
        "%all-reduce.clone = f32[] add(%a, %b)",
        '%add = f32[] add(%a, %b), metadata={op_name="f/x = f32[] all-reduce("}',
        "%reduce = f32[] reduce(%a, %b), dimensions={0}",
        "ENTRY %main (all-reduce.1: f32[2]) -> f32[] {",
    ],
)
def test_names_and_metadata_are_not_counted(line):
    assert count_collectives(line) == {}


def test_operands_without_percent_signs():
    text = "all-gather.1 = f32[16]{0} all-gather(param.0), dimensions={0}"
    assert count_collectives(text) == {"all-gather": (1, 64)}


@pytest.mark.parametrize(
    ("hlo_type", "expected"),
    [
        ("f32[]", 4),
        ("pred[7]", 7),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
        ("c128[2]", 32),
        ("f8e4m3fn[10]", 10),
        ("s4[3]{0:E(4)}", 2),
        ("u2[8]", 2),
        ("f32[<=8,2]", 64),
        ("f32[0,3]", 0),
        ("(f32[2]{0}, (s8[3], token[]), u64[1])", 19),
        ("()", 0),
    ],
)
def test_type_bytes(hlo_type, expected):
    assert type_bytes(hlo_type) == expected


def test_every_kind_of_a_real_program():
    def step(x):
        total = lax.psum(x, "replica")
        gathered = lax.all_gather(x, "replica", tiled=True)
        piece = lax.psum_scatter(gathered, "replica", tiled=True)
        ring = [(i, (i + 1) % REPLICAS) for i in range(REPLICAS)]
        moved = lax.ppermute(piece, "replica", ring)
        exchanged = lax.all_to_all(gathered.reshape(REPLICAS, -1), "replica", 0, 0, tiled=True)
        return moved + total + exchanged.sum()

    counts = count_collectives(compiled_text(step, jnp.arange(16.0)))
    assert counts == {
        "all-reduce": (1, 8),
        "all-gather": (1, 64),
        "reduce-scatter": (1, 8),
        "collective-permute": (1, 8),
        "all-to-all": (1, 64),
    }


def test_program_without_collectives_and_stablehlo_are_empty():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert count_collectives(lowered.compile().as_text()) == {}
    assert count_collectives(lowered.as_text()) == {}


def test_collective_in_a_loop_counts_once():
    def step(x):
        return lax.fori_loop(0, 5, lambda _, y: lax.psum(y, "replica") * 0.5, x)

    assert count_collectives(compiled_text(step, jnp.ones(16))) == {"all-reduce": (1, 8)}
