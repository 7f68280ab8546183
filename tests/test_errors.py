"""distjax's own errors: one base, and a text in four parts."""

import pickle

import pytest

from distjax import errors

OWN = [kind for name, kind in vars(errors).items() if name.endswith("Error") and name != "Error"]
PARTS = {"got": "y", "why": "z", "fix": "f(x)"}


@pytest.mark.parametrize("kind", OWN)
def test_each_has_the_common_base_and_one_of_pythons(kind):
    assert len(OWN) > 15
    assert issubclass(kind, errors.Error)
    assert issubclass(kind, (RuntimeError, ValueError, IndexError))


@pytest.mark.parametrize("kind", [errors.LocalityError, errors.DivergenceError])
def test_an_error_takes_its_text_in_parts_or_whole(kind):
    error = kind("f() needs x", **PARTS)
    assert str(error) == "f() needs x.\n  Got: y.\n  Why: z.\n  Fix: f(x)"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert str(kind("mine")) == "mine" and str(kind()) == ""
