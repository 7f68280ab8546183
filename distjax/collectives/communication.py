"""How reductions travel: packed, compressed, in one or two levels."""

from __future__ import annotations

import dataclasses
import enum

from distjax.errors import describe_value, message
from distjax.integers import is_int


class CommunicationImplementation(enum.Enum):
    """Which library carries collectives. XLA chooses: the value is kept, not used.

    Source: tf.distribute.experimental.CommunicationImplementation.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How `reduce_to`, `batch_reduce_to` and optimizers reduce over the replicas.

    Attributes:
      bytes_per_pack: tensors of one dtype are joined into packs of up to this many
        bytes, one collective per pack; 0 leaves it to XLA.
      compress: None, or "bfloat16": values travel in bfloat16 and are summed in
        float32, half the bytes at the precision of bfloat16.
      devices_per_host: in two levels: a reduce-scatter among neighbours of this
        many replicas, an all-reduce across hosts, an all-gather among neighbours;
        0 or 1: one level.
      timeout_seconds: kept for tf.distribute code; XLA has no such bound.
      implementation: a CommunicationImplementation or its name; kept, not used.

    Raises:
      ValueError: a negative size or an unknown name; from the strategy, if
        `devices_per_host` does not divide its replicas.

    Source: tf.distribute.experimental.CommunicationOptions.
    """

    bytes_per_pack: int = 0
    compress: str | None = None
    devices_per_host: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        for name in ("bytes_per_pack", "devices_per_host"):
            value = getattr(self, name)
            if not is_int(value) or value < 0:
                raise ValueError(_text(name, "an int, 0 or more", value))
        if self.compress not in (None, "bfloat16"):
            raise ValueError(_text("compress", "None or 'bfloat16'", self.compress))
        name = str(getattr(self.implementation, "name", self.implementation)).upper()
        if name not in CommunicationImplementation.__members__:
            known = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(_text("implementation", f"one of {known}", self.implementation))
        object.__setattr__(self, "implementation", CommunicationImplementation[name])

    def require_equal_hosts(self, num_replicas: int) -> None:
        """Raises a ValueError if hosts of `devices_per_host` leave some replicas over."""
        inside = self.devices_per_host
        if not 1 < inside < num_replicas or num_replicas % inside == 0:
            return
        raise ValueError(
            message(
                f"CommunicationOptions: devices_per_host needs to divide the {num_replicas} "
                "replicas",
                got=f"{inside}, which leaves {num_replicas % inside} over",
                why="a reduction in two levels has as many replicas on each host",
                fix="dj.CommunicationOptions(devices_per_host=0), one level; or the number of "
                "devices of one host",
            )
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options with the non-default fields of `options` in place."""
        if options is None:
            return self
        changed = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(self)
            if getattr(options, field.name) != field.default
        }
        return dataclasses.replace(self, **changed)


#: One collective per array, as XLA carries it.
DEFAULT_OPTIONS = CommunicationOptions()


def as_communication_options(options: object) -> CommunicationOptions:
    """Returns `options`, or the default ones for None; raises a TypeError for anything else."""
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
        why="it says how reductions travel",
        fix="dj.CommunicationOptions(bytes_per_pack=4 * 2**20, compress='bfloat16')",
    )
