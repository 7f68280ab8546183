"""Parameter servers: variables at servers, and workers that do not wait for each other."""

from distjax.servers.engine import Engine, Ran, Task, WorkerDied
from distjax.servers.store import ServerDied
from distjax.servers.threads import ThreadEngine

__all__ = ["Engine", "Ran", "ServerDied", "Task", "ThreadEngine", "WorkerDied"]
