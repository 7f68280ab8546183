"""Ray, started or connected to: what it listens at, who may talk to it, what it leaves behind."""

# A cluster of our own listens at 127.0.0.1 only, asks for a token, and reports to nobody. Ray reads
# that from the environment, when it is imported and when it starts: what it read before is read
# again, and the environment is as it was afterwards. The token and Ray's logs are in a folder that
# goes with the process.

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

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # its other meaning: several machines, or not
_starting = threading.Lock()


def require_ray() -> None:
    """Imports Ray.

    Raises:
      ImportError: it is not installed.
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
    # Ray ends itself at exit: before it does, nobody may wait for it any more.
    atexit.register(end_all, os.getpid())


def connect(address: str | None) -> bool:
    """Connects to a cluster; returns whether this process has started it.

    Args:
      address: of one that exists; None: the one that Ray is connected to, or RAY_ADDRESS
        names, or a new one on this machine.
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


_started = False  # by this process


def _start_here() -> None:
    global _started
    import ray
    from ray._private import ray_constants

    folder = tempfile.mkdtemp(prefix="distjax-ray-")
    token = pathlib.Path(folder, "token")
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        _LOOPBACK: "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    atexit.register(_end, folder, os.getpid())
    with _environment(settings):
        # Three things that were read in the environment in which ray was imported.
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
    """Ends the cluster of a process; one forked of it has none."""
    global _started
    import ray

    if os.getpid() != pid:
        return
    end_all(pid)  # first: a call of Ray's after its end would start another cluster
    ray.shutdown()
    _started = False
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Generator[None]:
    """A context in which variables of the environment are set; after it all are as they were."""
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
    """A context after which SIGTERM does what it did before."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
