"""Which fact a disagreement names; the texts are those that two processes exchange."""

import pytest

from distjax._src.cluster import meeting
from distjax._src.cluster.meeting import ComparedFact
from distjax.errors import AgreementError
from tests.cluster.test_ending import make_job


def agree_as(monkeypatch, *facts_of_processes):
    """Has process 0 agree with another, each with its own (name, text) pairs."""
    facts = [[ComparedFact(*pair) for pair in pairs] for pairs in facts_of_processes]
    packed = [meeting._pack(meeting._as_text(own)) for own in facts]
    answers = iter([["one digest", "another"], packed])
    monkeypatch.setattr(meeting, "job", make_job)
    monkeypatch.setattr(meeting, "exchange", lambda *said: next(answers))
    with pytest.raises(AgreementError) as caught:
        meeting.agree("the first call of step", facts[0])
    return str(caught.value)


def test_the_first_fact_that_differs_is_named(monkeypatch):
    text = agree_as(monkeypatch, [("a", "1"), ("b", "2")], [("a", "1"), ("b", "3")])
    assert "differs from process 0 in b." in text and "'3' on process 1; '2' on process 0" in text


@pytest.mark.parametrize("longer", [0, 1])
def test_where_one_text_is_truncated_both_are_compared_as_they_are(monkeypatch, longer):
    monkeypatch.setattr(meeting, "_MAX_TEXT", 60)
    facts = [[("a", "1")], [("a", "2"), ("program", "x" * 100)]]
    text = agree_as(monkeypatch, *(facts if longer else facts[::-1]))
    assert "differs from process 0 in what they do." in text and "nothing of the kind" not in text
    for number, found in enumerate(("1", "2") if longer else ("2", "1")):
        assert f'"a", "{found}"' in text.split(" on process ")[1 - number]


def test_where_a_text_begins_another_their_ends_are_shown(monkeypatch):
    text = agree_as(monkeypatch, [("program", "x" * 500)], [("program", "x" * 500 + "more")])
    assert "xmore' on process 1" in text and f"'{'x' * 100}' on process 0" in text
