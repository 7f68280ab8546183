"""dj.expect: the reason why something that looks wrong is meant."""

from __future__ import annotations

import contextlib
import re
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import jax

from distjax import jax_compat
from distjax.errors import describe_value, message
from distjax.typing import PyTree

_MISSING = object()
_NOTHING_DIFFERS = "_nothing_differs"
_SCOPE = re.compile(r"distjax_expect_(\d+)")

_reasons: ContextVar[tuple[str, ...]] = ContextVar("distjax_expected", default=())
#: Every reason that was given in a trace, once: operations carry its number in their scope.
_numbers: dict[str, int] = {}


class Expected:
    """What `dj.expect` returns: a block, and an argument that is meant to differ.

    As an argument it is a pytree node; the function is given the tree itself.
    """

    def __init__(self, reason: str, differs: PyTree = _MISSING):
        self.reason, self.differs = reason, differs
        self._entered: list[tuple[Token[tuple[str, ...]], Any]] = []

    def __enter__(self) -> Expected:
        number = _numbers.setdefault(self.reason, len(_numbers))
        is_traced = jax_compat.tracing()
        name = f"distjax_expect_{number}{_NOTHING_DIFFERS if self._says_equal() else ''}"
        scope = jax.named_scope(name) if is_traced else contextlib.nullcontext()
        scope.__enter__()
        self._entered.append((_reasons.set((*_reasons.get(), self.reason)), scope))
        return self

    def _says_equal(self) -> bool:
        return self.differs is not _MISSING and not jax.tree.leaves(self.differs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        token, scope = self._entered.pop()
        _reasons.reset(token)
        scope.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"dj.expect({self.reason!r})"


class _Nameless:
    """The key of the tree in its wrapper: a path does not show it."""

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
    """Says once why something that looks wrong is meant, which silences its findings.

    As a block, ``with dj.expect(reason):``, for all that is found of the code in it, in a step
    or around the call of one. ``with dj.expect(reason, differs=()):`` also says that nothing in it
    differs which is made of equal values: a `jax.pure_callback` there returns the same for the same
    arguments, and its result is taken to be equal where they are.

    Around an argument of `run` or of a `dj.jit` function for a tree that goes in equal and is meant
    to come out different: an environment, a sampler, a buffer. `dj.explain` shows the reasons.

    Args:
      reason: why it is meant, for the reader.
      differs: an argument that is meant to differ per replica afterwards; of a block nothing, ().

    Returns:
      What is entered, or passed in place of the argument.

    Context: any. Cost: none.

    Raises:
      TypeError: no reason, or an empty one.

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
            why="it tells the reader, and dj.explain, that what looks wrong is meant",
            fix='dj.expect("each replica has an environment of its own", differs=env)',
        )
    )


def without_expectations(
    args: tuple[Any, ...], kwargs: dict[str, Any], meant: dict[int, tuple[Any, str]] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments as the function takes them.

    Args:
      args: positional arguments, some wrapped by `expect`.
      kwargs: keyword arguments.
      meant: where the leaves that are meant to differ are noted, by identity, with the reason.
    """
    if meant is not None:
        for value in (*args, *kwargs.values()):
            if type(value) is Expected:
                leaves = jax.tree.leaves(value.differs)
                meant.update((id(leaf), (leaf, value.reason)) for leaf in leaves)
    if any(type(a) is Expected for a in args):
        args = tuple(a.differs if type(a) is Expected else a for a in args)
    if any(type(a) is Expected for a in kwargs.values()):
        kwargs = {k: a.differs if type(a) is Expected else a for k, a in kwargs.items()}
    return args, kwargs


def reason_in(names: str) -> str | None:
    """Returns the reason of the innermost `dj.expect` block among scopes "a/b/c", or None."""
    found = _SCOPE.findall(names)
    return list(_numbers)[int(found[-1])] if found else None


def says_equal(names: str) -> bool:
    """Returns whether scopes "a/b/c" have a `dj.expect` block in which nothing differs."""
    return _NOTHING_DIFFERS in names


def current_reason() -> str | None:
    """Returns the reason of the innermost `dj.expect` block that is entered, or None."""
    reasons = _reasons.get()
    return reasons[-1] if reasons else None
