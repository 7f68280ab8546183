"""strategy.describe(): devices, replicas, and each variable's place and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from distjax.objects.stateful import active_bridge
from distjax.strategies.contracts import ExtendedContract
from distjax.tables import Table, as_html, as_text, format_bytes
from distjax.variables.description import VariableDescription, describe_variable


@dataclasses.dataclass(frozen=True)
class StrategyDescription:
    """A snapshot of a strategy; ``print`` it or show it in a notebook.

    Attributes:
      strategy: the strategy's repr.
      num_replicas: R.
      devices: its devices, replica by replica.
      devices_per_replica: how many of them each replica owns; 0 where all replicas
        share one device.
      variables: its live variables in order of creation, then those in Flax NNX
        objects placed for it, by name.
      workers: under `ParameterServerStrategy`, the devices of each worker, which has
        `num_replicas` replicas of its own; `devices` lists them all. On Ray, where each
        process has devices of its own, only their numbers are known.
    """

    strategy: str
    num_replicas: int
    devices: tuple[str, ...]
    devices_per_replica: int
    variables: tuple[VariableDescription, ...]
    workers: tuple[tuple[str, ...], ...] = ()

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all variables in the memory of each device."""
        return sum(v.bytes_per_device for v in self.variables)

    @property
    def host_bytes(self) -> int:
        """Bytes of all variables in host memory."""
        return sum(v.host_bytes for v in self.variables)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    def _repr_html_(self) -> str:
        return as_html(list(self._tables()))

    def _tables(self) -> Iterator[Table]:
        count = self.devices_per_replica
        share = {0: "shared by all replicas", 1: "one for each replica"}
        share = share.get(count, f"{count} for each replica")
        places = [("devices", self.devices)]
        if self.workers:
            places = [(f"devices of worker {i}", own) for i, own in enumerate(self.workers)]
        facts = (
            ("replicas of each worker" if self.workers else "replicas", str(self.num_replicas)),
            *((where, f"{len(own)}, {share}: {', '.join(own)}") for where, own in places),
            ("variables", str(len(self.variables))),
            ("bytes per device", format_bytes(self.bytes_per_device)),
        )
        if self.host_bytes:
            facts += (("bytes in host memory", format_bytes(self.host_bytes)),)
        yield Table(self.strategy, (), facts)
        if self.variables:
            yield self._variable_table()

    def _variable_table(self) -> Table:
        header = ("name", "shape", "dtype", "synchronization", "aggregation", "placement")
        rows = [
            (v.name, str(list(v.shape)), v.dtype, v.synchronization, v.aggregation, v.placement)
            for v in self.variables
        ]
        columns = [("bytes per device", [v.bytes_per_device for v in self.variables])]
        if self.host_bytes:
            columns.append(("bytes on host", [v.host_bytes for v in self.variables]))
        for name, counts in columns:
            header = (*header, name)
            cells = [format_bytes(count) for count in counts]
            rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
        return Table("variables:", header, tuple(rows))


def describe(
    extended: ExtendedContract, variables: Sequence[VariableDescription] | None = None
) -> StrategyDescription:
    """Returns the description of a strategy: see `Strategy.describe`.

    Args:
      extended: that of the strategy.
      variables: the descriptions of its variables; None: made from `extended.variables`.
    """
    topology = extended.topology
    if variables is None:
        living = sorted(extended.variables, key=lambda v: v.serial_number)
        variables = [describe_variable(v) for v in living if v.storage is not None]
    bridge = active_bridge()
    of_objects = bridge.describe(extended.strategy) if bridge is not None else ()
    shared = topology.mesh is None and topology.num_replicas > 1
    return StrategyDescription(
        strategy=repr(extended.strategy),
        num_replicas=topology.num_replicas,
        devices=tuple(map(str, topology.devices)),
        devices_per_replica=0 if shared else len(topology.devices) // topology.num_replicas,
        variables=(*variables, *of_objects),
    )
