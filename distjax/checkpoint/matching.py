"""Decides which saved key goes where in a tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distjax.checkpoint.specs import Spec, fits
from distjax.errors import CheckpointError, message

#: How many keys of each kind of mismatch an error lists.
_MAX_LISTED = 50


def match_keys(
    wanted: Mapping[str, Spec],
    saved: Mapping[str, Spec],
    names: Mapping[str, str],
    *,
    partial: bool,
    where: str,
) -> dict[str, str]:
    """Returns the saved key for each key of the tree that is to be restored.

    Args:
      wanted: the specs of the tree, by key.
      saved: the specs of the checkpoint, by key.
      names: maps names in the tree to saved keys: see `rename_keys`.
      partial: whether to ignore keys that only one of them has.
      where: the checkpoint, for error texts.

    Raises:
      CheckpointError: the keys differ, or a value does not fit.
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
    """Returns the saved keys by their names in the tree.

    Args:
      saved: the keys of the checkpoint.
      rename: maps keys of the checkpoint, or prefixes of keys up to a "/", to their
        names in the tree; the longest match wins.
      where: the checkpoint, for error texts.

    Raises:
      CheckpointError: a rename that matches nothing, or two keys with one name.
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
                message(
                    f"rename needs to leave one value at {new!r} of {where}",
                    got=f"{names[new]!r} and {key!r}, both called so",
                    why="one place in the tree takes one value",
                    fix=f"rename one of them to another key: rename={{{key!r}: 'unused'}} with "
                    "partial=True",
                )
            )
        names[new] = key
    unused = sorted(set(rename) - used)
    if unused:
        raise CheckpointError(
            message(
                f"rename needs keys of {where}",
                got=f"{', '.join(unused)}, which it does not hold",
                why="rename={old: new} goes from the checkpoint's keys to the tree's; a key is a "
                'path joined by "/", or the beginning of one',
                fix=f"one of: {_list_keys(sorted(saved))}",
            )
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
        why="a value that is left out, or cut to another shape, would be a silent error. Nothing "
        "has been changed",
        fix="restore(tree, partial=True) leaves missing and extra keys alone, "
        "restore(tree, rename={'old': 'new'}) moves keys; shapes have to be those that were saved",
    )


def _nothing_text(wanted: Iterable[str], names: Iterable[str], where: str) -> str:
    return message(
        f"a partial restore needs a key that both the tree and {where} have",
        got=f"{_list_keys(sorted(wanted))} in the tree; {_list_keys(sorted(names))} in the "
        "checkpoint",
        why="nothing would be restored, and nothing would say so",
        fix="give the tree the structure that was saved, or restore(tree, partial=True, "
        "rename={'old': 'new'})",
    )


def _list_keys(keys: list[str], separator: str = ", ") -> str:
    more = len(keys) - _MAX_LISTED
    shown = keys[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return separator.join(shown)
