"""For tests: the reference interpreter, and counts of collectives in HLO text."""

from distjax.testing.reference import ReferenceStrategy

__all__ = ["ReferenceStrategy"]
