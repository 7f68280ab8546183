"""The names of older API versions: tower (1.12), early replica (1.13), late replica (1.15).

Each module is an API version: its free functions, and adapters of a strategy and of a
replica context with its names. They only adapt names and arguments; what
it and distjax name alike is distjax's own.
"""

from distjax.compat import v1_12, v1_13, v1_15

__all__ = ["v1_12", "v1_13", "v1_15"]
