"""What differs between a step's run for R replicas and for one.

New state is compared by how much it changes, since a step changes parameters by little. A value
per replica that is no state may be joined (rows), averaged or summed by the user afterwards: it is
well if any of these gives the value of the one replica.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.check.replay import grown_axis
from distjax._src.check.runs import Run, Value
from distjax._src.context import without_expectations
from distjax._src.placement import PerReplica, is_per_replica
from distjax._src.typing import PyTree

#: How state differs that is no longer equal on all replicas.
APART = "is another value on each replica"
#: Of a change of state, and of a result: how much is rounding.
STATE_TOLERANCE, RESULT_TOLERANCE = 1e-3, 2e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """A value of R replicas that is not that of one.

    Attributes:
      key: what identifies the value in both runs.
      value: that of R replicas.
      what: how it differs.
      factor: how many times as large it is, or its change; NaN: no such number.
    """

    key: Any
    value: Value
    what: str
    factor: float = float("nan")


class Comparison:
    """Compares runs of one step.

    Args:
      args: the step's arguments, in order.
      stacks: whether results are stacked, as those of `dj.pmap` are.
      tolerance: how much of a change of state, or of a result, is rounding; None: see above.
    """

    def __init__(self, args: Sequence[PyTree], tolerance: float | None, *, stacks: bool = False):
        self._meant: dict[int, tuple[Any, str]] = {}  # what `dj.expect` allows to differ
        self._args, _ = without_expectations(tuple(args), {}, self._meant)
        lone = map(numbers, filter(_is_lone_number, self._args))
        self._numbers = [x for x in lone if jnp.issubdtype(x.dtype, jnp.floating)]
        self._tolerance, self._stacks = tolerance, stacks

    def differences(self, several: Run, alone: Run) -> list[Difference]:
        """Returns what differs."""
        args = self._args
        if self._stacks:  # as the results are
            stacked = lambda x: x.stacked if isinstance(x, PerReplica) else x
            args = jax.tree.map(stacked, args, is_leaf=is_per_replica)
        before = state_before(args, several.result)
        if self._stacks:
            before = {key: x[0] for key, x in before.items() if np.ndim(x)}
        found = []
        for key, value in several.values.items():
            if value.before is None and key in before:
                value.before = before[key]
            if id(value.before) in self._meant:
                value.tags |= {"dj.expect"}
            found += self._compare(key, value, alone.values.get(key))
        return found

    def _compare(self, key: PyTree, value: Value, other: Value | None) -> Iterator[Difference]:
        if other is None:
            yield Difference(key, value, "is not there with one replica")
            return
        ours, theirs = numbers(value.array), numbers(other.array)
        if self._stacks and ours.ndim and theirs.shape[:1] == (1,):
            value.varying = other.varying = True
        theirs = theirs[0] if other.varying else theirs
        before = None if value.before is None else numbers(value.before)
        dtype = getattr(value.array, "dtype", None)
        is_low = dtype in (jnp.bfloat16, jnp.float16)  # 4 roundings, of the larger of the two
        rounding = 4 * float(jnp.finfo(dtype).eps) if is_low else 0.0
        if not value.varying:
            lone = self._numbers if before is None and ours.ndim == 0 else ()
            for old in (before, *lone):  # one number may be state, too
                factor = self.factor(ours, theirs, old, rounding)
                if factor is not None:
                    yield Difference(key, value, "differs", factor)
                    break
        elif before is not None and before.shape == ours.shape[1:]:  # state
            if any(self.factor(row, ours[0], before, rounding) is not None for row in ours[1:]):
                yield Difference(key, value, APART)
            elif (factor := self.factor(ours[0], theirs, before, rounding)) is not None:
                yield Difference(key, value, "differs", factor)
        else:
            yield from self._compare_parts(key, value, ours, theirs, rounding)

    def _compare_parts(
        self, key: PyTree, value: Value, ours: np.ndarray, theirs: np.ndarray, rounding: float
    ) -> Iterator[Difference]:
        """Compares a value per replica that is no state."""
        if ours.shape[1:] == theirs.shape:
            if ours.dtype == bool:
                return
            wholes = [ours.mean(0), ours.sum(0), *([] if (ours != ours[:1]).any() else [ours[0]])]
            if np.issubdtype(ours.dtype, np.integer):
                wholes.append(ours.max(0))
            factors = [self.factor(whole, theirs, None, rounding) for whole in wholes]
            if None not in factors:
                what = "differs" if len(wholes) > 2 else "has another mean and another sum"
                yield Difference(key, value, what, factors[0] or 1.0)
            return
        axis = joined_axis(ours, theirs)
        if axis is None:
            yield Difference(
                key, value, f"has shape {ours.shape[1:]} on each replica, {theirs.shape} on one"
            )
            return
        factor = self.factor(np.concatenate(list(ours), axis), theirs, None, rounding)
        if factor is not None:
            yield Difference(key, value, "has other rows", factor)

    def factor(
        self, a: np.ndarray, b: np.ndarray, before: np.ndarray | None, rounding: float = 0.0
    ) -> float | None:
        """Returns None if two values are equal up to rounding, else their quotient, or NaN."""
        if a.shape != b.shape:
            return float("nan")
        if not np.issubdtype(a.dtype, np.inexact):
            if (a == b).all():
                return None
            if a.dtype == bool:
                return float("nan")
        a, b = a.astype(float), b.astype(float)
        base = np.zeros_like(a) if before is None or before.shape != a.shape else before
        base = base.astype(float)
        own, other = a - base, b - base
        size = _largest(a)
        scale = max(_largest(own), _largest(other))
        if before is None:
            allowed = max(self._tolerance or RESULT_TOLERANCE, rounding) * scale + 1e-7
        else:
            allowed = max(self._tolerance or STATE_TOLERANCE, rounding) * scale
            allowed += max(1e-6, rounding) * size + 1e-30
        is_off = ~(np.abs(a - b) <= allowed) & ~(np.isnan(a) & np.isnan(b))
        if not is_off.any():
            return None
        # A few entries: an optimizer divides a tiny gradient by its own size.
        if before is not None and is_off.mean() < 0.01 and _rms(a - b) < 0.05 * _rms(other):
            return None
        is_large = np.abs(other) > 20 * max(allowed, 1e-12)
        if is_large.any():
            quotients = own[is_large] / other[is_large]
            if np.ptp(quotients) <= 0.02 * np.abs(quotients).max():
                return float(np.median(quotients))
        return float("nan")


def without_quotients(
    different: Sequence[Difference], several: Run, alone: Run, count: int
) -> list[Difference]:
    """Returns what differs, but for the total and the count of a mean that both are R times larger.

    A metric that every replica tells its own mean counts R means: what is read is their quotient.
    """
    grown: dict[str, set[Any]] = {}
    for key, value in several.values.items():
        other = alone.values.get(key)
        if value.before is None or other is None or value.varying or other.varying:
            continue
        before = numbers(value.before).astype(float)
        own, one = numbers(value.array) - before, numbers(other.array) - before
        if own.ndim == 0 and one != 0 and abs(own / one - count) < 0.01 * count:
            grown.setdefault(_owner_of(value.name), set()).add(key)
    of_means = {key for keys in grown.values() if len(keys) > 1 for key in keys}
    return [d for d in different if d.key not in of_means]


def _owner_of(name: str) -> str:
    """Returns the name of what a variable is a part of: "loss" of "variable 'loss/total'"."""
    return re.split(r"[./](?=[^./]*$)", name)[0]


def numbers(value: PyTree) -> np.ndarray:
    """Returns a value on the host; a PRNG key as its data, low precision as float32."""
    if isinstance(value, PerReplica):
        value = value.stacked[0]
    if jax_compat.is_key_dtype(getattr(value, "dtype", None)):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def largest_change(a: PyTree, b: PyTree) -> float:
    """Returns the largest difference of two values of one form; 0 of what are no numbers."""
    a, b = numbers(a), numbers(b)
    if a.shape != b.shape:
        return float("inf")
    if not np.issubdtype(a.dtype, np.inexact):
        return 0.0
    with np.errstate(invalid="ignore"):  # of two infinities
        return _largest(a - b)


def _largest(x: np.ndarray) -> float:
    """Returns the largest element without its sign, of those that are numbers."""
    return float(np.max(np.abs(np.nan_to_num(x, posinf=0, neginf=0)), initial=0))


def joined_axis(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """Returns the axis along which the replicas' values [R, ...] are parts of one value."""
    return grown_axis(ours.shape[1:], theirs.shape, len(ours)) if ours.ndim else None


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# -- results that are new state ---------------------------------------------------


def state_before(args: Sequence[PyTree], result: PyTree) -> dict[str, Any]:
    """Returns the former values of results that are arguments, updated, by path.

    An argument comes back if the result, or a part of it, has its structure and shapes.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_per_replica)
    found: dict[str, Any] = {}
    taken = set[int]()
    for arg in args:
        leaves, form = jax.tree.flatten(arg, is_leaf=is_per_replica)
        if not leaves or _is_lone_number(arg) or all(isinstance(x, PerReplica) for x in leaves):
            continue
        for start, part in _parts(treedef):
            numbers_of_leaves = range(start, start + part.num_leaves)
            if part != form or not taken.isdisjoint(numbers_of_leaves):
                continue
            own = [pairs[i] for i in numbers_of_leaves]
            if any(_shape(x) != _shape(y) for (_, x), y in zip(own, leaves, strict=True)):
                continue
            taken.update(numbers_of_leaves)
            for (path, _), before in zip(own, leaves, strict=True):
                key = jax.tree_util.keystr(path)
                if hasattr(before, "dtype") and not isinstance(before, PerReplica):
                    found[key] = before
            break
    return found


def _is_lone_number(arg: PyTree) -> bool:
    """Returns whether an argument is one number: that may be state, or a rate."""
    leaves = jax.tree.leaves(arg)
    is_one = len(leaves) == 1 and leaves[0] is arg and np.shape(arg) == ()
    return is_one and not jax_compat.is_key_dtype(getattr(arg, "dtype", None))


def _parts(treedef: jax.tree_util.PyTreeDef, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Yields a tree and its parts, outermost first, each with the number of its first leaf."""
    yield start, treedef
    for child in treedef.children():
        yield from _parts(child, start)
        start += child.num_leaves


def _shape(x: PyTree) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))
