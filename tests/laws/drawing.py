"""How sequences of mixed calls are drawn, and how many.

There are few, and always the same: a failure is a bug, not the luck of the day. `make laws` draws
EXAMPLES=50 for each strategy (LAW_EXAMPLES in the environment), other ones at each run, or those of
PYTEST_FLAGS=--hypothesis-seed=1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st

from tests.laws.modes import MODES
from tests.laws.scripts import VARIABLES, Between, Call

EXAMPLES = int(os.environ.get("LAW_EXAMPLES", "0"))
ROADS = ("run", "run", "jit", "eager")
KINDS = ("int", "float", "numpy", "array", "per_replica")
NAMES = tuple(VARIABLES)
#: Modes after which everything is as it was.
RAISING = tuple(mode for mode in MODES if mode.startswith("raise"))
WRITING = tuple(mode for mode in MODES if mode not in ("eval", *RAISING))


def drawn(count: int, number: int, **options: Any) -> Callable[[Any], Any]:
    """Returns the decorator of a law, to stand above `given`.

    Args:
      count: the number of examples, where nothing else is asked for.
      number: two laws with different numbers see different examples.
      options: of `hypothesis.settings`.
    """
    several = settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    return several if EXAMPLES else lambda law: several(seed(number)(law))


#: Of a law that is known to fail: the first failure is enough.
AS_IT_COMES = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}


def _names(of: Sequence[str], least: int = 0) -> Any:
    return st.lists(st.sampled_from(of), min_size=least, max_size=2, unique=True).map(tuple)


def _calls(modes: Sequence[str], of: Sequence[str]) -> Any:
    return st.builds(
        Call,
        road=st.sampled_from(ROADS),
        mode=st.sampled_from(modes),
        names=_names(of, 1),
        kind=st.sampled_from(KINDS),
        size=st.integers(1, 2),
        amount=st.integers(-2, 3),
        factor=st.integers(1, 2),
        by_keyword=st.booleans(),
        across=_names(of),
        error=st.sampled_from([KeyError, ValueError, RuntimeError]),
    )


def _betweens(of: Sequence[str]) -> Any:
    names, amounts = st.sampled_from(of), st.integers(-2, 3)
    anything = st.sampled_from(["assign", "value", "evaluate", "train"])
    # A sum of components is not added to in cross-replica context.
    addable = [name for name in of if name != "seen"] or ["mean"]
    return st.one_of(
        st.builds(Between, anything, names, amounts),
        st.builds(Between, st.just("assign_add"), st.sampled_from(addable), amounts),
    )


@st.composite
def sequences(draw: Any) -> Any:
    """Draws items: few modes and variables in many orders find more than many modes in few."""
    modes = ["eval", *draw(st.lists(st.sampled_from(WRITING), min_size=1, max_size=3, unique=True))]
    of = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
    calls = _calls(modes, of)
    others = st.one_of(
        _calls(RAISING, of),
        calls.map(lambda call: dataclasses.replace(call, mode=None)),
        _betweens(of),
    )
    looks = draw(st.lists(_calls(["eval"], of), max_size=2))  # as scripts often begin
    items = st.lists(st.one_of(calls, calls, calls, others), min_size=8, max_size=15 - len(looks))
    return [*looks, *draw(items)]


def sizes() -> Any:
    """Returns what draws the names that mode "shape" writes, for each size of `x`."""
    return st.fixed_dictionaries({1: _names(NAMES), 2: _names(NAMES)})


# -- what is not drawn ----------------------------------------------------------------


def runnable(items: Sequence[Any], is_default: bool) -> list[Any]:
    """Returns the items with each raising call on a road where its error undoes its writes.

    Python that is not compiled writes at once: the cross-replica function, and what the default
    strategy runs.
    """
    return [
        dataclasses.replace(item, road="jit")
        if item.raises and (is_default or item.mode == "raise_across")
        else item
        for item in items
    ]
