"""colocate_vars_with: creates variables where another one lives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

from distjax.context import frames
from distjax.context.contracts import Destinations
from distjax.errors import ContextError, LocalityError, describe_value, message
from distjax.strategies.contracts import ExtendedContract
from distjax.strategies.update import require_non_slot_devices
from distjax.variables.variable import Variable


@contextlib.contextmanager
def colocate(extended: ExtendedContract, colocate_with: Destinations) -> Generator[None]:
    """Makes variables created in a block live where `colocate_with` does."""
    frame = frames.current()
    if frame.strategy is not extended.strategy:
        raise ContextError(
            message(
                f"colocate_vars_with. Need to be inside the scope of {extended.strategy!r}",
                got=frame.name,
                why="it changes how this strategy creates variables",
                fix="with strategy.scope(), strategy.extended.colocate_vars_with(v): ...",
            )
        )
    _require_known(extended, colocate_with)
    variable = colocate_with if isinstance(colocate_with, Variable) else None
    with frames.with_block(dataclasses.replace(frame, colocate_with=variable)):
        yield


def _require_known(extended: ExtendedContract, colocate_with: Destinations) -> None:
    try:
        require_non_slot_devices(extended, colocate_with, "colocate_vars_with")
    except ValueError:
        raise LocalityError(_foreign_text(extended, colocate_with)) from None


def _foreign_text(extended: ExtendedContract, colocate_with: object) -> str:
    got = (
        repr(colocate_with)
        if isinstance(colocate_with, Variable)
        else describe_value(colocate_with)
    )
    return message(
        "`colocate_vars_with` must only be passed a variable created in this "
        "tf.distribute.Strategy.scope(), or what non_slot_devices returned",
        got=got,
        why=f"new variables of {extended.strategy!r} can only live where its variables live",
        fix="strategy.extended.colocate_vars_with(v) for a v made under strategy.scope()",
    )
