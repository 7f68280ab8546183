"""Random programs in which one process does something else; 30 of them are a drill."""

import pytest

from tests.drill_mark import all_drills_but
from tests.drills import misuse

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("seed", all_drills_but([5], [0, 5, 8]))
def test_a_program_agrees_or_ends_on_all(seed):
    misuse.run(misuse.draw(seed))


def test_programs_are_drawn_of_every_kind():
    drawn = [misuse.draw(seed) for seed in range(200)]
    assert drawn[7] == misuse.draw(7)
    assert all(program.meant != program.changed for program in drawn)
    assert {program.is_harmless for program in drawn} == {False, True}
    assert len({program.change for program in drawn}) > 100
