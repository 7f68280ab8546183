"""`initialize`: how a process joins a job."""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
import threading
from collections.abc import Generator, Mapping, Sequence

import jax

from distjax import jax_compat
from distjax.cluster import addresses
from distjax.cluster.ending import watch_the_end
from distjax.cluster.job import Job, set_job
from distjax.cluster.roll_call import hold_roll_call
from distjax.cluster.settings import (
    Request,
    Settings,
    as_device_ids,
    find_settings,
    make_timeouts,
)
from distjax.cluster.warm_up import warm_up
from distjax.errors import ClusterError, message

_one_at_a_time = threading.Lock()
_joined_with: list[Settings] = []


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: float = 60,
    heartbeat_timeout: float = 10,
    shutdown_timeout: float = 10,
    step_deadline: float = 600.0,
    meeting_timeout: float | None = None,
    phase_timeout: float = 3600.0,
    **mtls: str | bool | None,
) -> None:
    """Joins the multi-process job that this process belongs to.

    Call it before any array or device is used. Arguments that are not given are taken from the
    environment variables DISTJAX_COORDINATOR, DISTJAX_NUM_PROCESSES and DISTJAX_PROCESS_ID, then
    from the cluster that JAX detects (Slurm, Open MPI, Kubernetes, TPU) or that TF_CONFIG
    describes. If nothing indicates a job, the program is a single process: nothing listens, and
    this returns. A second call with equal arguments does nothing.

    In a multi-process job, an uncaught exception ends the process with an exit code that says
    why, and the program ends when all processes reach its end.

    Args:
      coordinator_address: "host:port" of process 0. On loopback, nothing listens beyond it.
      num_processes: the number of processes.
      process_id: the index of this process, from 0.
      local_device_ids: the GPUs that this process of the job uses; None: all visible ones.
      coordinator_bind_address: where process 0 listens, if not at `coordinator_address`.
      cluster_detection_method: as in `jax.distributed.initialize`; "deactivate" turns it off.
      initialization_timeout: seconds within which all processes must join.
      heartbeat_timeout: seconds without a heartbeat after which a process is considered lost.
      shutdown_timeout: seconds that a process waits at its end for the others.
      step_deadline: seconds that a program over all processes may take from its launch, and
        within which all must arrive at the next batch of a dataset or at a checkpoint.
      meeting_timeout: seconds within which all must arrive where processes compare what they do;
        None: 60, or `step_deadline` if that is less.
      phase_timeout: seconds that one process may spend compiling, reading data or at a checkpoint.
      **mtls: JAX's options for encrypted connections to the coordinator (`mtls_*`,
        `verify_secure_credentials`), if JAX has them.

    Raises:
      ClusterError: the arguments do not describe a place in a job; a process is missing,
        duplicated or different; a backend is already in use; or this process has already
        joined with other arguments.
      TypeError: an unknown option.
    """
    place = (coordinator_address, num_processes, process_id)
    waits = (initialization_timeout, heartbeat_timeout, shutdown_timeout)
    bounds = (step_deadline, meeting_timeout, phase_timeout)
    bind = coordinator_bind_address
    with _one_at_a_time, _ends_uncaught():
        timeouts = make_timeouts(*waits, *bounds)
        _require_known(mtls)
        given = Request(*place, as_device_ids(local_device_ids))
        _join(find_settings(given, cluster_detection_method, bind, timeouts, mtls))


@contextlib.contextmanager
def _ends_uncaught() -> Generator[None]:
    """Makes an uncaught `ClusterError` end the process with its own exit code."""
    try:
        yield
    except ClusterError:
        watch_the_end()
        raise


def join_if_nobody_did() -> None:
    """Calls `initialize` unless already done; for strategies over all processes."""
    if not _joined_with:
        initialize()


def is_settled() -> bool:
    """Returns whether `initialize` has been called; the program may still be of one process."""
    return bool(_joined_with)


def _join(settings: Settings) -> None:
    if _joined_with:
        _require_equal(_joined_with[0], settings)
        return
    if settings.num_processes > 1:
        _require_in_time(settings)
        ending = watch_the_end()
        places = hold_roll_call(settings)
        _join_jax(settings)
        client = jax_compat.coordination_client()
        joined = Job(settings.process_id, settings.num_processes, client, settings.timeouts, places)
        set_job(joined)
        ending.watch(joined)
        warm_up()
    _joined_with.append(settings)


def _join_jax(settings: Settings) -> None:
    """Joins JAX's own rendezvous, with gloo listening at the address of `collectives_host`."""
    assert settings.coordinator_address is not None
    host, port = addresses.split_address(settings.coordinator_address, "coordinator_address")
    bind = settings.bind_address
    own_bind = bind if settings.process_id == 0 else None
    gloo_host = addresses.collectives_host(settings.coordinator_address, own_bind)
    jax_compat.make_gloo_listen_at(gloo_host)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    timeouts = settings.timeouts
    jax.distributed.initialize(
        settings.coordinator_address,
        settings.num_processes,
        settings.process_id,
        local_device_ids=settings.local_device_ids,
        coordinator_bind_address=bind
        or addresses.join_address(addresses.resolve_host(host, port), port),
        cluster_detection_method="deactivate",  # already done
        initialization_timeout=math.ceil(timeouts.initialization),
        heartbeat_timeout_seconds=math.ceil(timeouts.heartbeat),
        shutdown_timeout_seconds=math.ceil(timeouts.shutdown),
        **dict(settings.mtls),
    )
    if threading.current_thread() is threading.main_thread() and on_sigterm is not None:
        # JAX's preemption service has taken over SIGTERM, which would no longer end the process.
        signal.signal(signal.SIGTERM, on_sigterm)


def _require_known(mtls: Mapping[str, object]) -> None:
    known = inspect.signature(jax.distributed.initialize).parameters
    names = [n for n in known if n.startswith("mtls_") or n == "verify_secure_credentials"]
    unknown = sorted(set(mtls) - set(names))
    if unknown:
        raise TypeError(
            message(
                "initialize needs options that it or JAX has",
                got=", ".join(unknown),
                why=f"JAX {jax.__version__} has {', '.join(names) or 'no options for mTLS'}",
                fix="leave it out, or install a JAX that has it",
            )
        )


def _require_equal(former: Settings, settings: Settings) -> None:
    if settings != former:
        raise ClusterError(
            message(
                "initialize needs equal arguments when it is called again",
                got=former.describe_difference(settings),
                why="a process joins one job, once, for as long as it lives",
                fix="call dj.initialize once, at the start of the program",
            )
        )


def _require_in_time(settings: Settings) -> None:
    first_use = jax_compat.first_use_of_a_backend()
    if jax_compat.coordination_client() is not None:
        got = "jax.distributed.initialize has been called"
        fix = "call dj.initialize in place of jax.distributed.initialize, with the same arguments"
    elif first_use is not None:
        got = f"a backend that is in use since {first_use}"
        fix = "call dj.initialize first: before jax.devices(), arrays and strategies"
    else:
        return
    raise ClusterError(
        message(
            f"initialize of process {settings.process_id} needs to come before JAX is used",
            got=got,
            why="the devices of a process become part of a job when its backend starts",
            fix=fix,
        )
    )
