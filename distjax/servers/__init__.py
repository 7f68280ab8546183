"""Parameter servers: variables on servers, and workers that run asynchronously."""

from distjax.servers.calls import RemoteValue
from distjax.servers.coordinator import Coordinator, Snapshot
from distjax.servers.elements import Elements
from distjax.servers.engine import Engine, Ran, Task, WorkerDied
from distjax.servers.on_ray.engine import RayEngine
from distjax.servers.per_worker import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from distjax.servers.server import ParameterServer, Report, Server, ServerDied, ServerSnapshot
from distjax.servers.strategy import ParameterServerStrategy
from distjax.servers.threads import ThreadEngine

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
