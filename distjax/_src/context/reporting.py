"""What a trace shows to be probably wrong, and `dj.expect`, which says why it is intended.

A finding is an error, a warning or a note. Notes may also apply to correct programs, so only
`dj.explain` and `dj.check` show them. Anything declared by `dj.expect` is shown but not raised.

Most findings are made after a trace, from its equations. So a block of `dj.expect` inside a trace
opens a named scope that carries the number of its reason, and a finding looks it up in the name
stack of its equations. Around a call, and for findings made right away, a context variable holds
the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import warnings
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

import jax

from distjax._src import hooks, jax_compat, user_lines
from distjax._src.typing import PyTree
from distjax.errors import ReductionWarning, describe_value, message

_MISSING = object()
_NOTHING_DIFFERS = "_nothing_differs"
_SCOPE = re.compile(r"distjax_expect_(\d+)")

#: Every reason given to a block; its operations carry the index in their scope name.
_known: list[str] = []
_one_at_a_time = threading.Lock()


class Expected:
    """What `dj.expect` returns: a context manager, or an argument meant to differ.

    As an argument it is a pytree node; the function receives the wrapped tree itself.
    """

    def __init__(self, reason: str, differs: PyTree = _MISSING):
        self.reason, self.differs = reason, differs

    def __enter__(self) -> Expected:
        number = _number_of(self.reason)
        is_traced = jax_compat.tracing()
        name = f"distjax_expect_{number}{_NOTHING_DIFFERS if self._says_equal() else ''}"
        scope = jax.named_scope(name) if is_traced else contextlib.nullcontext()
        scope.__enter__()
        _blocks.set((*_blocks.get(), _Block(self, scope)))
        return self

    def _says_equal(self) -> bool:
        return self.differs is not _MISSING and not jax.tree.leaves(self.differs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        blocks = _blocks.get()
        own = next((b for b in reversed(blocks) if b.expected is self), None)
        if own is not None:  # a generator may be closed in another thread than it began
            _blocks.set(tuple(b for b in blocks if b is not own))
            own.scope.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"dj.expect({self.reason!r})"


class _Block(NamedTuple):
    """One entry of an `Expected`, with the named scope that it opened."""

    expected: Expected
    scope: Any


#: The blocks that this thread is in, outermost first.
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("distjax_expected", default=())


def _number_of(reason: str) -> int:
    with _one_at_a_time:
        if reason not in _known:
            _known.append(reason)
        return _known.index(reason)


class _Nameless:
    """The tree's key in its wrapper; prints as nothing in key paths."""

    def __str__(self) -> str:
        return ""

    def __hash__(self) -> int:
        return hash(_Nameless)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nameless)


def _flatten(node: Expected) -> tuple[Any, Any]:
    return (() if node.differs is _MISSING else ((_Nameless(), node.differs),)), node.reason


jax.tree_util.register_pytree_with_keys(
    Expected, _flatten, lambda reason, children: Expected(reason, *children)
)


def expect(reason: str, *, differs: PyTree = _MISSING) -> Expected:
    """Declares why something that looks wrong is intended, silencing its findings.

    As a context manager, ``with dj.expect(reason):`` covers all findings about the code inside
    it, in a step or around the call of one. ``with dj.expect(reason, differs=()):`` also asserts
    that equal inputs give equal outputs inside: a `jax.pure_callback` there returns the same for
    the same arguments, so its result is treated as equal on all replicas if its arguments are.

    As a wrapper around an argument of `run` or of a `dj.jit` function, or around a part of one, it
    marks a tree that goes in equal and is meant to come out different: an environment, a sampler,
    batch statistics in a state, one array. It marks the first call of a loop; what a loop feeds
    back after that goes in different, and may. Variables of Flax NNX objects are told apart by
    their type: `dj.flax.set_rule(type, "per_replica")`. `dj.explain` shows the reasons.

    Args:
      reason: why it is intended, for the reader.
      differs: an argument that may differ per replica afterwards; for a block, () for nothing.

    Returns:
      The context manager to enter, or the wrapper to pass in place of the argument.

    Context: any. Cost: none.

    Raises:
      TypeError: `reason` is not a string, or is blank.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> def play(env, w):
      ...     return {"at": env["at"] + dj.get_replica_context().replica_id_in_sync_group}
      >>> env = dj.expect("each replica has a game of its own", differs={"at": jnp.zeros(())})
      >>> strategy.local_results(strategy.run(play, args=(env, 1.0))["at"])
      (Array(0., dtype=float32), Array(1., dtype=float32))
    """
    if type(reason) is str and reason.strip():
        return Expected(reason, differs)
    raise TypeError(
        message(
            "expect needs a reason in words",
            got=describe_value(reason),
            why="it tells readers, and dj.explain, that what looks wrong is intended",
            fix='dj.expect("each replica has an environment of its own", differs=env)',
        )
    )


def without_expectations(
    args: tuple[Any, ...], kwargs: dict[str, Any], meant: dict[int, tuple[Any, str]] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with `expect` wrappers removed.

    `meant` receives each leaf that is meant to differ, by its `id`, with the reason.
    """

    def unwrap(value: PyTree) -> Any:
        found = [x for x in jax.tree.leaves(value, is_leaf=_is_expected) if _is_expected(x)]
        if not found:  # `tree.map` would rebuild the user's objects
            return value
        if meant is not None:
            for each in found:
                leaves = jax.tree.leaves(each.differs)
                meant.update((id(leaf), (leaf, each.reason)) for leaf in leaves)
        return jax.tree.map(
            lambda x: x.differs if _is_expected(x) else x, value, is_leaf=_is_expected
        )

    return tuple(map(unwrap, args)), {k: unwrap(v) for k, v in kwargs.items()}


def _is_expected(value: object) -> bool:
    return type(value) is Expected


def reason_in(names: str) -> str | None:
    """Returns the innermost `dj.expect` reason in a scope path "a/b/c", or None."""
    found = _SCOPE.findall(names)
    return _known[int(found[-1])] if found else None


def says_equal(names: str) -> bool:
    """Returns whether a scope path "a/b/c" has a `dj.expect(..., differs=())` block."""
    return _NOTHING_DIFFERS in names


def current_reason() -> str | None:
    """Returns the reason of the innermost active `dj.expect` block, or None."""
    blocks = _blocks.get()
    return blocks[-1].expected.reason if blocks else None


# -- findings ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about a step that is probably wrong.

    Attributes:
      level: "error", "warning" or "note".
      rule: the kind of mistake, in a few words.
      text: what was expected and found, why it matters, and the fix.
      source: the user's line, "file:line (function)".
      expected: the reason given through `dj.expect`, or None.
    """

    level: str
    rule: str
    text: str
    source: str
    expected: str | None = None


#: The rule name for state that goes in equal and comes out different.
STATE = "state that comes back different"
_num_reported: ContextVar[int] = ContextVar("distjax_num_reported", default=0)


def num_reported() -> int:
    """Returns how often this thread has reported state that comes back different, except notes."""
    return _num_reported.get()


def report(finding: Finding, kind: type[Warning] | type[Exception] = ReductionWarning) -> None:
    """Reports a finding: raises it, warns about it, or only tells those that listen."""
    is_note = finding.level == "note"
    if finding.rule == STATE and not is_note:
        _num_reported.set(_num_reported.get() + 1)
    if finding.expected is None:
        finding = dataclasses.replace(finding, expected=current_reason())
    is_taken = any(hooks.tell(hooks.on_finding, finding))
    if finding.expected is not None or is_note or is_taken:
        return
    if issubclass(kind, Warning):
        warnings.warn(finding.text, kind, stacklevel=user_lines.user_stacklevel())
    else:
        raise kind(finding.text)
