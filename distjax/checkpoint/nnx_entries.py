"""Entries of Flax NNX objects: a value per variable, named by its path in the object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from distjax.checkpoint.entries import Entry, leaf_entry


def variables_in(name: str, value: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Yields each variable of an NNX object once, with its name."""
    if isinstance(value, nnx.Variable):
        yield name, value
        return
    for path, node in nnx.iter_graph(value):
        if isinstance(node, nnx.Variable):
            yield "/".join((name, *map(str, path))), node


def entry_of(key: str, variable: nnx.Variable) -> Entry:
    """Returns the entry of a variable, restored in place."""

    def replace(value: Any) -> nnx.Variable:
        variable.set_raw_value(value)
        return variable

    return leaf_entry(key, variable.get_raw_value(), replace)
