"""Which axes a collective runs over, in each spelling of its groups."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from distjax._src.diagnostics.collectives import axes_of, list_lowered
from distjax.testing.hlo import count_by_axis

SIZES = {"replica": 4, "model": 2}
AXIS = '#stablehlo.axis_ref<name = "model">'
SPELLED = {
    "{{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true": "model",
    "{{0,2,4,6},{1,3,5,7}}, dimensions={0}": "replica",
    "{{0,1,2,3,4,5,6,7}}": "replica, model",
    "{}, to_apply=%add": "replica, model",
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": "",
    "{{0,2},{4,6},{1,3},{5,7}}, dimensions={0}": "part of replica",
    "[4,2]<=[8], use_global_device_ids=true": "model",
    "[2,4]<=[4,2]T(1,0), dimensions={1}": "replica",
    "[1,8]<=[8]": "replica, model",
    "mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, use_global_device_ids=true": "model",
    "mesh['replica'=4,'model'=2] {'replica'}, dimensions={0}": "replica",
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, to_apply=%add": "model",
    "mesh['a'=4,'b'=2] {'a','b'}": "replica, model",
    "mesh['a'=8] {'a':(1)4}": "",
    "[[0, 2, 4, 6], [1, 3, 5, 7]]": "replica",
    "[[0, 1], [2, 3], [4, 5], [6, 7]]": "model",
    f"#stablehlo.replica_group_mesh_axes<mesh = @m, axes = [{AXIS}]>": "model",
    "something else": "",
}


@pytest.mark.parametrize("text", SPELLED)
def test_groups_are_read_in_each_spelling(text):
    assert axes_of(text, SIZES) == SPELLED[text]


@pytest.mark.parametrize("count", [8, 256])
def test_groups_of_many_devices_in_a_lowered_program(count):
    kinds = (AxisType.Auto,) * 2
    mesh = AbstractMesh((count // 2, 2), ("replica", "model"), axis_types=kinds)
    total = lambda x: jax.lax.psum(x, "replica")
    step = jax.shard_map(total, mesh=mesh, in_specs=P("replica"), out_specs=P())
    x = jax.ShapeDtypeStruct((count,), jnp.float32)
    lowered = jax.jit(step).trace(x).lower(lowering_platforms=("cpu",))
    (found,) = list_lowered(lowered, (), dict(mesh.shape))
    assert (found.kind, found.over) == ("all-reduce", "replica")


def test_without_a_mesh_nothing_is_told():
    assert axes_of("{{0,1},{2,3}}", {}) == ""


def test_collectives_are_counted_by_axis():
    line = "  %sum = f32[4]{0} all-reduce(%a), replica_groups={{0,2,4,6},{1,3,5,7}}\n"
    other = "  %own = f32[2]{0} all-reduce(%a), replica_groups=[4,2]<=[8], to_apply=%add\n"
    assert count_by_axis(line + other + line, SIZES) == {
        ("all-reduce", "replica"): (2, 32),
        ("all-reduce", "model"): (1, 8),
    }
