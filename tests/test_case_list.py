"""Every case of `cases.md` (the odd numbers to r357) has a test or a reason why it has none."""

import functools
import pathlib
import re

TESTS = pathlib.Path(__file__).parent
#: "Decision 16", "decisions 9 to 12", "decisions 4, 5 and 24".
DECISION = re.compile(r"[Dd]ecisions? ((?:\d+(?:, | to | and )?)+)")
TEST = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
HEADER = "| case | setup and action | TensorFlow | source | here |"


@functools.cache
def cases_with_a_test():
    """Returns the numbers in the names of tests: test_r145_r151_... holds two cases."""
    names = (name for p in TESTS.rglob("test_*.py") for name in TEST.findall(p.read_text()))
    return {int(number) for name in names for number in re.findall(r"_r(\d{3})(?=_)", name)}


def rows():
    """Yields the cells of each case: number, action, TensorFlow, source, and what is here."""
    for line in (TESTS / "cases.md").read_text().splitlines():
        if re.match(r"\| r\d", line):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def number_of(row):
    return int(re.fullmatch(r"r(\d{3})", row[0])[1])


def test_the_list_has_each_odd_number_once_and_in_order():
    assert [number_of(row) for row in rows()] == list(range(1, 358, 2))


def test_each_line_says_what_is_done_what_comes_and_who_says_so():
    for row in rows():
        assert len(row) == HEADER.count("|") - 1 and all(row[:4]), row


def test_each_case_has_a_test_or_a_reason():
    tested = cases_with_a_test()
    missing = [row[0] for row in rows() if not row[4] and number_of(row) not in tested]
    assert not missing, f"neither a test nor a reason in tests/cases.md: {missing}"


def test_each_number_in_the_name_of_a_test_has_a_line():
    assert cases_with_a_test() <= {number_of(row) for row in rows()}


def decisions_named():
    """Yields each number of a decision in the tests, the library and the docs, and the file."""
    for folder in ("tests", "distjax", "docs"):
        for path in (TESTS.parent / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                for numbers in DECISION.findall(path.read_text()):
                    yield from ((number, path) for number in re.findall(r"\d+", numbers))


def test_each_decision_that_a_text_names_has_a_line():
    page = (TESTS.parent / "docs" / "decisions.md").read_text()
    known = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert sorted(map(int, known)) == list(range(1, len(known) + 1))
    named = dict(decisions_named())
    assert len(named) > 20  # so that a change of the words does not empty the test
    assert not {number: path for number, path in named.items() if number not in known}
