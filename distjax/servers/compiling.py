"""Compiles a plan's programs before workers pull: values pulled first would be stale.

A worker that pulled and then compiled for seconds would push gradients, and whole values, of a
snapshot that others have replaced hundreds of times.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

from distjax.servers.plan import Plan


class CompiledPlans:
    """Which plans have their programs compiled, and for which signatures."""

    def __init__(self) -> None:
        self._plans = weakref.WeakKeyDictionary[Plan, dict[Hashable, _Once]]()
        self._adding = threading.Lock()

    def compile_once(
        self, plan: Plan, signature: Hashable, compile_programs: Callable[[], None]
    ) -> None:
        """Calls `compile_programs`, unless it was called before for this plan and signature.

        Workers that share devices wait for the one that compiles.

        Args:
          plan: a plan.
          signature: what its programs depend on besides the plan.
          compile_programs: compiles them.
        """
        found = self._plans.get(plan, {}).get(signature)
        if found is None:
            with self._adding:
                found = self._plans.setdefault(plan, {}).setdefault(signature, _Once())
        found.do(compile_programs)


class _Once:
    def __init__(self) -> None:
        self._is_done, self._doing = False, threading.Lock()

    def do(self, act: Callable[[], None]) -> None:
        if self._is_done:
            return
        with self._doing:
            if not self._is_done:
                act()
                self._is_done = True
