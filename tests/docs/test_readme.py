"""What README and ARCHITECTURE say of the code is so: its files, packages, floors and numbers."""

import pathlib
import re

from distjax._src import hooks
from tests.test_floors import FLOORS, KERNEL

ROOT = pathlib.Path(__file__).parents[2]
#: Where a path may start: the private code, the public modules, the repository.
PLACES = (ROOT / "distjax/_src", ROOT / "distjax", ROOT)
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def section(title):
    """The text of ARCHITECTURE below the heading `title`, up to the next one."""
    below = ARCHITECTURE.split(f"# {title}\n")[1]
    return re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(title):
    """The cells of the rows of the table below `title`, its head left out."""
    rows = re.findall(r"^\| (.*) \|$", section(title), re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def packages_of(title):
    """The packages and modules of a table of floors, and the floor of each."""
    return {
        name: floor
        for floor, packages, _ in rows_of(title)
        for name in re.findall(r"`(\w+)`", packages)
    }


def test_it_is_short():
    assert len(ARCHITECTURE.splitlines()) <= 200
    assert "](ARCHITECTURE.md)" in README


def test_the_files_that_it_names_exist():
    for title in ("The path of one call", "Where new code goes", "Walks"):
        assert len(re.findall(r"`[\w/]+\.py`", section(title))) > 8, title
    for path in set(re.findall(r"`([\w/]+(?:\.py|/))`", ARCHITECTURE)) - {"distjax/"}:
        assert any((place / path).exists() for place in PLACES), path


def test_a_walk_has_at_most_twelve_files():
    walks = rows_of("Walks")
    assert len(walks) >= 5
    for line, files in walks:
        assert len(re.findall(r"`[\w/]+\.py`", files)) <= 12, line


def test_every_package_stands_at_its_floor():
    kernel, layers = packages_of("The kernel"), packages_of("The layers")
    modules = set(re.findall(r"`(\w+)\.py`", section("The kernel")))
    files = [path for place in PLACES[:2] for path in place.glob("[a-z]*")]
    there = {path.stem for path in files if path.name != "py.typed"}
    assert kernel.keys() == set(KERNEL)
    assert kernel.keys() | layers.keys() | modules == there
    for name, floor in (kernel | layers).items():
        assert FLOORS[name] == (11 if floor == "side" else int(floor)), name
    assert max(FLOORS[name] for name in modules) < 0


def test_every_event_is_in_it():
    events = {event for names, _, _ in rows_of("Events") for event in re.findall(r"`(\w+)`", names)}
    there = {name for name, value in vars(hooks).items() if isinstance(value, hooks.Event)}
    assert events == there | {"object_layers"}


def test_every_module_stands_in_the_readme_of_its_package():
    for page in (ROOT / "distjax").glob("**/README.md"):
        modules = {path.stem for path in page.parent.rglob("*.py")} - {"__init__"}
        assert modules <= set(re.findall(r"(\w+)\.py", page.read_text())), page


def test_the_files_that_a_package_readme_names_exist():
    for page in (ROOT / "distjax").glob("**/README.md"):
        own = [page.parent, *(path for path in page.parent.glob("*/") if path.is_dir())]
        for path in re.findall(r"`([\w./]+\.py)`", page.read_text()):
            places = (*own, *PLACES)
            assert any((place / path).exists() for place in places), f"{page}: {path}"
