"""Locality: how and where a value lives."""

from __future__ import annotations

import dataclasses

from jax.sharding import Sharding

PER_REPLICA = "per_replica"
MIRRORED = "mirrored"
PARTITIONED = "partitioned"
HOST = "host"
UNPLACED = "unplaced"


def is_host_memory(sharding: Sharding | None) -> bool:
    """Returns whether arrays with `sharding` live in host rather than device memory."""
    kind = None if sharding is None else sharding.memory_kind
    return kind not in (None, "device", "unpinned_host")


@dataclasses.dataclass(frozen=True)
class Locality:
    """How a value lives (`kind`) and on which devices (`sharding`).

    Two localities are equal when the values live in the same way on the same
    devices, so ``locality(slot) == locality(variable)`` states V(variable).

    Attributes:
      kind: "per_replica" (each replica has its own value), "mirrored" (one value, held by
        all), "partitioned" (split over the replicas), "host" (in host memory) or
        "unplaced" (NumPy arrays, Python numbers, arrays on other devices).
      sharding: the JAX sharding; None for "unplaced".

    Source: locality T, M, V(v) and N of tf.distribute.StrategyExtended,
      "Lower-level concepts" (TF 1.13).
    """

    kind: str
    sharding: Sharding | None = None

    def __repr__(self) -> str:
        if self.sharding is None:
            return f"Locality({self.kind})"
        devices = sorted(self.sharding.device_set, key=lambda d: d.id)
        place = str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"
        return f"Locality({self.kind} on {place})"
