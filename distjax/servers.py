"""Parameter servers: variables on servers, and workers that run asynchronously."""

from distjax._src.servers.coordinator import (
    Coordinator,
    ParameterServerStrategy,
    RemoteValue,
    Snapshot,
)
from distjax._src.servers.engine import Engine, Ran, Task, ThreadEngine, WorkerDied
from distjax._src.servers.on_ray.engine import RayEngine
from distjax._src.servers.per_worker import (
    Elements,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from distjax._src.servers.server import ParameterServer, Report, Server, ServerDied, ServerSnapshot

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
