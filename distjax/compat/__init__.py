"""The names of older APIs: towers (TF 1.12), and replicas as in TF 1.13 and in TF 1.15.

Each module covers one version: its free functions, and adapters that give a strategy and a
replica context the names of that version. They change only names and the form of arguments; names
that the version shares with distjax are distjax's own.
"""

from distjax.compat import v1_12, v1_13, v1_15

__all__ = ["v1_12", "v1_13", "v1_15"]
