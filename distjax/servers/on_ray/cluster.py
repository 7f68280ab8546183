"""Starts Ray or connects to it: its address, authentication and cleanup."""

# A cluster of our own listens only at 127.0.0.1, requires a token, and reports to no one. Ray reads
# these settings from the environment when it is imported and when it starts, so they are there for
# both, and the environment is restored afterwards. A Ray that was imported before does not know
# them: it is refused, unless it is connected. The token and Ray's logs are in a directory that is
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

from distjax.errors import ClusterError, message
from distjax.servers.worker_threads import end_all

_starting = threading.Lock()
_folder: pathlib.Path | None = None  # of our own cluster
_knows_settings = False  # whether Ray was imported with the settings of our own cluster
_started = False  # whether this process has started the cluster

#: Settings of our own cluster, unless the environment overrides them. Ray's object store costs more
#: than a message of a few hundred kilobytes, a common size of gradients; and Ray's processes, by
#: default at nice 15, are the main program here, not background jobs.
_DEFAULTS = {"RAY_max_direct_call_object_size": str(1 << 20), "RAY_worker_niceness": "0"}


def connect(address: str | None) -> bool:
    """Connects to a cluster; returns whether this process started it.

    Args:
      address: of an existing cluster; None: the one that Ray is connected to, or named by
        RAY_ADDRESS, or a new one on this machine.

    Raises:
      ImportError: Ray is not installed.
      ClusterError: a new one is needed, and the user has imported Ray.
    """
    global _knows_settings
    with _starting:
        is_new = address is None and "RAY_ADDRESS" not in os.environ
        is_imported = sys.modules.get("ray") is not None
        settings = _settings() if is_new and (_knows_settings or not is_imported) else {}
        with _signals(), _environment(settings):
            if not is_imported:
                _import_ray()
                _knows_settings = bool(settings)
            import ray

            if ray.is_initialized():
                return _started
            if not is_new:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
                return False
            if not settings:
                raise ClusterError(_imported_too_early())
            _start_here()
            return True


def _import_ray() -> None:
    try:
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


def _settings() -> dict[str, str]:
    """Returns the environment of our own cluster; makes its folder and token the first time."""
    global _folder
    if _folder is None:
        _folder = pathlib.Path(tempfile.mkdtemp(prefix="distjax-ray-"))
        token = _folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        atexit.register(_end, os.getpid())
    return {
        **{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()},
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its other meaning: nothing beyond this machine
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_folder / "token"),
    }


def _start_here() -> None:
    global _started
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(_folder),
    )
    _started = True


def _imported_too_early() -> str:
    return message(
        "RayEngine needs to import Ray itself, to start a cluster of its own",
        got="a Ray that was imported before",
        why="on import Ray reads that it is to listen at this machine only, and ask for a token",
        fix="engine = dj.servers.RayEngine() before `import ray`; or ray.init() for a cluster with "
        "Ray's own settings, which RayEngine() then uses",
    )


def _end(pid: int) -> None:
    """Shuts down the cluster of a process; a forked child has none."""
    global _started
    if os.getpid() != pid or _folder is None:
        return
    end_all(pid)  # first: a Ray call after shutdown would start another cluster
    if _started:
        importlib.import_module("ray").shutdown()
        _started = False
    shutil.rmtree(_folder, ignore_errors=True)


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
