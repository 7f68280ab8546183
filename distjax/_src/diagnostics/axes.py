"""Over which axes of the mesh a collective runs, from the groups of devices that it names.

XLA and StableHLO spell these groups in five ways; a device is numbered by its place in the mesh.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import numpy as np

_NUMBERS = r"[\d, ]*"
_LISTED = re.compile(rf"[\[{{]({_NUMBERS})[\]}}]")
_IOTA = re.compile(rf"^\[(\d+),(\d+)\]<=\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?")
_MESH = re.compile(
    r"^mesh\[([^\]]*)\]"
    rf"(?:, device_ids=\(\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?\))? \{{([^}}]*)\}}"
)
_AXES = re.compile(r"replica_group_mesh_axes<.*?axes = \[(.*?)\]>", re.DOTALL)


def axes_of(groups: str, sizes: Mapping[str, int]) -> str:
    """Returns the axes that groups of devices run over: "model", "replica, model", or "".

    Groups that are parts of those of an axis are "part of replica".

    Args:
      groups: as spelled after "replica_groups=", to the end of the line or further.
      sizes: name -> size of the axes of the mesh, in order; empty: not known.
    """
    named = _AXES.search(groups)
    if not sizes or (named and "sub_axis" not in named[1]):
        return ", ".join(re.findall(r'name = "([^"]*)"', named[1])) if sizes and named else ""
    found = groups_of(groups, int(np.prod([*sizes.values()])))
    if found is None:
        return ""
    names = [name for name, size in sizes.items() if size > 1]
    choices = [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
    for chosen in choices:
        if found == _groups_over(chosen, sizes):
            return ", ".join(chosen)
    for chosen in choices:
        whole = _groups_over(chosen, sizes)
        if all(any(group <= other for other in whole) for group in found):
            return f"part of {', '.join(chosen)}"
    return ""


def groups_of(text: str, count: int) -> set[frozenset[int]] | None:
    """Returns the groups of `count` devices, as in `axes_of`; None: not understood."""
    text = text.strip()
    if text.startswith("{}"):
        return {frozenset(range(count))}
    if found := _IOTA.match(text):
        ids = _iota(found[3], found[4])
        return _rows(ids.reshape(int(found[1]), int(found[2])))
    if found := _MESH.match(text):
        sizes = {k.strip("' "): int(n) for k, n in (x.split("=") for x in found[1].split(","))}
        wanted = [name.strip("' ") for name in found[4].split(",")]
        if any(name not in sizes for name in wanted):  # parts of an axis
            return None
        ids = _iota(found[2], found[3]) if found[2] else np.arange(count)
        return _along(ids.reshape([*sizes.values()]), [list(sizes).index(n) for n in wanted])
    text = text.removeprefix("dense<").partition(">")[0].partition("}}")[0]
    listed = [_integers(own) for own in _LISTED.findall(text + "}")]
    return {frozenset(own) for own in listed if own} or None


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(int(np.prod(_integers(dims)))).reshape(_integers(dims))
    return ids.transpose(_integers(order)) if order else ids


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _groups_over(names: Iterable[str], sizes: Mapping[str, int]) -> set[frozenset[int]]:
    ids = np.arange(int(np.prod([*sizes.values()]))).reshape([*sizes.values()])
    return _along(ids, [list(sizes).index(name) for name in names])


def _along(ids: np.ndarray, axes: list[int]) -> set[frozenset[int]]:
    moved = np.moveaxis(ids, axes, range(ids.ndim - len(axes), ids.ndim))
    return _rows(moved.reshape(-1, int(np.prod([ids.shape[a] for a in axes], dtype=int))))


def _rows(ids: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(map(int, row)) for row in ids}
