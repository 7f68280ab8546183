"""What TensorFlow answered, what distjax decided otherwise, and how the two are compared."""

import builtins
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"

#: TensorFlow's own errors, as what Python or distjax raises in their place.
TENSORFLOW_ERRORS = {"InvalidArgumentError": ValueError, "OutOfRangeError": StopIteration}


@dataclasses.dataclass(frozen=True)
class Record:
    """One question (`case`) and TensorFlow's answer (`outcome`), both as in the file."""

    id: str
    case: dict[str, Any]
    outcome: Any


@dataclasses.dataclass(frozen=True)
class Ruling:
    """Records for which distjax decides otherwise than TensorFlow.

    Attributes:
      ids: which records, with * for any text.
      where: which of these.
      decision: its number in `docs/decisions.md`; CLEAN_ERROR where only the type
        of an accidental error differs; or what keeps the case from being asked.
      expected: what distjax does: an outcome, an error type, or a function that
        makes one of these of the record.
    """

    ids: str
    decision: int | str
    expected: Any
    where: Callable[[Record], bool] = lambda record: True

    def holds_for(self, record: Record) -> bool:
        pattern = re.escape(self.ids).replace(r"\*", ".*")
        return re.fullmatch(pattern, record.id) is not None and self.where(record)

    def outcome(self, record: Record) -> Any:
        is_function = callable(self.expected) and not isinstance(self.expected, type)
        return self.expected(record) if is_function else self.expected


#: TensorFlow raises too, by accident: an AssertionError, an AttributeError.
CLEAN_ERROR = "clean error"


def load(area: str) -> list[Record]:
    """Returns the records of one file of `data/`."""
    content = json.loads((DATA / f"{area}.json").read_text())
    return [Record(**record) for record in content["records"]]


def check(
    record: Record,
    ask: Callable[[dict[str, Any]], Any],
    rulings: list[Ruling] | tuple[Ruling, ...] = (),
    rtol: float = 1e-6,
) -> None:
    """Asserts that distjax answers as TensorFlow did, or as the one ruling says."""
    got = outcome_of(lambda: ask(record.case))
    found = [ruling for ruling in rulings if ruling.holds_for(record)]
    if not found:
        assert difference(record.outcome, got, rtol) is None, difference(record.outcome, got, rtol)
        return
    assert len(found) == 1, f"{record.id}: several rulings {[r.ids for r in found]}"
    expected = found[0].outcome(record)
    assert difference(expected, got, rtol) is None, difference(expected, got, rtol)
    is_needed = difference(record.outcome, got, rtol) is not None
    assert is_needed, f"{record.id}: as in TensorFlow, no ruling needed"


# -- outcomes -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error as an outcome."""

    error: Exception


def outcome_of(ask: Callable[[], Any]) -> Any:
    """Returns what `ask()` returns, or the error that it raises."""
    try:
        return ask()
    except Exception as error:
        return Raised(error)


def plain(value: Any) -> Any:
    """Returns an array or a number as what JSON has."""
    array = np.asarray(value)
    if np.iscomplexobj(array):
        array = np.vectorize(lambda x: {"re": float(x.real), "im": float(x.imag)})(array)
    elif array.dtype.kind not in "biu":
        array = array.astype(np.float64)
    return array.tolist()


def difference(expected: Any, got: Any, rtol: float, path: str = "") -> str | None:
    """Returns where and how `got` differs from `expected`, or None."""
    if is_error(expected):
        return _error_difference(expected, got, path)
    if isinstance(got, Raised):
        return f"{path}: {expected!r} expected, but raised {got.error!r}"
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        pairs = [(expected[key], got[key], f"{path}.{key}") for key in expected]
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = [(e, g, f"{path}[{i}]") for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    elif type(expected) is float and type(got) is float:
        close = np.isclose(got, expected, rtol=rtol, atol=rtol / 10)
        return None if close else f"{path}: {expected!r} expected, got {got!r}"
    else:
        same = type(expected) is type(got) and expected == got
        return None if same else f"{path}: {expected!r} expected, got {got!r}"
    return next((d for e, g, p in pairs if (d := difference(e, g, rtol, p))), None)


def is_error(outcome: Any) -> bool:
    """Returns whether an outcome is an error: TensorFlow's by name, or a type."""
    return isinstance(outcome, type) or (isinstance(outcome, dict) and "error" in outcome)


def _error_difference(expected: Any, got: Any, path: str) -> str | None:
    if isinstance(expected, dict):
        name = expected["error"]
        expected = TENSORFLOW_ERRORS.get(name) or getattr(builtins, name)
    if not isinstance(got, Raised):
        return f"{path}: {expected.__name__} expected, got {got!r}"
    if not isinstance(got.error, expected):
        return f"{path}: {expected.__name__} expected, got {got.error!r}"
    has_four_parts = "\n  Fix: " in str(got.error) or isinstance(got.error, StopIteration)
    return None if has_four_parts else f"{path}: not a text of distjax: {got.error!r}"
