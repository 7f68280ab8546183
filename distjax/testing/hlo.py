"""Counts the collectives of a compiled program, for tests."""

from distjax._src.diagnostics.collectives import (
    KINDS,
    CollectiveCount,
    count_by_axis,
    count_collectives,
    type_bytes,
)

__all__ = ["KINDS", "CollectiveCount", "count_by_axis", "count_collectives", "type_bytes"]
