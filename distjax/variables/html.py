"""The notebook view of a variable."""

from __future__ import annotations

import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.tables import Table, as_html, format_bytes
from distjax.variables.storage import hand_out
from distjax.variables.stored_variable import StoredVariable
from distjax.variables.variable_description import describe_variable


def variable_html(variable: StoredVariable) -> str:
    """Returns a table of the variable's properties, placement and values."""
    if variable.storage is None or frames.current().state is not None:
        return as_html([Table(repr(variable))])
    described = describe_variable(variable)
    size = described.host_bytes or described.bytes_per_device
    facts = (
        ("lives", f"{described.placement}, {variable.strategy!r}"),
        ("bytes on host" if described.host_bytes else "bytes per device", format_bytes(size)),
        ("synchronization", described.synchronization),
        ("aggregation", described.aggregation),
        ("trainable", str(described.trainable)),
    )
    caption = f"Variable {variable.name!r} {described.dtype}{list(variable.shape)}"
    return as_html([Table(caption, (), facts + tuple(_values(variable)))])


def _values(variable: StoredVariable) -> list[tuple[str, str]]:
    value = variable.layout.from_stored(hand_out(variable.stored), variable.shape)
    if jax_compat.is_key_dtype(value.dtype) or not value.is_fully_addressable:
        return []
    host = np.asarray(value)
    with np.printoptions(threshold=20, edgeitems=3, precision=4):
        if variable.policy.stacked:
            return [(f"replica {r}", str(component)) for r, component in enumerate(host)]
        return [("value", str(host))]
