"""colocate_vars_with: new variables live where another one does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from distjax.context import frames
from distjax.errors import ContextError, LocalityError, describe_value, explain
from distjax.strategies.updating import require_non_slot_devices
from distjax.variables.variable import Variable


@contextlib.contextmanager
def colocated(extended: Any, beside: Any) -> Iterator[None]:
    """Makes variables created in a block live where `beside` does."""
    frame = frames.current()
    if frame.strategy is not extended.strategy:
        raise ContextError(
            explain(
                f"colocate_vars_with. Need to be inside the scope of {extended.strategy!r}",
                got=frame.name,
                why="it changes how this strategy creates variables",
                fix="with strategy.scope(), strategy.extended.colocate_vars_with(v): ...",
            )
        )
    if not isinstance(beside, Variable):
        _require_known(extended, beside)
        with frames.entered(dataclasses.replace(frame, colocate_with=None)):
            yield
        return
    if beside.strategy is not extended.strategy:
        raise LocalityError(_foreign_text(extended, beside))

    with frames.entered(dataclasses.replace(frame, colocate_with=beside)):
        yield


def _require_known(extended: Any, devices: Any) -> None:
    try:
        require_non_slot_devices(extended, devices, "colocate_vars_with")
    except ValueError:
        raise LocalityError(_foreign_text(extended, devices)) from None


def _foreign_text(extended: Any, beside: Any) -> str:
    got = repr(beside) if isinstance(beside, Variable) else describe_value(beside)
    return explain(
        "`colocate_vars_with` must only be passed a variable created in this "
        "tf.distribute.Strategy.scope(), or what non_slot_devices returned",
        got=got,
        why=f"new variables of {extended.strategy!r} can only live where its variables live",
        fix="strategy.extended.colocate_vars_with(v) for a v made under strategy.scope()",
    )
