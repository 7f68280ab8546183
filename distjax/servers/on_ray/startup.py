"""What a started Ray process reports about itself, and checks that it is usable."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

import distjax
from distjax.errors import ClusterError, message

if TYPE_CHECKING:
    from ray.actor import ActorHandle

#: How long the first processes may take to start: a cluster may have to make room for them.
START_SECONDS = 300.0


class ProcessInfo(NamedTuple):
    """A process's description of itself.

    Attributes:
      pid: its pid on its machine.
      versions: of the packages that must be the same on both sides.
      platform: its JAX platform.
      num_devices: how many devices it has.
    """

    pid: int
    versions: dict[str, str]
    platform: str
    num_devices: int


def describe_this_process() -> ProcessInfo:
    """Returns the description of this process."""
    devices = jax.local_devices()
    return ProcessInfo(os.getpid(), own_versions(), jax.default_backend(), len(devices))


def own_versions() -> dict[str, str]:
    """Returns the versions of this process."""
    return {"jax": jax.__version__, "distjax": distjax.__version__}


def wait_for_start(name: str, actor: ActorHandle[Any]) -> ProcessInfo:
    """Returns the description of a process, once it has started.

    Args:
      name: its name in errors.
      actor: the process.

    Raises:
      ClusterError: it did not start in time, or failed to, or its versions differ.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        said: Any = ray.get(actor.describe_process.remote(), timeout=START_SECONDS)
    except GetTimeoutError:
        raise ClusterError(
            message(
                f"{name} needs a process within {START_SECONDS:g} s",
                got="none: the cluster has no room for it yet",
                why="Ray starts a process where the resources are that it is to have",
                fix="ask for less: RayEngine(worker_resources=..., server_resources=...); "
                "`ray status` says what there is",
            )
        ) from None
    except RayActorError as error:
        raise ClusterError(cannot_start(name, error)) from error
    info: ProcessInfo = said
    require_same_versions(name, info)
    return info


def cannot_start(name: str, error: Exception) -> str:
    """Returns the error text for a process that ends during startup."""
    return message(
        f"{name} needs a process that starts",
        got=ends_of(error),
        why="it imports distjax and JAX, before it is sent anything",
        fix="install both on every machine of the cluster, or name them in "
        "RayEngine(runtime_env=...); Ray's logs have all of it",
    )


def require_same_versions(name: str, info: ProcessInfo) -> None:
    """Raises a ClusterError if a process's versions differ from this one's."""
    if info.versions == own_versions():
        return
    raise ClusterError(
        message(
            f"{name} needs the versions of the coordinator: {_listed(own_versions())}",
            got=f"a process (pid {info.pid}) with {_listed(info.versions)}",
            why="programs and answers are sent in the form of one version",
            fix="install the same on every machine of the cluster, or name them in "
            "RayEngine(runtime_env=...)",
        )
    )


def require_devices(name: str, info: ProcessInfo, count: int) -> None:
    """Raises a ClusterError if a process has too few devices for its replicas."""
    if info.num_devices >= count:
        return
    raise ClusterError(
        message(
            f"{name} needs {count} devices, one for each of its replicas",
            got=f"a process (pid {info.pid}) with {info.num_devices} on {info.platform}",
            why="the replicas of a worker run at the same time",
            fix=f'RayEngine(worker_resources={{"num_gpus": {count}}}); or fewer for each worker',
        )
    )


def ends_of(error: Exception) -> str:
    """Returns the first and last line of a Ray error, in one line: what died, and why."""
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or type(error).__name__


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
