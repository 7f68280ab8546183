"""Finds wrong reductions in traced steps: a layer on `replica/hooks.py`, installed on import."""

from distjax.lint.layer import Lint
from distjax.replica.hooks import install

install(Lint())
