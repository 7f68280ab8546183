"""The devices of all processes of a job, in the order in which replicas lie on them."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distjax import jax_compat
from distjax.errors import message
from distjax.placement.topology import devices_or_all


def devices_of_job(devices: Sequence[jax.Device] | None, strategy: str) -> Sequence[jax.Device]:
    """Returns `devices`; all of the job for None and for an empty sequence.

    Args:
      devices: what the user gave.
      strategy: the name of the strategy, for errors.

    Raises:
      ValueError: no sequence, or a process of the job that has none of the devices.
    """
    if devices is None or (hasattr(devices, "__len__") and not len(devices)):
        return jax.devices()
    given = devices_or_all(devices)
    if all(isinstance(d, jax.Device) for d in given) and not jax_compat.only_compiles(given):
        _require_every_process(given, strategy)
    return given


def _require_every_process(devices: Sequence[jax.Device], strategy: str) -> None:
    present = {device.process_index for device in devices}
    missing = sorted(set(range(jax.process_count())) - present)
    if missing and len(devices):
        raise ValueError(
            message(
                f"{strategy}: devices needs devices of each of the {jax.process_count()} processes",
                got=f"{len(devices)} devices, none of process {', '.join(map(str, missing))}",
                why="every process launches the program, and one without a device cannot",
                fix=f"dj.{strategy}(), or devices=[d for d in jax.devices() if ...] with some of "
                "each process; on this process alone: dj.MirroredStrategy(jax.local_devices())",
            )
        )
