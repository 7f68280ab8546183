"""Every case of tf.distribute (the odd numbers to r357) has a test or a named reason."""

import ast
import pathlib
import re

TESTS = pathlib.Path(__file__).parent
CASES = set(range(1, 358, 2))


def cases_with_a_test():
    """The numbers in the names of tests: test_r145_r151_... is two cases."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield from (int(number) for number in re.findall(r"_r(\d{3})(?=_)", node.name))


def cases_with_a_reason():
    """The numbers in the first cells of README.md's tables: "r051, r053" or "r317-r323"."""
    for line in (TESTS / "README.md").read_text().splitlines():
        if not re.match(r"\| r\d", line):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert all(cells), f"a row of tests/README.md without a reason: {line}"
        for part in cells[0].split(","):
            first, last = re.fullmatch(r"r(\d{3})(?:-r(\d{3}))?", part.strip()).groups()
            yield from range(int(first), int(last or first) + 1, 2)


def test_every_case_has_a_test_or_a_reason():
    missing = CASES - set(cases_with_a_test()) - set(cases_with_a_reason())
    assert not missing, f"neither a test nor a line in tests/README.md: {sorted(missing)}"


def test_numbers_are_those_of_the_list():
    assert set(cases_with_a_test()) <= CASES
    assert set(cases_with_a_reason()) <= CASES
