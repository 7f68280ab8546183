"""Of random steps, `dj.check` finds those whose numbers depend on the number of replicas.

Nine of them, always the same, six of which are drills; SEEDS=500 in the environment draws more.
"""

import os

import pytest

import distjax as dj
from tests.check.problem import R, batch_of
from tests.check.random_steps import MISTAKES, Program, distance
from tests.drill_mark import all_drills_but

SEEDS = int(os.environ.get("SEEDS", "9"))
#: Rounding is below, and a mistake above.
ROUNDING, MISTAKE = 1e-4, 3e-3


def is_found(program):
    strategy = dj.VirtualStrategy(R)
    state, arrays = program.arguments()
    try:
        dj.check(program.step, state, *batch_of(strategy, *arrays), strategy=strategy)
    except dj.errors.CheckError:
        return True
    return False


@pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning")
@pytest.mark.filterwarnings("ignore::distjax.errors.LocalityWarning")
@pytest.mark.filterwarnings("ignore::distjax.errors.ReductionWarning")
@pytest.mark.parametrize(
    "seed", range(SEEDS) if "SEEDS" in os.environ else all_drills_but(range(3), range(SEEDS))
)
def test_a_random_step_with_a_mistake(seed):
    program = Program(seed, MISTAKES[seed % len(MISTAKES)]).break_it()
    apart = distance(program, R)
    if apart < ROUNDING or apart > MISTAKE:
        assert is_found(program) == (apart > MISTAKE), f"{program}; {apart:.2g} apart"


@pytest.mark.parametrize("seed", range(3))
def test_a_random_step_without_one(seed):
    program = Program(seed)
    assert distance(program, R) < ROUNDING, program
    assert not is_found(program), program
