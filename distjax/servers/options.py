"""What a coordinator needs of its arguments."""

from __future__ import annotations

from distjax.errors import describe_value, message
from distjax.integers import require_int
from distjax.servers.strategy_contract import ServerStrategy


def require_servers(strategy: object) -> None:
    """Raises a TypeError unless it is a strategy that has parameter servers."""
    # A `dj.compat` adapter has all names of the strategy it wraps, and would get another board.
    if isinstance(strategy, ServerStrategy) and hasattr(type(strategy), "cut_step"):
        return
    raise TypeError(
        message(
            "Coordinator needs a ParameterServerStrategy",
            got=describe_value(strategy),
            why="it schedules steps on workers that have parameter servers",
            fix="dj.Coordinator(dj.ParameterServerStrategy(workers=4)); of one with the names of "
            "dj.compat: dj.Coordinator(strategy.wrapped)",
        )
    )


def require_positive(value: object, method: str, name: str, fix: str) -> None:
    """Raises a ValueError unless `value` is an int of 1 or more.

    Args:
      value: the argument.
      method: whose argument it is.
      name: the argument's name.
      fix: a call that is right.
    """
    why = "it is a number of workers or closures"
    require_int(f"{method}: {name}", value, 1, why=why, fix=fix)
