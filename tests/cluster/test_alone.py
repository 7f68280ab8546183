"""A process that the environment calls one of several, and that has joined nobody, is told so."""

import json
import warnings

import numpy as np
import pytest

import distjax as dj
from distjax._src.cluster import joining

SEVERAL = {
    "DISTJAX_NUM_PROCESSES": {"DISTJAX_NUM_PROCESSES": "2"},
    "DISTJAX_COORDINATOR": {"DISTJAX_COORDINATOR": "10.0.0.1:1234"},
    "DISTJAX_PROCESS_ID": {"DISTJAX_PROCESS_ID": "1"},
    "SLURM_NTASKS": {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "node[1-2]"},
    "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_SIZE": "2"},
    "TF_CONFIG": {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
        )
    },
}
ONE = {
    "nothing": {},
    "of one": {"DISTJAX_NUM_PROCESSES": "1", "DISTJAX_COORDINATOR": "10.0.0.1:1234"},
    "of one, by Slurm": {"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "node1"},
    "the script that calls srun": {"SLURM_NTASKS": "8"},
    "an evaluator": {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
        )
    },
    "no description": {"TF_CONFIG": "{"},
}


def step():
    return 1.0


USES = {
    "run": lambda: dj.VirtualStrategy(2).run(step),
    "dj.jit without a strategy": lambda: dj.jit(lambda x: x)(1.0),
    "strategy.jit": lambda: dj.VirtualStrategy(2).jit(lambda x: x)(1.0),
    "dj.pmap": lambda: dj.pmap(lambda x: x)(np.ones(1)),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in {name for row in (*SEVERAL.values(), *ONE.values()) for name in row}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(joining, "_warned", set())
    monkeypatch.setattr(joining, "_joined_with", [])  # by a strategy of another test
    monkeypatch.setattr(joining.hooks, "on_new_program", joining.hooks.Event())

    def be(row):
        for name, value in row.items():
            monkeypatch.setenv(name, value)
        joining.look_for_a_job()  # as at the import, which comes after the launcher

    return be


def use(of="run"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        USES[of]()
    return [w for w in caught if w.category is dj.errors.ClusterWarning]


@pytest.mark.parametrize("of", USES)
def test_whatever_runs_first_warns(environment, of):
    environment(SEVERAL["DISTJAX_NUM_PROCESSES"])
    (found,) = use(of)
    assert found.filename == __file__


@pytest.mark.parametrize("row", SEVERAL)
def test_whatever_says_so(environment, row):
    environment(SEVERAL[row])
    (found,) = use()
    assert f"Got: {row}" in str(found.message)
    assert use() == []  # once, from whatever line


def test_the_text(environment):
    environment(SEVERAL["DISTJAX_NUM_PROCESSES"])
    (found,) = use()
    assert str(found.message) == (
        "step runs on this process alone, and the environment describes a job of several.\n"
        "  Got: DISTJAX_NUM_PROCESSES=2, and no call of dj.initialize.\n"
        "  Why: each process then trains a model of its own, on its own devices.\n"
        "  Fix: dj.initialize() at the start of the program, and dj.MultiWorkerMirroredStrategy() "
        "for one model over all processes; dj.initialize(num_processes=1, process_id=0) if this "
        "is meant"
    )


@pytest.mark.parametrize("row", ONE)
def test_no_false_alarm(environment, row):
    environment(ONE[row])
    assert use() == []


def test_what_the_text_offers_is_enough(environment, monkeypatch):
    environment(SEVERAL["DISTJAX_NUM_PROCESSES"] | SEVERAL["SLURM_NTASKS"])
    monkeypatch.setattr(joining.jax_compat, "first_use_of_a_backend", lambda: None)
    dj.initialize(num_processes=1, process_id=0)
    assert use() == []


def test_creating_a_strategy_is_no_use_of_it(environment):
    environment(SEVERAL["DISTJAX_NUM_PROCESSES"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dj.VirtualStrategy(2).scope():
            pass
