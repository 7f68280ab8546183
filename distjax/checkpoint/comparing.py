"""Whether a checkpoint fits a tree: all that does not, in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distjax.checkpoint.entries import Entry, Spec
from distjax.errors import CheckpointError, explain

#: So many names of a kind are listed, the rest counted.
_MAX_LISTED = 10


def require_fit(
    where: str,
    saved: Mapping[str, Spec | None],
    wanted: Sequence[Entry],
    *,
    partial: bool,
) -> list[Entry]:
    """Returns the entries to restore.

    Args:
      where: the checkpoint, for the message.
      saved: what the checkpoint holds, by the names of today; None for an object.
      wanted: the entries of the user's tree.
      partial: whether names that only one side has are left alone.

    Raises:
      CheckpointError: missing, extra and different entries, listed together.
    """
    names = {e.key for e in wanted}
    missing = [] if partial else [e.key for e in wanted if e.key not in saved]
    extra = [] if partial else [key for key in saved if key not in names]
    both = [e for e in wanted if e.key in saved]
    different = [
        f"{e.key} ({_text(saved[e.key])} in the checkpoint, {_text(e.spec)} in the tree)"
        for e in both
        if not _fits(saved[e.key], e.spec)
    ]
    if not (missing or extra or different):
        return both
    parts = {"missing in it": missing, "not in the tree": extra, "different": different}
    found = "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in parts.items() if keys)
    raise CheckpointError(
        explain(
            f"{where} needs the names, shapes and dtypes of the tree to restore",
            got=found,
            why="each value is restored by its name, and nothing is guessed",
            fix="restore(tree, partial=True) leaves what only one side has; "
            "restore(tree, rename={'old name': 'new name'})",
        )
    )


def renamed(
    saved: Mapping[str, Spec | None], rename: Mapping[str, str], where: str
) -> dict[str, str]:
    """Returns the name in the checkpoint of each name of today.

    A name of `rename` may be a whole name or a prefix of such that ends before a "/".

    Raises:
      CheckpointError: a name that the checkpoint does not have, or two that become one.
    """
    origins: dict[str, str] = {}
    used = set()
    for key in saved:
        old = next((o for o in rename if key == o or key.startswith(o + "/")), None)
        new = key if old is None else rename[old] + key[len(old) :]
        used.add(old)
        if new in origins:
            raise CheckpointError(
                explain(
                    f"rename needs to keep the names of {where} apart",
                    got=f"{origins[new]!r} and {key!r} both as {new!r}",
                    why="a value is found by its name",
                    fix="give each its own name",
                )
            )
        origins[new] = key
    unknown = [old for old in rename if old not in used]
    if unknown:
        raise CheckpointError(
            explain(
                f"rename needs names that {where} has",
                got=f"{_listed(unknown)}; it has {_listed(list(saved))}",
                why="the keys of rename are names in the checkpoint",
                fix="rename={'old name': 'new name'}",
            )
        )
    return origins


def _fits(saved: Spec | None, wanted: Spec | None) -> bool:
    if saved is None or wanted is None:
        return saved is wanted
    return saved.fits(wanted)


def _text(spec: Spec | None) -> str:
    return "an object" if spec is None else str(spec)


def _listed(keys: Sequence[str]) -> str:
    rest = len(keys) - _MAX_LISTED
    return ", ".join(keys[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
