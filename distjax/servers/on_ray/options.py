"""Options of a RayEngine, and of each of its Ray processes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import distjax
from distjax.errors import describe_value, message
from distjax.integers import require_int

_RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")


def require_options(
    address: object,
    worker_resources: object,
    server_resources: object,
    runtime_env: object,
    max_failures: object,
) -> None:
    """Raises a TypeError or ValueError unless these are options of a RayEngine."""
    if not isinstance(address, str | None):
        raise TypeError(
            message(
                "RayEngine: address needs a string or None",
                got=describe_value(address),
                why="it names a cluster of Ray's",
                fix='dj.servers.RayEngine("auto"), or None for one on this machine',
            )
        )
    require_int(
        "RayEngine: max_failures",
        max_failures,
        1,
        why="so many workers may be lost in one closure before it is given up",
        fix="dj.servers.RayEngine(max_failures=3)",
    )
    _require_resources("worker_resources", worker_resources)
    _require_resources("server_resources", server_resources)
    if not isinstance(runtime_env, Mapping | None):
        raise TypeError(
            message(
                "RayEngine: runtime_env needs a dict or None",
                got=describe_value(runtime_env),
                why="Ray makes the processes of workers and servers with it",
                fix='dj.servers.RayEngine(runtime_env={"env_vars": {"XLA_FLAGS": "..."}})',
            )
        )


def _require_resources(name: str, resources: object) -> None:
    if resources is None:
        return
    if isinstance(resources, Mapping) and set(resources) <= set(_RESOURCES):
        return
    raise ValueError(
        message(
            f"RayEngine: {name} needs a dict with keys among {', '.join(_RESOURCES)}",
            got=describe_value(resources),
            why="Ray reserves it for each process; how these are restarted is the engine's",
            fix=f'dj.servers.RayEngine({name}={{"num_gpus": 1}})',
        )
    )


def actor_options(
    resources: Mapping[str, Any] | None, *, runtime_env: Mapping[str, Any] | None, is_ours: bool
) -> dict[str, Any]:
    """Returns the Ray options of a process.

    Args:
      resources: what Ray reserves.
      runtime_env: the user's, which takes precedence.
      is_ours: whether this process started the cluster: its processes then share the
        installation, and nothing is reserved unless asked for.
    """
    options: dict[str, Any] = {"num_cpus": 0 if is_ours else 1, **(resources or {})}
    has_accelerator = bool({"num_gpus", "resources", "accelerator_type"}.intersection(options))
    variables = {
        # Otherwise this process's JAX_PLATFORMS is inherited, whatever the other machine has.
        "JAX_PLATFORMS": "" if has_accelerator else "cpu",
        "OMP_NUM_THREADS": str(max(1, int(options["num_cpus"]))),
    }
    if is_ours:
        here = str(pathlib.Path(distjax.__file__).parents[1])
        path = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([here, path] if path else [here])
    environment = dict(runtime_env or {})
    environment["env_vars"] = variables | dict(environment.get("env_vars", {}))
    # Ray must not restart or repeat anything: the engine knows what each process had in hand.
    return options | {"runtime_env": environment, "max_restarts": 0, "max_task_retries": 0}


def with_devices(options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns the options of a process that gets `count` devices even if it has only CPUs."""
    if count == 1:
        return dict(options)
    environment = dict(options["runtime_env"])
    variables = {"JAX_NUM_CPU_DEVICES": str(count)} | environment["env_vars"]
    return {**options, "runtime_env": {**environment, "env_vars": variables}}
