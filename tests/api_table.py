"""The table of `docs/tf_distribute_api.md`, made from the tests that passed.

A plugin of pytest: `tests/conftest.py` takes the two hooks at the end. Each test carries the
rows that it holds in its report, which xdist brings from the workers to the controller; when a
run of all tests ends well, the controller compares the table with the one of the page.
"""

import collections
import difflib
import pathlib

import pytest

from tests.api_rows import SECTIONS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "tf_distribute_api.md"
BEGIN, END = "<!-- table: made by `make table` -->\n", "<!-- end of table -->\n"
PROPERTY = "api row"


def as_code(names):
    return ", ".join(f"`{name}`" for name in names)


def as_names(tests):
    """As pytest takes them, from `tests/`: a page of the site cannot link to files outside docs."""
    return "<br>".join(f"`{test.removeprefix('tests/')}`" for test in sorted(tests))


def make_table(sections, held):
    """Returns the table as Markdown.

    Args:
      sections: title -> rows.
      held: name of a row -> the tests that hold it.
    """
    lines = []
    for title, rows in sections.items():
        lines += [
            f"\n**{title}**\n",
            "| name or rule | versions | distjax | `dj.compat` | held by |",
        ]
        lines += ["|---|---|---|---|---|"]
        for row in rows:
            tests = as_names(held.get(row.name, ())) or row.later
            versions = ", ".join(row.versions)
            cells = (row.name, versions, as_code(row.here), as_code(row.older), tests)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def empty_rows(sections, held):
    """Returns the names of the rows that no test holds, but for those of later."""
    rows = [row for rows in sections.values() for row in rows]
    return [row.name for row in rows if not row.later and not held.get(row.name)]


def split_page(text):
    """Returns what stands before the table, the table, and what stands after it."""
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    return before + BEGIN, table, END + after


class ApiTable:
    """Gathers which tests hold which rows, and checks or writes the table.

    Args:
      sections: the rows.
      page: the file that holds the table.
      writes: whether to write it, rather than to compare.
      checks: whether this process has seen the reports of all marked tests.
    """

    def __init__(self, sections, page, *, writes, checks):
        self._sections, self._page = sections, page
        self._writes, self._checks = writes, checks
        self._passed, self._broken = collections.defaultdict(set), set()
        self.complaint = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        known = {row.name for rows in self._sections.values() for row in rows}
        for item in items:
            for name in (arg for mark in item.iter_markers("api_row") for arg in mark.args):
                if name not in known:
                    raise pytest.UsageError(f"{item.nodeid}: api_rows.py has no row {name!r}")
                item.user_properties.append((PROPERTY, name))

    def pytest_runtest_logreport(self, report):
        test = report.nodeid.split("[")[0]
        for key, name in report.user_properties:
            if key == PROPERTY and report.failed:
                self._broken.add(test)
            elif key == PROPERTY and report.when == "call" and report.passed:
                self._passed[name].add(test)

    @property
    def held(self):
        """Name of a row -> the tests that hold it: all their cases passed."""
        return {name: tests - self._broken for name, tests in self._passed.items()}

    def pytest_sessionfinish(self, session, exitstatus):
        if not self._checks or exitstatus != pytest.ExitCode.OK:
            return
        before, table, after = split_page(self._page.read_text())
        made = make_table(self._sections, self.held)
        empty = empty_rows(self._sections, self.held)
        if empty:
            self.complaint = "no test holds these rows of tests/api_rows.py:\n" + "\n".join(empty)
        elif self._writes:
            self._page.write_text(before + made + after)
        elif made != table:
            lines = (text.splitlines(keepends=True) for text in (table, made))
            diff = "".join(difflib.unified_diff(*lines, self._page.name, "this run", n=0))
            self.complaint = f"{diff}\nTo write what this run gives into the page: make table"
        if self.complaint:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.complaint:
            terminalreporter.section("table of the API", red=True)
            terminalreporter.write_line(self.complaint)


def sees_all(config):
    """Whether this process gets the reports of all tests with the marker, and no part of them."""
    option = config.option
    selects = (option.keyword, option.deselect, option.ignore, option.ignore_glob)
    return (
        not hasattr(config, "workerinput")
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and option.markexpr in ("", "api_row")
        and not any(selects)
        and not option.collectonly
        and not config.getoption("lf", False)
    )


def pytest_addoption(parser):
    parser.addoption(
        "--write-api-table",
        action="store_true",
        help="write the table of docs/tf_distribute_api.md",
    )


def pytest_configure(config):
    writes = config.getoption("--write-api-table")
    config.pluginmanager.register(
        ApiTable(SECTIONS, PAGE, writes=writes, checks=sees_all(config)), "api-table"
    )
