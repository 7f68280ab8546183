"""Which axes a collective runs over, in each spelling of its groups."""

import pytest

from distjax._src.diagnostics.collectives import axes_of
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
    "dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>": "replica",
    "dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>": "model",
    f"#stablehlo.replica_group_mesh_axes<mesh = @m, axes = [{AXIS}]>": "model",
    "something else": "",
}


@pytest.mark.parametrize("text", SPELLED)
def test_groups_are_read_in_each_spelling(text):
    assert axes_of(text, SIZES) == SPELLED[text]


def test_without_a_mesh_nothing_is_told():
    assert axes_of("{{0,1},{2,3}}", {}) == ""


def test_collectives_are_counted_by_axis():
    line = "  %sum = f32[4]{0} all-reduce(%a), replica_groups={{0,2,4,6},{1,3,5,7}}\n"
    other = "  %own = f32[2]{0} all-reduce(%a), replica_groups=[4,2]<=[8], to_apply=%add\n"
    assert count_by_axis(line + other + line, SIZES) == {
        ("all-reduce", "replica"): (2, 32),
        ("all-reduce", "model"): (1, 8),
    }
