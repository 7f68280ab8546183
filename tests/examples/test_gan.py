"""The adversarial example: the strategy changes where things are, not what is drawn."""

import re

import pytest

from tests.examples.scripts import last_line

JUDGEMENT = re.compile(r"\w+: a judge is (\d+)% sure of the images, and sees (\d+) digits")


def judgment(strategy: str) -> tuple[str, str]:
    """How sure the judge is after a few steps, and how many digits it sees."""
    line = last_line("gan/train.py", "--strategy", strategy, "--replicas", "4", "--steps", "60")
    found = JUDGEMENT.fullmatch(line)
    assert found is not None, line
    return found[1], found[2]


@pytest.mark.drill
def test_split_moments_draw_the_same_images():
    """Four replicas on one device, and on four with split moments."""
    assert judgment("virtual") == judgment("sharded")
