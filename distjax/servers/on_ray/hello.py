"""What a process of Ray's says when it has started, and whether it is of use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

import distjax
from distjax.errors import ClusterError, message

if TYPE_CHECKING:
    from ray.actor import ActorHandle

#: So long may the first processes take: until then a cluster may have made room.
START_SECONDS = 300.0


class Hello(NamedTuple):
    """What a process says of itself.

    Attributes:
      pid: its number there.
      versions: of what both sides have to have the same.
      platform: what JAX runs on there.
    """

    pid: int
    versions: dict[str, str]
    platform: str


def say_hello() -> Hello:
    """Returns what this process is."""
    return Hello(os.getpid(), own_versions(), jax.default_backend())


def own_versions() -> dict[str, str]:
    """Returns the versions of this process."""
    return {"jax": jax.__version__, "distjax": distjax.__version__}


def greet(name: str, actor: ActorHandle[Any], seconds: float | None = None) -> Hello:
    """Returns what a process says, once it has started.

    Args:
      name: what it is.
      actor: the process.
      seconds: to wait at most; None: START_SECONDS.

    Raises:
      ClusterError: it has not started in time, or not at all; or its versions are others.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    seconds = START_SECONDS if seconds is None else seconds
    try:
        said: Any = ray.get(actor.hello.remote(), timeout=seconds)
    except GetTimeoutError:
        raise ClusterError(
            message(
                f"{name} needs a process within {seconds:g} s",
                got="none: the cluster has no room for it yet",
                why="Ray starts a process where the resources are that it is to have",
                fix="ask for less: RayEngine(worker_resources=..., server_resources=...); "
                "`ray status` says what there is",
            )
        ) from None
    except RayActorError as error:
        raise ClusterError(cannot_start(name, error)) from error
    hello: Hello = said
    require_same_versions(name, hello)
    return hello


def cannot_start(name: str, error: Exception) -> str:
    """Returns the text for a process that ends while it starts."""
    return message(
        f"{name} needs a process that starts",
        got=ends_of(error),
        why="it imports distjax and JAX, before it is sent anything",
        fix="install both on every machine of the cluster, or name them in "
        "RayEngine(runtime_env=...); Ray's logs have all of it",
    )


def require_same_versions(name: str, hello: Hello) -> None:
    """Raises a ClusterError if a process has other versions than this one."""
    if hello.versions == own_versions():
        return
    raise ClusterError(
        message(
            f"{name} needs the versions of the coordinator: {_listed(own_versions())}",
            got=f"a process (pid {hello.pid}) with {_listed(hello.versions)}",
            why="programs and answers are sent in the form of one version",
            fix="install the same on every machine of the cluster, or name them in "
            "RayEngine(runtime_env=...)",
        )
    )


def ends_of(error: Exception) -> str:
    """Returns the ends of an error of Ray's, in one line: what died, and why."""
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or type(error).__name__


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
