"""Finds wrong reductions in traced steps: a layer on `hooks.py`, which registers on import."""

from distjax.lint import layer as layer
