"""What the README says of the code is so: its files, packages, floors and numbers."""

import pathlib
import re

from tests.test_floors import FLOORS
from tests.wrong_programs import test_wrong_programs as wrong_programs

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def section(title):
    """The text below the heading `title`, up to the next one."""
    return re.split(r"^#+ ", TEXT.split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(title):
    """The cells of the rows of the table below `title`, its head left out."""
    rows = re.findall(r"^\| (.*) \|$", section(title), re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def test_the_files_of_the_tables_exist():
    for title in ("Where things live", "Where new code goes", "Walks"):
        paths = re.findall(r"`([\w/]+(?:\.py|/))`", section(title))
        assert len(paths) > 8, title
        for path in set(paths) - {"distjax/"}:
            assert (ROOT / "distjax" / path).exists() or (ROOT / path).exists(), path


def test_a_walk_has_at_most_twelve_files():
    walks = rows_of("Walks")
    assert len(walks) >= 5
    for line, files in walks:
        assert len(re.findall(r"`[\w/]+\.py`", files)) <= 12, line


def test_every_package_stands_at_its_floor():
    shown = {
        name: floor
        for floor, packages, _ in rows_of("Where things live")
        for name in re.findall(r"`(\w+)`", packages)
    }
    modules = set(re.findall(r"`(\w+)\.py`", section("Where things live")))
    there = {path.stem for path in (ROOT / "distjax").glob("[a-z]*") if path.name != "py.typed"}
    assert shown.keys() | modules == there
    for name, floor in shown.items():
        assert FLOORS[name] == (11 if floor == "side" else int(floor)), name
    assert max(FLOORS[name] for name in modules) < 0


def test_every_module_stands_in_the_readme_of_its_package():
    for page in (ROOT / "distjax").glob("*/README.md"):
        modules = {path.stem for path in page.parent.rglob("*.py")} - {"__init__"}
        assert modules <= set(re.findall(r"(\w+)\.py", page.read_text())), page


def test_as_many_wrong_programs_are_found_as_it_says():
    (number,) = re.findall(r"over (\d+) realistic mistakes", TEXT)
    (percent,) = re.findall(r"more\s+than (\d+)% of the mistakes", TEXT)
    levels = [row.level for row in wrong_programs.TABLE]
    loud = sum(level in (wrong_programs.ERROR, wrong_programs.WARNING) for level in levels)
    assert len(levels) > int(number)
    assert 100 * loud / len(levels) > int(percent)
