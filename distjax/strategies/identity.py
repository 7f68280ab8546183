"""A strategy is one object in one process: the errors for copying and pickling it."""

from __future__ import annotations

from typing import NoReturn

from distjax.context.contracts import StrategyLike
from distjax.errors import message


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
