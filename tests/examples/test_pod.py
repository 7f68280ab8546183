"""The files of `examples/pod`: what they start, with stand-ins for the schedulers."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest
import yaml

from tests.processes.jobs import free_address
from tests.processes.warm import ROOT, outside_of_jobs

POD = ROOT / "examples/pod"
pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("files of schedulers")]

#: Stands in for Slurm: two tasks on this machine, each as if on a node of its own, or both on one.
SRUN = """
import os, signal, subprocess, sys
command = [a for a in sys.argv[1:] if not a.startswith("--kill-on-bad-exit")]
per_node = int(os.environ["FAKE_TASKS_PER_NODE"])
nodes = 2 // per_node
tasks = []
for i in range(2):
    own = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": str(i),
           "SLURM_LOCALID": str(i % per_node), "SLURM_NODEID": str(i // per_node),
           "SLURM_NNODES": str(nodes), "SLURM_STEP_NUM_NODES": str(nodes),
           "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})"}
    if "distjax" in " ".join(command):
        own["SLURM_JOB_ID"] = "7"
    tasks.append(subprocess.Popen(command, env={**os.environ, **own}))
sys.exit(max(128 - code if code < 0 else code for code in [t.wait() for t in tasks]))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost")
else:
    print("scontrol", *sys.argv[1:])
"""
#: Stands in for gcloud: the command on one worker.
GCLOUD = """
import subprocess, sys
assert sys.argv[1:5] == ["compute", "tpus", "tpu-vm", "ssh"] and "--worker=all" in sys.argv
sys.exit(subprocess.call(["bash", "-c", sys.argv[sys.argv.index("--command") + 1]]))
"""
DISTJAX = "import sys; from distjax.__main__ import main; main()"


@pytest.fixture
def stand_ins(tmp_path):
    """Variables of a shell in which the schedulers' commands are stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {"srun": SRUN, "scontrol": SCONTROL, "gcloud": GCLOUD, "distjax": DISTJAX}
    for name, text in texts.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ours = {k: v for k, v in outside_of_jobs().items() if not k.startswith("SLURM")}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    port = free_address().rpartition(":")[2]
    cache = {"JAX_COMPILATION_CACHE_DIR": os.environ["DISTJAX_TESTS_PROGRAMS"]}
    ours |= {"PATH": path, "SLURM_JOB_ID": "7", "JAX_NUM_CPU_DEVICES": "1", **cache}
    return ours | {"PORT": port, "JAX_COORDINATOR_PORT": port, "SLURM_JOB_NODELIST": "localhost"}


def run(script, environment, tmp_path, *arguments):
    return subprocess.run(
        [str(POD / script), *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "script", ["slurm_per_node.sh", pytest.param("slurm_launch.sh", marks=pytest.mark.drill)]
)
def test_slurm(script, stand_ins, tmp_path):
    environment = stand_ins | {"FAKE_TASKS_PER_NODE": "1"}
    ended = run(script, environment, tmp_path, "--steps", "12", "--save-every", "6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "12 steps, in this run from the start" in ended.stdout
    assert "scontrol" not in ended.stdout
    assert (tmp_path / "runs/digits/12").is_dir()


def test_a_task_per_gpu_differs_in_their_number_only():
    one, other = ((POD / f"slurm_per_{x}.sh").read_text().splitlines() for x in ("node", "gpu"))
    differ = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert differ[1:] == [("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks-per-node=8")]
    assert len(differ) == 2


@pytest.mark.parametrize("code, is_again", [(70, True), (75, True), (77, False), (78, False)])
def test_slurm_is_told_what_to_start_again(code, is_again, stand_ins, tmp_path):
    (tmp_path / "bin/srun").write_text(f"#!/bin/sh\nexit {code}\n")
    ended = run("slurm_per_node.sh", stand_ins, tmp_path)
    assert ended.returncode == code
    assert ("scontrol requeue 7" in ended.stdout) == is_again


def test_workers_of_a_tpu(stand_ins, tmp_path):
    environment = stand_ins | {"CHECKPOINTS": str(tmp_path / "c")}
    ended = run("tpu_vm.sh", environment, tmp_path, "name", "zone")
    assert ended.returncode == 0, ended.stderr
    assert "300 steps, in this run from the start" in ended.stdout


def test_the_job_set_says_which_codes_end_it():
    (found,) = yaml.safe_load_all((POD / "jobset.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    policy = found["spec"]["failurePolicy"]
    assert policy["rules"][0]["action"] == "FailJobSet" and policy["maxRestarts"] > 0
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["backoffLimit"] == 0 and spec["completionMode"] == "Indexed"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 77, 78]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    assert container["name"] == rule["onExitCodes"]["containerName"]
    assert pathlib.Path(ROOT, container["command"][1]).exists()
