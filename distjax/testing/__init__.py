"""For tests: whether numbers depend on the number of replicas, and the reference interpreter."""

from distjax._src.check.check import assert_replica_invariant
from distjax._src.testing.reference import ReferenceStrategy

__all__ = ["ReferenceStrategy", "assert_replica_invariant"]
