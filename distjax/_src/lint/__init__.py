"""Finds wrong reductions in traced steps: a layer on `hooks.py`, which registers on import."""

from distjax._src.lint import layer as layer
