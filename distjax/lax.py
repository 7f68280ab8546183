"""JAX's control flow, in whose bodies variables may be written and `merge_call` called."""

from distjax._src.replica.lax import cond, fori_loop, scan, switch, while_loop

__all__ = ["cond", "fori_loop", "scan", "switch", "while_loop"]
