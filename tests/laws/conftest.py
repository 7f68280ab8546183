"""Sequences are short: a signature is expected after two calls of it, not after many."""

import pytest

from distjax.program import signatures


@pytest.fixture(autouse=True, scope="session")
def soon_steady():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "_STEADY", 2)
        yield
