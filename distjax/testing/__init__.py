"""For tests: the reference interpreter, and counts of collectives in HLO text."""

from distjax._src.testing.reference import ReferenceStrategy

__all__ = ["ReferenceStrategy"]
