"""Programs: the programs of plans, jitted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jec

from distjax import jax_compat
from distjax.servers.plan import Program


class Programs:
    """Runs programs; keeps them jitted as long as their plans are alive.

    Each program has one more result than it says, a token: a program may have no result
    of its own that one could wait for.
    """

    def __init__(self) -> None:
        self._jitted: weakref.WeakKeyDictionary[Program, dict[tuple[int, ...], Any]]
        self._jitted = weakref.WeakKeyDictionary()
        self._making = threading.Lock()

    def run(
        self, program: Program, args: Sequence[jax.Array], donated: tuple[int, ...] = ()
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns the results, which may not be ready, and a token that is ready with them.

        Where the program calls back to Python it has run: an error is raised here, before
        anybody uses what it did not compute, and nothing is donated.

        Args:
          program: what to run, where `args` are.
          args: its arguments.
          donated: the numbers of those whose memory it may reuse.
        """
        if _raises_for_values():  # after it has run, and what was donated would be gone
            donated = ()
        run, calls_back = self._find(program, args, donated)
        *results, token = run(*args)
        if calls_back:
            jax.block_until_ready(token)
        return tuple(results), token

    def _find(self, program: Program, args: Sequence[jax.Array], donated: tuple[int, ...]) -> Any:
        found = self._jitted.get(program, {}).get(donated)
        if found is not None:
            return found
        with self._making:  # two workers would trace one program twice
            variants = self._jitted.setdefault(program, {})
            if donated not in variants:
                variants[donated] = _make(program, args, donated)
            return variants[donated]


def _make(program: Program, args: Sequence[jax.Array], donated: tuple[int, ...]) -> Any:
    fn = program.fn  # the jitted function must not keep its own key alive

    def with_token(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (*fn(*arrays), jnp.zeros((), jnp.bool_))

    with_token.__name__ = with_token.__qualname__ = program.name
    jitted = jax.jit(with_token)
    if _calls_back(jitted.trace(*args).jaxpr.jaxpr):
        return jitted, True
    return (jax.jit(with_token, donate_argnums=donated) if donated else jitted), False


def _raises_for_values() -> bool:
    config: Any = jax.config  # these two are this thread's; pyright does not see them
    return config.jax_debug_nans or config.jax_debug_infs


def _calls_back(jaxpr: jec.Jaxpr) -> bool:
    return any(
        "callback" in eqn.primitive.name or any(map(_calls_back, jax_compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
