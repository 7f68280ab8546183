"""Starts Ray or connects to it: its address, authentication and cleanup."""

# Our own cluster listens only at 127.0.0.1, requires a token, and reports to no one. Ray reads
# these settings from the environment, on import and on start: what it read on import is read again,
# and the environment is restored afterwards. The token and Ray's logs are in a directory that is
# deleted when the process ends.

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pathlib
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from typing import Any

from distjax.errors import message
from distjax.servers.crew import end_all

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # its other meaning: whether on several machines
_starting = threading.Lock()
_started = False  # whether this process has started the cluster

#: Settings of our own cluster, unless the environment overrides them. Ray's object store costs more
#: than a message of a few hundred kilobytes, a common size of gradients; and Ray's processes, by
#: default at nice 15, are the main program here, not background jobs.
_SETTINGS = {"RAY_max_direct_call_object_size": str(1 << 20), "RAY_worker_niceness": "0"}


def require_ray() -> None:
    """Imports Ray.

    Raises:
      ImportError: Ray is not installed.
    """
    if sys.modules.get("ray") is not None:
        return
    try:
        with _environment({}):
            importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            message(
                "RayEngine needs the package ray",
                got=f"no such package ({error})",
                why="it is an optional part of distjax",
                fix="pip install 'distjax[ray]'; engine=\"threads\" needs nothing",
            )
        ) from error
    # Ray shuts down at exit; the threads that wait for it must end first.
    atexit.register(end_all, os.getpid())


def connect(address: str | None) -> bool:
    """Connects to a cluster; returns whether this process started it.

    Args:
      address: of an existing cluster; None: the one that Ray is connected to, or named by
        RAY_ADDRESS, or a new one on this machine.
    """
    import ray

    with _starting:
        if ray.is_initialized():
            return _started
        with _signals(), _environment({}):
            if address is not None or "RAY_ADDRESS" in os.environ:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
                return False
            _start_here()
            return True


def _start_here() -> None:
    global _started
    import ray
    from ray._private import ray_constants

    folder = tempfile.mkdtemp(prefix="distjax-ray-")
    token = pathlib.Path(folder, "token")
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        **{name: os.environ.get(name, value) for name, value in _SETTINGS.items()},
        _LOOPBACK: "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    atexit.register(_end, folder, os.getpid())
    with _environment(settings):
        # Three settings that Ray read from the environment on import.
        ray_constants.ENABLE_RAY_CLUSTER = False
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
    _started = True


def _end(folder: str, pid: int) -> None:
    """Shuts down the cluster of a process; a forked child has none."""
    global _started
    import ray

    if os.getpid() != pid:
        return
    end_all(pid)  # first: a Ray call after shutdown would start another cluster
    ray.shutdown()
    _started = False
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Generator[None]:
    """A context in which environment variables are set; all are restored after it."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _signals() -> Generator[None]:
    """A context that restores the handler of SIGTERM."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
