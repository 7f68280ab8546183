"""The names of older APIs: tower (1.12), early (1.13) and late (1.15) replica.

Each module covers one API version: its free functions, and adapters that give a strategy
and a replica context its names. They adapt only names and arguments; names shared with
distjax are distjax's own.
"""

from distjax.compat import v1_12, v1_13, v1_15

__all__ = ["v1_12", "v1_13", "v1_15"]
