"""Every wrong program is found at its level, its right version is silent."""

import re
from pathlib import Path

import pytest

import distjax as dj
from tests.wrong_programs import (  # noqa: F401
    batches,
    between_runs,
    measurements,
    merges,
    reductions,
    state,
    variables,
)
from tests.wrong_programs.program import ERROR, NOTE, SILENT, TABLE, WARNING, check, run_plainly

FOLDER = str(Path(__file__).parent)
ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def two():
    return dj.VirtualStrategy(2)


@ROWS
def test_a_wrong_program_is_found_at_its_level(two, row):
    level, text = run_plainly(two, row.build(two, False))
    assert (NOTE if level == SILENT and row.level == NOTE else level) == row.level, text
    if level != SILENT:
        is_found = re.search(row.rule, text) if level == ERROR else "Fix: " in text
        assert is_found or row.rule == "state that comes back different", text


@pytest.mark.parametrize(
    "row", [row for row in TABLE if not row.is_outside], ids=lambda row: row.name
)
def test_a_wrong_program_is_checked(two, row):
    if row.level == ERROR and row.rule != "state that comes back different":
        with pytest.raises((ValueError, RuntimeError), match=row.rule):
            check(two, row.build(two, False))
        return
    found = check(two, row.build(two, False))
    assert bool(found) == (row.level != SILENT), found
    if found:
        [finding] = [f for f in found if f.rule == row.rule] or [None]
        assert finding is not None, [f.rule for f in found]
        assert finding.source.startswith(FOLDER)  # the user's line, not ours
        assert "\n  Fix: " in finding.text


@ROWS
def test_the_right_version_is_silent(two, row):
    case = row.build(two, True)
    assert run_plainly(two, case) == (SILENT, "")
    assert check(two, case) == ()


def test_how_many_are_found():
    levels = [row.level for row in TABLE]
    loud = sum(level in (ERROR, WARNING) for level in levels)
    assert len(levels) >= 82
    assert 1 - levels.count(SILENT) / len(levels) >= 0.85
    assert loud / len(levels) >= 0.55
    assert all(row.why for row in TABLE if row.level != ERROR)
