"""A strategy is one object in one process: the errors for copying and pickling it.

One that was made again with equal arguments, as by a cell of a notebook, is another object. It
keeps arrays in the same places, so the NNX modules of the one are as good as its own.
"""

from __future__ import annotations

from typing import Any, NoReturn

from distjax.context.contracts import StrategyLike
from distjax.errors import message


def are_equal(one: StrategyLike, other: StrategyLike) -> bool:
    """Returns whether two strategies are of one class, on the same devices, with equal options."""
    if type(one) is not type(other):
        return False
    own: Any = one.extended  # with more than the context's contract names
    theirs: Any = other.extended
    return (
        own.topology is theirs.topology  # equal ones are one object
        and own.placement == theirs.placement
        and own.communication == theirs.communication
    )


def refuse_copy(strategy: StrategyLike) -> NoReturn:
    """Raises for `copy.copy` and `copy.deepcopy` of a strategy.

    Raises:
      RuntimeError: always.
    """
    raise RuntimeError(
        message(
            f"{strategy!r} needs to stay one object",
            got="copy.copy or copy.deepcopy of a strategy",
            why="variables and compiled programs belong to this very object",
            fix="pass the strategy itself around, or construct a second one",
        )
    )


def refuse_pickle(strategy: StrategyLike) -> NoReturn:
    """Raises for `pickle` of a strategy, or of an object that holds one.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        message(
            f"{strategy!r} needs to stay in its process",
            got="pickle of a strategy, or of what holds one",
            why="its devices, variables and compiled programs belong to this process",
            fix=f"construct a {type(strategy).__name__} there, and take the state with "
            "dj.checkpoint.Checkpointer(directory): save(step, tree) here, restore(tree) there",
        )
    )
