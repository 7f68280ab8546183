"""Parameter servers: variables on servers, and workers that run asynchronously."""

from distjax.servers.coordinator import Coordinator, RemoteValue, Snapshot
from distjax.servers.engine import Engine, Ran, Task, ThreadEngine, WorkerDied
from distjax.servers.on_ray.engine import RayEngine
from distjax.servers.per_worker import (
    Elements,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from distjax.servers.server import ParameterServer, Report, Server, ServerDied, ServerSnapshot
from distjax.servers.strategy import ParameterServerStrategy

__all__ = [
    "Coordinator",
    "Elements",
    "Engine",
    "ParameterServer",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "Ran",
    "RayEngine",
    "RemoteValue",
    "Report",
    "Server",
    "ServerDied",
    "ServerSnapshot",
    "Snapshot",
    "Task",
    "ThreadEngine",
    "WorkerDied",
]
