"""Checkpoints on orbax: saved under one strategy, restored under another."""

try:
    import orbax.checkpoint as _orbax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "distjax.checkpoint needs orbax-checkpoint: pip install 'distjax[checkpoint]'"
    ) from error

from distjax.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
