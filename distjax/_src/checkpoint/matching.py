"""What a key of a checkpoint holds (form, shape, dtype), and which saved key goes where."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from distjax._src import jax_compat
from distjax._src.typing import DTypeLike, PyTree
from distjax._src.variables.conversion import dtype_rank
from distjax.errors import CheckpointError, message, require

#: How many keys of each kind of mismatch an error lists.
_MAX_LISTED = 50

#: Python number types in widening order; text converts to nothing else.
NUMBER_TYPES: dict[str, type] = {t.__name__: t for t in (bool, int, float, complex, str)}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Form, shape and dtype of the value at one key.

    Attributes:
      form: "array", "number" (a Python number or text) or "state" (of an iterator).
      shape: the shape of one value.
      dtype: its dtype, "key<impl>" for PRNG keys; the type name for a number.
      num_replicas: R of a PerReplica, else None.
    """

    form: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_replicas: int | None = None

    def __str__(self) -> str:
        if self.form == "state":
            return "the state of an iterator"
        if self.form == "number":
            return f"a Python {self.dtype}"
        one = f"{self.dtype}{list(self.shape)}"
        return (
            one if self.num_replicas is None else f"{one} on each of {self.num_replicas} replicas"
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array: [R, ...] for a PerReplica."""
        return self.shape if self.num_replicas is None else (self.num_replicas, *self.shape)

    @property
    def is_key(self) -> bool:
        """Whether the values are PRNG keys."""
        return self.form == "array" and self.dtype.startswith("key<")

    @property
    def key_impl(self) -> str:
        """The implementation of PRNG keys."""
        return self.dtype.removeprefix("key<").removesuffix(">")

    @property
    def is_stored_as_array(self) -> bool:
        """Whether orbax writes an array for it; an empty one needs none."""
        return self.form == "array" and 0 not in self.stored_shape

    @property
    def is_in_jax(self) -> bool:
        """Whether JAX has the dtype; 64-bit values wrap around without jax_enable_x64."""
        return self.is_key or jax.dtypes.canonicalize_dtype(self.dtype) == jnp.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as JSON."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Spec:
        """Returns the spec that `to_json` was called on."""
        return Spec(saved["form"], tuple(saved["shape"]), saved["dtype"], saved["num_replicas"])


def array_spec(value: PyTree, num_replicas: int | None = None) -> Spec:
    """Returns the spec of an array, or of [R, ...] if `num_replicas` is given."""
    shape = tuple(value.shape) if num_replicas is None else tuple(value.shape[1:])
    return Spec("array", shape, dtype_name(value.dtype), num_replicas)


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the name of a dtype, including the implementation of PRNG keys."""
    if jax_compat.is_key_dtype(dtype):
        return f"key<{jax_compat.key_impl(dtype)}>"
    return jnp.dtype(dtype).name


def fits(saved: Spec, wanted: Spec) -> bool:
    """Returns whether a saved value can be restored to a place of spec `wanted`.

    A Python number and a scalar array are interchangeable (a step counter starts
    as one and becomes the other). A conversion that loses information, such as
    float to int, does not fit.
    """
    if "state" in (saved.form, wanted.form):
        return saved.form == wanted.form
    if (saved.shape, saved.num_replicas) != (wanted.shape, wanted.num_replicas):
        return False
    if saved.dtype == wanted.dtype:
        return True
    before, after = _rank(saved), _rank(wanted)
    return before is not None and after is not None and before <= after


def _rank(spec: Spec) -> int | None:
    if spec.is_key or spec.dtype == "str":
        return None
    dtype = NUMBER_TYPES[spec.dtype] if spec.form == "number" else jnp.dtype(spec.dtype)
    return dtype_rank(jax.dtypes.canonicalize_dtype(dtype))


def match_keys(
    wanted: Mapping[str, Spec],
    saved: Mapping[str, Spec],
    names: Mapping[str, str],
    *,
    partial: bool,
    where: str,
) -> dict[str, str]:
    """Returns the saved key for each key of the tree that is to be restored; or raises.

    `names` leads from names in the tree to saved keys: see `rename_keys`. If it is `partial`, keys
    that only one of them has are ignored.
    """
    both = {key: names[key] for key in wanted if key in names}
    of_one = {
        "missing": [f"{key}: {spec}" for key, spec in wanted.items() if key not in names],
        "extra": [f"{key}: {saved[old]}" for key, old in names.items() if key not in wanted],
    }
    of_both = [
        f"{key}: {saved[old]} in the checkpoint, {wanted[key]} in the tree"
        for key, old in both.items()
        if not fits(saved[old], wanted[key])
    ]
    wrong = {**({} if partial else of_one), "different": of_both}
    if any(wrong.values()):
        raise CheckpointError(_difference_text(wrong, where))
    if partial and wanted and saved and not both:
        raise CheckpointError(_nothing_text(wanted, names, where))
    return both


def rename_keys(saved: Iterable[str], rename: Mapping[str, str], where: str) -> dict[str, str]:
    """Returns the saved keys by their names in the tree; or raises.

    `rename` leads from keys of the checkpoint, or prefixes of keys up to a "/", to their names in
    the tree; the longest match wins.
    """
    names: dict[str, str] = {}
    used: set[str] = set()
    for key in saved:
        fitting = [old for old in rename if key == old or key.startswith(f"{old}/")]
        old = max(fitting, key=len, default=None)
        used.update(fitting)
        new = key if old is None else rename[old] + key[len(old) :]
        if new in names:
            raise CheckpointError(
                f"rename needs to leave one value at {new!r} of {where}",
                got=f"{names[new]!r} and {key!r}, both called so",
                why="one place in the tree takes one value",
                fix=f"rename one of them to another key: rename={{{key!r}: 'unused'}} with "
                "partial=True",
            )
        names[new] = key
    unused = sorted(set(rename) - used)
    require(
        not unused,
        f"rename needs keys of {where}",
        got=f"{', '.join(unused)}, which it does not hold",
        why="rename={old: new} goes from the checkpoint's keys to the tree's; a key is a "
        'path joined by "/", or the beginning of one',
        fix=f"one of: {_list_keys(sorted(saved))}",
        error=CheckpointError,
    )
    return names


def _difference_text(wrong: Mapping[str, list[str]], where: str) -> str:
    lines = [
        f"\n    {len(keys)} {kind}:\n      {_list_keys(keys, chr(10) + ' ' * 6)}"
        for kind, keys in wrong.items()
        if keys
    ]
    return message(
        f"{where} needs to hold what the tree has, key by key",
        got="keys missing in the checkpoint, extra in it, or different:" + "".join(lines),
        why="leaving out or reshaping a value silently would hide an error. "
        "Nothing has been changed",
        fix="restore(tree, partial=True) leaves missing and extra keys alone, "
        "restore(tree, rename={'old': 'new'}) moves keys; shapes have to be those that were saved",
    )


def _nothing_text(wanted: Iterable[str], names: Iterable[str], where: str) -> str:
    return message(
        f"a partial restore needs a key that both the tree and {where} have",
        got=f"{_list_keys(sorted(wanted))} in the tree; {_list_keys(sorted(names))} in the "
        "checkpoint",
        why="nothing would be restored, silently",
        fix="give the tree the structure that was saved, or restore(tree, partial=True, "
        "rename={'old': 'new'})",
    )


def _list_keys(keys: list[str], separator: str = ", ") -> str:
    more = len(keys) - _MAX_LISTED
    shown = keys[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return separator.join(shown)
