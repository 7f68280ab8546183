"""The table of the API: what its rows name exists, and a row without a test is found."""

import functools

import pytest

import distjax as dj
from distjax.compat import v1_12, v1_13, v1_15
from tests.api_rows import SECTIONS, Row
from tests.api_table import BEGIN, END, ApiTable, empty_rows, make_table, sees_all

pytest_plugins = ["pytester"]

ROWS = [row for rows in SECTIONS.values() for row in rows]
TWO = {
    "Rules": (
        Row("held", ("1.12", "1.13"), ("jit",)),
        Row("empty", ("1.15",)),
        Row("far", ("1.13",), later="later"),
    )
}


def test_every_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
    assert all(set(row.versions) <= {"1.12", "1.13", "1.15"} and row.versions for row in ROWS)


def test_nothing_comes_later():
    assert [row.name for row in ROWS if row.later] == []


def test_every_name_exists():
    plain = dj.VirtualStrategy(2)
    objects = {  # names that a class does not show are those of an object
        "StrategyExtended": plain.extended,
        "MultiStepContext": dj.MultiStepContext(),
        "v1_12.DistributionStrategy": v1_12.DistributionStrategy(plain),
        "v1_13.Strategy": v1_13.Strategy(plain),
        "v1_13.StrategyExtended": v1_13.Strategy(plain).extended,
        "v1_15.Strategy": v1_15.Strategy(plain),
    }
    for row in ROWS:
        for root, names in ((dj, row.here), (dj.compat, row.older)):
            for name in names:
                owner, _, member = name.rpartition(".")
                if owner in objects:
                    assert hasattr(objects[owner], member), name
                else:
                    functools.reduce(getattr, name.split("."), root)


def test_the_table():
    assert make_table(TWO, {"held": {"tests/test_a.py::test_b", "tests/test_a.py::test_a"}}) == (
        "\n**Rules**\n\n"
        "| name or rule | versions | distjax | `dj.compat` | held by |\n"
        "|---|---|---|---|---|\n"
        "| held | 1.12, 1.13 | `jit` |  | `test_a.py::test_a`<br>`test_a.py::test_b` |\n"
        "| empty | 1.15 |  |  |  |\n"
        "| far | 1.13 |  |  | later |\n\n"
    )


def test_rows_that_no_test_holds():
    assert empty_rows(TWO, {}) == ["held", "empty"]
    assert empty_rows(TWO, {"held": {"t"}, "empty": set()}) == ["empty"]


TESTS = """
import pytest

@pytest.mark.api_row("held")
@pytest.mark.parametrize("x", [1, 2])
def test_held(x):
    pass

@pytest.mark.api_row("empty")
@pytest.mark.parametrize("x", [1, 2])
def test_half(x):
    assert x == 1 or not {fails}
"""


def run(pytester, page, *, fails=False, **options):
    pytester.makeini("[pytest]\nmarkers = api_row: rows")
    pytester.makepyfile(test_rows=TESTS.format(fails=fails))
    plugin = ApiTable(TWO, page, **{"writes": False, "checks": True, **options})
    return pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin]), plugin


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the runs inside need none
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}stale\n{END}after\n")
    return path


def test_a_run_writes_the_table_and_the_next_one_agrees(pytester, page):
    result, _ = run(pytester, page)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result, _ = run(pytester, page, writes=True)
    assert result.ret == pytest.ExitCode.OK
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "`test_rows.py::test_held`" in text and "`test_rows.py::test_half`" in text
    result, plugin = run(pytester, page)
    assert result.ret == pytest.ExitCode.OK and plugin.complaint == ""


def test_a_stale_table_is_a_complaint_with_the_difference_and_the_command(pytester, page):
    _, plugin = run(pytester, page)
    assert "-stale" in plugin.complaint and "`test_rows.py::test_held`" in plugin.complaint
    assert "make table" in plugin.complaint
    assert "stale" in page.read_text()


def test_a_test_with_a_case_that_fails_holds_nothing(pytester, page):
    _, plugin = run(pytester, page, fails=True)
    assert plugin.held == {"held": {"test_rows.py::test_held"}, "empty": set()}
    assert plugin.complaint == ""  # the failure itself is complaint enough


def test_a_part_of_the_tests_is_not_checked(pytester, page):
    result, plugin = run(pytester, page, checks=False)
    assert result.ret == pytest.ExitCode.OK and plugin.complaint == ""


ALL, PART = [[], ["-m", "api_row"]], [["-k", "a"], ["-m", "slow"], ["test_rows.py"], ["--lf"]]
PART += [["--deselect", "test_rows.py::test_held"], ["--ignore", "x"], ["--collect-only"]]


@pytest.mark.parametrize(
    ("args", "all_of_them"), [(a, True) for a in ALL] + [(a, False) for a in PART]
)
def test_what_is_a_run_of_all_tests(pytester, monkeypatch, args, all_of_them):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\ntestpaths = .")
    pytester.makepyfile(test_rows="")
    assert sees_all(pytester.parseconfig(*args)) is all_of_them


def test_a_marker_that_names_no_row(pytester, page):
    pytester.makeini("[pytest]\nmarkers = api_row: rows")
    pytester.makepyfile("import pytest\n@pytest.mark.api_row('typo')\ndef test_a(): pass")
    plugin = ApiTable(TWO, page, writes=False, checks=True)
    result = pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
