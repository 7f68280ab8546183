"""Ray's processes: the cluster they are in, what each is given, how it starts and is replaced."""

from __future__ import annotations

import atexit
import collections
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
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax

import distjax
from distjax._src.servers.board import end_all
from distjax.errors import ClusterError, message, require

if TYPE_CHECKING:
    from ray.actor import ActorHandle


_T = TypeVar("_T")

# -- the cluster --------------------------------------------------------------

# A cluster of our own listens only at 127.0.0.1, requires a token, and reports to no one. Ray reads
# these settings from the environment when it is imported and when it starts, so they are there for
# both, and the environment is restored afterwards. A Ray that was imported before does not know
# them: it is refused, unless it is connected. The token and Ray's logs are in a directory that is
# deleted when the process ends.

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
        atexit.register(_end_cluster, os.getpid())
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


def _end_cluster(pid: int) -> None:
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


# -- what a process is given --------------------------------------------------


def actor_options(
    resources: Mapping[str, Any] | None,
    num_devices: int = 1,
    *,
    runtime_env: Mapping[str, Any] | None,
    is_ours: bool,
) -> dict[str, Any]:
    """Returns the Ray options of a process.

    Args:
      resources: what Ray reserves.
      num_devices: how many devices it needs: CPU devices are made, if it has no others.
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
    if num_devices > 1:
        variables["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    if is_ours:
        here = str(pathlib.Path(distjax.__file__).parents[1])
        path = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([here, path] if path else [here])
    environment = dict(runtime_env or {})
    environment["env_vars"] = variables | dict(environment.get("env_vars", {}))
    # Ray must not restart or repeat anything: the engine knows what each process had in hand.
    return options | {"runtime_env": environment, "max_restarts": 0, "max_task_retries": 0}


# -- startup ------------------------------------------------------------------

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


def ends_of(error: Exception) -> str:
    """Returns the first and last line of a Ray error, in one line: what died, and why."""
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or type(error).__name__


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


class RayProcess:
    """One process of a worker or a server.

    Args:
      name: its name in errors.
      actor: the process.
      num_devices: how many devices it needs.

    Attributes:
      servers: the servers that it was told.
      plans: the numbers of the plans that it was sent.
      data: the numbers of the datasets that it reads.
      info: its description of itself; None while it starts.
    """

    def __init__(self, name: str, actor: ActorHandle[Any], num_devices: int = 1):
        self.name, self.actor = name, actor
        self.servers: Sequence[ActorHandle[Any]] = ()
        self.plans: set[int] = set()
        self.data: set[int] = set()
        self._is_blamed = False
        self.info: ProcessInfo | None = None
        self._num_devices = num_devices
        self._answer: Any = actor.describe_process.remote()

    def wait(self, seconds: float) -> bool:
        """Returns whether it has started, at the latest after so many seconds.

        Raises:
          ClusterError: it failed to, its versions differ, or it has too few devices.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if self.info is not None:
            return True
        name, count = self.name, self._num_devices
        try:
            info: ProcessInfo = ray.get(self._answer, timeout=seconds)
        except GetTimeoutError:
            return False
        except RayActorError as error:
            raise ClusterError(
                message(
                    f"{name} needs a process that starts",
                    got=ends_of(error),
                    why="it imports distjax and JAX, before it is sent anything",
                    fix="install both on every machine of the cluster, or name them in "
                    "RayEngine(runtime_env=...); Ray's logs have all of it",
                )
            ) from error
        require(
            info.versions == own_versions(),
            f"{name} needs the versions of the coordinator: {_listed(own_versions())}",
            got=f"a process (pid {info.pid}) with {_listed(info.versions)}",
            why="programs and answers are sent in the form of one version",
            fix="install the same on every machine of the cluster, or name them in "
            "RayEngine(runtime_env=...)",
            error=ClusterError,
        )
        require(
            info.num_devices >= count,
            f"{name} needs {count} devices, one for each of its replicas",
            got=f"a process (pid {info.pid}) with {info.num_devices} on {info.platform}",
            why="the replicas of a worker run at the same time",
            fix=f'RayEngine(worker_resources={{"num_gpus": {count}}}); or fewer for each worker',
            error=ClusterError,
        )
        self.info = info
        return True

    def blame(self) -> bool:
        """Returns whether its death counts against the attempt that finds it dead.

        That is the oldest in hand, which may have killed it; the others had not begun.
        """
        is_first, self._is_blamed = not self._is_blamed, True
        return is_first

    def require_start(self) -> ProcessInfo:
        """Returns its description once it has started; raises a ClusterError if it does not."""
        require(
            self.wait(START_SECONDS),
            f"{self.name} needs a process within {START_SECONDS:g} s",
            got="none: the cluster has no room for it yet",
            why="Ray starts a process where the resources are that it is to have",
            fix="ask for less: RayEngine(worker_resources=..., server_resources=...); "
            "`ray status` says what there is",
            error=ClusterError,
        )
        assert self.info is not None, "it has started"
        return self.info


def drain(items: collections.deque[_T]) -> list[_T]:
    """Takes all items; other threads may take and add at the same time."""
    taken: list[_T] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(items.popleft())
    return taken
