"""What a coordinator needs of its arguments."""

from __future__ import annotations

from distjax.errors import describe_value, message
from distjax.integers import require_int
from distjax.servers.snapshot import Snapshot
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
            fix="dj.Coordinator(dj.ParameterServerStrategy(workers=4)); for a dj.compat adapter of "
            "one: dj.Coordinator(strategy.wrapped)",
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


def require_snapshot(snapshot: object, strategy: ServerStrategy) -> None:
    """Raises a TypeError or ValueError unless it is a snapshot of the servers of `strategy`."""
    is_snapshot = isinstance(snapshot, Snapshot)
    if is_snapshot and snapshot.strategy() is strategy:
        return
    raise (ValueError if is_snapshot else TypeError)(
        message(
            f"restore needs a snapshot of the servers of {strategy!r}",
            got=f"one of another strategy: {snapshot!r}"
            if is_snapshot
            else describe_value(snapshot),
            why="servers go back to the values that they themselves had",
            fix="snapshot = coordinator.snapshot(); dj.checkpoint takes values from one strategy "
            "to another",
        )
    )
