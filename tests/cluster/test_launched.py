"""What a process takes from a launcher or a scheduler, and what it tells the launcher."""

import json
import os

import jax
import pytest

from distjax._src.cluster import job as events
from distjax._src.cluster import joining
from distjax._src.cluster.joining import Request, find_settings, make_timeouts

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    names = ("SLURM", "DISTJAX_P", "DISTJAX_N", "DISTJAX_C", "OMPI", "CUDA_V")
    for name in [name for name in os.environ if name.startswith(names)]:
        monkeypatch.delenv(name)


#: Variables beside those above, and the GPUs that the process takes: None are all that it sees.
SHAPES = {
    "one task on each node": ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, None),
    "one on this node": ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}, None),
    "a task for each GPU": ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_LOCALID": "3"}, (3,)),
    "two on the last node": ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}, (0,)),
    "unknown": ({}, (0,)),
    "bound by Slurm": (
        {
            "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
            "SLURM_LOCALID": "3",
            "CUDA_VISIBLE_DEVICES": "0",
            "SLURM_GPUS_ON_NODE": "4",
        },
        None,
    ),
    "not bound": (
        {
            "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
            "SLURM_LOCALID": "3",
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            "SLURM_GPUS_ON_NODE": "4",
        },
        (3,),
    ),
    "launched": (
        {
            "DISTJAX_PROCESS_ID": "5",
            "DISTJAX_NUM_PROCESSES": "6",
            "DISTJAX_COORDINATOR": "node1:9",
        },
        None,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_gpus_under_slurm(shape, monkeypatch):
    variables, devices = SHAPES[shape]
    for name, value in {**SLURM, **variables}.items():
        monkeypatch.setenv(name, value)
    timeouts = make_timeouts(60, 10, 10, 600.0, None, 3600.0)
    settings = find_settings(Request(None, None, None, None), None, None, timeouts, {})
    assert settings.local_device_ids == devices
    is_launched = "DISTJAX_PROCESS_ID" in variables
    assert (settings.process_id, settings.num_processes) == ((5, 6) if is_launched else (2, 3))
    given = Request(None, None, None, (1, 2))  # an argument wins
    assert find_settings(given, None, None, timeouts, {}).local_device_ids == (1, 2)


def test_one_task_of_open_mpi(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    assert joining._own_devices((0,)) is None
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert joining._own_devices((1,)) == (1,)


def test_the_deadline_of_the_launcher(monkeypatch):
    monkeypatch.setattr(joining, "_joined_with", [])
    monkeypatch.setenv("DISTJAX_STEP_DEADLINE", "90")
    joining.initialize()
    assert joining._joined_with[0].timeouts.step_deadline == 90
    monkeypatch.setattr(joining, "_joined_with", [])
    joining.initialize(step_deadline=70.0)
    assert joining._joined_with[0].timeouts.step_deadline == 70


def test_events_are_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTJAX_RESULT_DIR", str(tmp_path))
    monkeypatch.setenv("DISTJAX_ATTEMPT", "2")
    monkeypatch.setenv("DISTJAX_PROCESS_ID", "1")
    events.record("joined")
    events.set_step(5)
    try:
        events.record_failure(70, "ValueError: mine", ValueError("mine"))
    finally:
        events._step.clear()
    first, second = map(json.loads, (tmp_path / events.FILE).read_text().splitlines())
    assert {"time", "attempt", "event", "process", "code", "step"} == set(first)
    assert (first["event"], first["attempt"], first["process"]) == ("joined", 2, 1)
    assert (second["event"], second["code"], second["step"]) == ("failed", 70, 5)
    assert second["error"] == "ValueError: mine" and "ValueError: mine" in second["traceback"]


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path, monkeypatch):
    write = os.write
    events.append(str(tmp_path), "first", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
        events.append(str(tmp_path), "second", 0)
    events.append(str(tmp_path), "third", 0)
    lines = (tmp_path / events.FILE).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "third"]


def test_a_directory_that_is_gone_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTJAX_RESULT_DIR", str(tmp_path / "gone"))
    events.record("joined")
    events.append(str(tmp_path / "gone"), "first", 0)
    assert not (tmp_path / "gone").exists()
    assert jax.process_count() == 1
