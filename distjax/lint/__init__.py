"""Finds wrong reductions in traced steps: a layer on `hooks.py`, installed on import."""

from distjax.hooks import install
from distjax.lint.layer import Lint

install(Lint())
