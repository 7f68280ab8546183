"""JAX's control flow in which variables may be written and `merge_call` may stand."""

from distjax._src.replica.lax import cond, fori_loop, scan, switch, while_loop

__all__ = ["cond", "fori_loop", "scan", "switch", "while_loop"]
