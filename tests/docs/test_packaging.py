"""What is said of the version and of the extras agrees, wherever it is said."""

import pathlib
import re
import tomllib

import pytest

import distjax as dj

ROOT = pathlib.Path(__file__).parents[2]


def test_the_version_is_one():
    assert f"\nversion: {dj.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*)\]", changelog, re.MULTILINE)[0] == dj.__version__
    assert len(changelog.splitlines()) <= 120


def test_every_extra_is_documented():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "docs" / "quick_start.md").read_text().split("| extra |")[1].split("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(extras["optional-dependencies"])


def test_tab_completion_shows_what_is_public():
    assert {"Callable", "jax"}.isdisjoint({*dir(dj), *dir(dj.layers), *dir(dj.metrics)})
    assert dir(dj.losses) == ["average_loss"]


def test_a_name_that_is_not_there():
    for name, hint in (("describe", "strategy.describe"), ("all_reduce", "replica_context()")):
        with pytest.raises(AttributeError, match=f"attribute '{name}'; there is .*{hint}"):
            getattr(dj, name)
    with pytest.raises(AttributeError, match="^module 'distjax' has no attribute 'nothing'$") as e:
        _ = dj.nothing
    assert e.value.name == "nothing" and e.value.obj is dj  # "Did you mean ...?"
