"""No record is left out: each file is replayed as a whole, and each ruling is about a record."""

import importlib
import json

import pytest

from tests.golden.records import DATA, Record, load

AREAS = sorted(path.stem for path in DATA.glob("*.json"))


def module_of(area):
    return importlib.import_module(f"tests.golden.test_golden_{area}")


def replayed(module):
    """Returns the ids of the records that the module's test "... as recorded" runs over."""
    tests = [fn for name, fn in vars(module).items() if name.endswith("as_recorded")]
    rows = [row for fn in tests for mark in fn.pytestmark for row in mark.args[1]]
    values = [value for row in rows for value in getattr(row, "values", [row])]
    return {value.id for value in values if isinstance(value, Record)}


@pytest.mark.parametrize("area", AREAS)
def test_every_record_is_replayed(area):
    records = load(area)
    ids = {record.id for record in records}
    assert len(ids) == len(records) > 0
    assert replayed(module_of(area)) == ids


@pytest.mark.parametrize("area", AREAS)
def test_every_ruling_is_about_some_record(area):
    rulings = getattr(module_of(area), "RULINGS", [])
    idle = [r.ids for r in rulings if not any(r.holds_for(record) for record in load(area))]
    assert not idle


@pytest.mark.parametrize("area", AREAS)
def test_every_file_says_where_it_comes_from(area):
    head = json.loads((DATA / f"{area}.json").read_text())
    assert head["tensorflow"].startswith("2.21.")
    script = DATA.parents[2] / head["recorded_by"]
    assert script.stem == area and script.exists()
    assert head["devices"] == "8 virtual CPU devices"
