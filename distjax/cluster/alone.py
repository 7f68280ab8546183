"""What a process does alone although it is one of several: it is told so once."""

from __future__ import annotations

import os
import warnings

from distjax import jax_compat, user_lines
from distjax.cluster.job import job
from distjax.cluster.joining import is_settled
from distjax.cluster.tf_config import read_tf_config
from distjax.errors import ClusterError, ClusterWarning, message

#: What Slurm and Open MPI tell the processes that they start: how many there are; and a variable
#: that only these have, not the script that starts them.
_LAUNCHERS = (("SLURM_NTASKS", "SLURM_STEP_NODELIST"), ("OMPI_COMM_WORLD_SIZE",) * 2)

_warned: set[str] = set()


def warn_once(what: str, text: str) -> None:
    """Gives a `ClusterWarning` about the user's line, once per process for each `what`."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, ClusterWarning, user_lines.user_stacklevel())


def warn_unless_joined(name: str) -> None:
    """Warns if the environment describes a job of several processes that nobody has joined.

    Starts no backend and asks no server.

    Args:
      name: of the program that this process is about to run.
    """
    if job() is not None or is_settled() or "unjoined" in _warned:
        return
    told = _told_by_environment()
    if told is not None and jax_compat.coordination_client() is None:
        warn_once("unjoined", _unjoined_text(name, told))


def _told_by_environment() -> str | None:
    """Returns the variable that says that there are several processes, with its value."""
    own = os.environ.get("DISTJAX_NUM_PROCESSES", "").strip()
    if own:
        return None if own == "1" else f"DISTJAX_NUM_PROCESSES={own}"
    for variable in ("DISTJAX_COORDINATOR", "DISTJAX_PROCESS_ID"):
        if os.environ.get(variable, "").strip():
            return f"{variable}={os.environ[variable]}"
    for count, own in _LAUNCHERS:
        if own in os.environ and os.environ.get(count, "1") != "1":
            return f"{count}={os.environ[count]}"
    try:
        described = read_tf_config()
    except ClusterError:  # `initialize` says what is wrong with it
        return None
    several = described is not None and described[1] > 1
    return f"TF_CONFIG, with {described[1]} processes" if several and described else None


def _unjoined_text(name: str, told: str) -> str:
    return message(
        f"{name} runs on this process alone, and the environment describes a job of several",
        got=f"{told}, and no call of dj.initialize",
        why="each process then trains a model of its own, on its own devices",
        fix="dj.initialize() at the start of the program, and dj.MultiWorkerMirroredStrategy() for "
        "one model over all processes; dj.initialize(num_processes=1, process_id=0) if this is "
        "meant",
    )
