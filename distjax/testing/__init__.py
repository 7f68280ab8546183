"""For tests: steps whose numbers do not depend on R, the reference interpreter, HLO's collectives."""

from distjax._src.check.check import assert_replica_invariant
from distjax._src.testing.reference import ReferenceStrategy

__all__ = ["ReferenceStrategy", "assert_replica_invariant"]
