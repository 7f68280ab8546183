"""What a process is told about its job: arguments, then variables, then the cluster."""

import json

import pytest

from distjax._src.cluster import joining as module
from distjax._src.cluster.joining import Request, as_device_ids, find_settings, make_timeouts
from distjax.errors import ClusterError

TIMEOUTS = make_timeouts(60, 10, 10, 600.0, None, 3600.0)
SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No variable says anything but what a test sets."""
    for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "ATTEMPT"):
        monkeypatch.delenv(f"DISTJAX_{name}", raising=False)
    for name in ("TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(*item) for item in values.items()]


def find(*place, local_device_ids=None, method=None, bind=None):
    given = Request(*(*place, None, None, None)[:3], local_device_ids)
    return find_settings(given, method, bind, TIMEOUTS, {})


def place_of(found):
    return found.coordinator_address, found.num_processes, found.process_id


def test_nothing_is_one_process():
    assert place_of(find()) == (None, 1, 0)
    assert place_of(find(method="deactivate")) == (None, 1, 0)
    assert place_of(find(None, 1)) == (None, 1, 0)


def test_arguments_win_over_variables(environment):
    environment(DISTJAX_COORDINATOR="a:1", DISTJAX_NUM_PROCESSES="3", DISTJAX_PROCESS_ID="2")
    environment(DISTJAX_ATTEMPT="4", JAX_COORDINATOR_ADDRESS="j:1")
    assert place_of(find()) == ("a:1", 3, 2)
    assert find().attempt == 4
    assert place_of(find("b:2", 5, 0)) == ("b:2", 5, 0)


def test_variables_win_over_a_detected_cluster(environment):
    environment(**SLURM, DISTJAX_PROCESS_ID="0")
    found = find()
    assert place_of(found) == ("node07:61440", 3, 0)
    assert found.local_device_ids == (1,)
    assert find(local_device_ids=(0, 2)).local_device_ids == (0, 2)


def test_a_detected_cluster_wins_over_tf_config(environment):
    environment(**SLURM, TF_CONFIG=tf_config({"worker": ["a:1", "b:2"]}, "worker", 1))
    assert place_of(find()) == ("node07:61440", 3, 2)
    assert place_of(find("a:1", 2, 0, method="deactivate")) == ("a:1", 2, 0)


def test_where_the_coordinator_is_bound(environment):
    assert find("a:1", 2, 0).coordinator_bind_address is None
    environment(JAX_COORDINATOR_BIND_ADDRESS="b:2")
    assert find("a:1", 2, 0).coordinator_bind_address == "b:2"
    assert find("a:1", 2, 0, bind="c:3").coordinator_bind_address == "c:3"


def tf_config(cluster, kind, index):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    "cluster, kind, index, place",
    [
        ({"worker": ["a:1", "b:2"]}, "worker", 1, ("a:1", 2, 1)),
        ({"chief": ["c:3"], "worker": ["a:1", "b:2"]}, "worker", 1, ("c:3", 3, 2)),
        ({"chief": ["c:3"], "worker": ["a:1", "b:2"]}, "chief", 0, ("c:3", 3, 0)),
        ({"chief": ["c:3"], "worker": ["a:1"], "ps": ["d:4"]}, "worker", 0, ("c:3", 2, 1)),
        ({"worker": ["a:1", "b:2"]}, "evaluator", 0, (None, 1, 0)),
    ],
)
def test_tf_config(environment, cluster, kind, index, place):
    environment(TF_CONFIG=tf_config(cluster, kind, index))
    assert place_of(find()) == place


@pytest.mark.parametrize("text", ["", "{}", '{"task": {"type": "worker", "index": 0}}'])
def test_tf_config_that_names_no_cluster(environment, text):
    environment(TF_CONFIG=text)
    assert place_of(find()) == (None, 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        tf_config({"worker": ["a:1"]}, "worker", 1),
        tf_config({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0),
    ],
    ids=["no JSON", "a list", "no task", "index", "ps"],
)
def test_tf_config_that_cannot_be_read(environment, text):
    environment(TF_CONFIG=text)
    with pytest.raises(
        ClusterError, match="TF_CONFIG needs to name a cluster of workers"
    ) as caught:
        find()
    assert text[:40] in str(caught.value)


@pytest.mark.parametrize(
    "place, missing",
    [
        (("a:1",), "num_processes"),
        (("a:1", 2), "process_id"),
        ((None, 2, 0), "coordinator_address"),
        ((None, None, 0), "coordinator_address"),
    ],
)
def test_a_part_of_a_place(place, missing):
    with pytest.raises(ClusterError, match="initialize needs coordinator_address, num_p") as caught:
        find(*place)
    assert f"no cluster says {missing}" in str(caught.value)


def test_a_way_of_detection_that_finds_nothing():
    with pytest.raises(ClusterError, match="needs coordinator_address, .* or none"):
        find(method="no such cluster")


@pytest.mark.parametrize("count, own", [(2, 2), (2, -1), (0, 0), (True, 0), (2.0, 0), ("2", 0)])
def test_a_place_that_is_none(count, own):
    with pytest.raises(ClusterError, match="needs a process_id from 0 up to num_processes - 1"):
        find("a:1", count, own)


@pytest.mark.parametrize(
    "address", ["a", "a:", "a:0", "a:70000", "a:١", "a:" + "9" * 5000, ":x", 3, "[::1]", "a..b:1"]
)
def test_an_address_that_is_none(address):
    with pytest.raises(ClusterError, match="coordinator_address of initialize needs to be an addr"):
        find(address, 2, 0)


def test_a_variable_that_is_no_number(environment):
    environment(DISTJAX_NUM_PROCESSES="two")
    with pytest.raises(ClusterError, match="variable DISTJAX_NUM_PROCESSES needs to be") as caught:
        find()
    assert "Fix: DISTJAX_NUM_PROCESSES=2, or unset it" in str(caught.value)


def test_a_detection_that_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("no metadata")

    monkeypatch.setattr(module.jax_compat, "detect_cluster", fail)
    with pytest.raises(ClusterError, match="needs to be one that JAX can read") as caught:
        find()
    assert "RuntimeError: no metadata" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, "60", None, float("inf"), 1e10, float("nan"), True])
def test_a_timeout_that_is_none(value):
    with pytest.raises(ClusterError, match="heartbeat_timeout of initialize needs to be a number"):
        make_timeouts(60, value, 10, 600.0, None, 3600.0)


def test_how_long_a_meeting_waits():
    assert TIMEOUTS.meeting_timeout == 60
    assert make_timeouts(60, 10, 10, 30.0, None, 3600.0).meeting_timeout == 30
    assert make_timeouts(60, 10, 10, 30.0, 45.0, 3600.0).meeting_timeout == 45


def test_device_ids():
    assert as_device_ids(None) is None
    assert as_device_ids(2) == (2,)
    assert as_device_ids([0, 1]) == (0, 1)
    for wrong in ("01", [0, "1"], -1, [0.0]):
        with pytest.raises(ClusterError, match="local_device_ids of initialize needs to be a num"):
            as_device_ids(wrong)


def test_a_difference_names_what_was_and_what_is():
    former, timeouts = find("a:1", 2, 0), make_timeouts(60, 10, 10, 9.0, None, 3600.0)
    later = find_settings(Request("a:1", 2, 1, None), None, "b:2", timeouts, {"mtls_x": "y"})
    assert former.describe_difference(later) == (
        "process_id=1, which was 0; coordinator_bind_address='b:2', which was None; "
        "step_deadline=9.0, which was 600.0; meeting_timeout=9.0, which was 60.0; "
        "mtls_x='y', which was None"
    )
    assert former.describe_difference(find("a:1", 2, 0)) == ""
