"""Benchmarks of distjax against hand-written JAX; see `README.md`."""
