"""Of a wrong step `dj.check` names the statement that is wrong, first."""

import ast
import inspect
import re

import pytest

import distjax as dj
from tests.check import wrong_lines
from tests.check.problem import findings_of
from tests.drill_mark import all_drills_but

SOURCE = inspect.getsource(wrong_lines)
LINES = SOURCE.splitlines()
_NO_STATEMENTS = ast.FunctionDef | ast.ClassDef
STATEMENTS = [
    range(node.lineno, node.end_lineno + 1)
    for node in ast.walk(ast.parse(SOURCE))
    if isinstance(node, ast.stmt) and not isinstance(node, _NO_STATEMENTS)
]


def lines_of(build):
    """Returns the lines of all statements that are marked, in a program or for it."""
    source, first = inspect.getsourcelines(build)
    own = range(first, first + len(source))
    marked = [n for n in own if re.search("# (wrong|makes|takes)$", LINES[n - 1])]
    marked += [n for n, s in enumerate(LINES, 1) if s.endswith(f"# wrong: {build.__name__}")]
    return {n for m in marked for n in min((s for s in STATEMENTS if m in s), key=len)}


@pytest.mark.parametrize(
    "build",
    all_drills_but(wrong_lines.PROGRAMS[::3], wrong_lines.PROGRAMS),
    ids=lambda build: build.__name__,
)
def test_the_line_of_a_mistake(build):
    step, args, options = build(dj.VirtualStrategy(wrong_lines.R))
    found = findings_of(step, *args, **options)
    [error] = [finding for finding in found if finding.level == "error"]
    at = re.match(rf"{re.escape(wrong_lines.__file__)}:(\d+) ", error.source)
    assert at and int(at[1]) in lines_of(build), error
