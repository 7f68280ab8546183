"""How reductions are communicated: packed, compressed, in one or two levels."""

from __future__ import annotations

import dataclasses
import enum

from distjax.errors import describe_value, message
from distjax.integers import require_int

_WHY = "it says how reductions travel"
_FIX = "dj.CommunicationOptions(bytes_per_pack=4 * 2**20, compress='bfloat16')"


class CommunicationImplementation(enum.Enum):
    """Which library carries collectives. XLA chooses; the value is stored but unused.

    Source: tf.distribute.experimental.CommunicationImplementation.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How `reduce_to`, `batch_reduce_to` and optimizers reduce over the replicas.

    Everything else is exact, and travels as it is: `reduce`, `gather`, `broadcast_to`, the
    replica context's `all_reduce`, what variables combine when they are written or read, and the
    results of metrics. Their totals are counts and losses, which bfloat16 would round to two or
    three digits.

    Attributes:
      bytes_per_pack: arrays of one dtype are concatenated into packs of up to this many
        bytes, with one collective per pack; 0 leaves it to XLA.
      compress: None, or "bfloat16": values are sent in bfloat16 and summed in float32,
        which halves the bytes at bfloat16 precision; in two levels, only those across groups.
      devices_per_host: reduce in two levels: a reduce-scatter within groups of this many
        neighboring replicas, an all-reduce across groups, and an all-gather within them;
        0 or 1: one level.
      timeout_seconds: accepted for tf.distribute compatibility; XLA has no such limit.
      implementation: a CommunicationImplementation or its name; stored but unused.

    Raises:
      ValueError: a negative size or an unknown name; also raised by the strategy if
        `devices_per_host` does not divide its number of replicas.

    Source: tf.distribute.experimental.CommunicationOptions.
    """

    bytes_per_pack: int = 0
    compress: str | None = None
    devices_per_host: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        for name in ("bytes_per_pack", "devices_per_host"):
            what, value = f"CommunicationOptions: {name}", getattr(self, name)
            require_int(what, value, 0, why=_WHY, fix=_FIX)
        if self.compress not in (None, "bfloat16"):
            raise ValueError(_text("compress", "None or 'bfloat16'", self.compress))
        name = str(getattr(self.implementation, "name", self.implementation)).upper()
        if name not in CommunicationImplementation.__members__:
            known = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(_text("implementation", f"one of {known}", self.implementation))
        object.__setattr__(self, "implementation", CommunicationImplementation[name])

    def require_equal_hosts(self, num_replicas: int) -> None:
        """Raises a ValueError if `devices_per_host` does not divide the replicas evenly."""
        inside = self.devices_per_host
        if not 1 < inside < num_replicas or num_replicas % inside == 0:
            return
        raise ValueError(
            message(
                f"CommunicationOptions: devices_per_host needs to divide the {num_replicas} "
                "replicas",
                got=f"{inside}, which leaves {num_replicas % inside} over",
                why="a reduction in two levels needs the same number of replicas on every host",
                fix="dj.CommunicationOptions(devices_per_host=0), one level; or the number of "
                "devices of one host",
            )
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options, overridden by the non-default fields of `options`."""
        if options is None:
            return self
        changed = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(self)
            if getattr(options, field.name) != field.default
        }
        return dataclasses.replace(self, **changed)


#: One collective per array, as XLA does by default.
DEFAULT_OPTIONS = CommunicationOptions()


def as_communication_options(options: object) -> CommunicationOptions:
    """Returns `options`, the defaults for None, or raises a TypeError."""
    if options is None or isinstance(options, CommunicationOptions):
        return options or DEFAULT_OPTIONS
    raise TypeError(
        message(
            "communication needs a dj.CommunicationOptions, or None",
            got=describe_value(options),
            why="the options are checked together, where they are written",
            fix="communication=dj.CommunicationOptions(bytes_per_pack=4 * 2**20)",
        )
    )


def _text(name: str, expected: str, value: object) -> str:
    return message(
        f"CommunicationOptions: {name} needs {expected}",
        got=describe_value(value),
        why=_WHY,
        fix=_FIX,
    )
