"""Parameter servers: variables at servers, and workers that do not wait for each other."""

from distjax.servers.strategy import ParameterServerStrategy

__all__ = ["ParameterServerStrategy"]
