"""A new directory for checkpoints, and strategies of every kind of storage."""

import pytest
from storages import STORAGES

import distjax as dj


@pytest.fixture
def checkpointer(tmp_path):
    """A Checkpointer of a directory that does not exist yet."""
    with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        yield checkpointer


@pytest.fixture(params=list(STORAGES))
def storage(request):
    """Each kind of storage."""
    return STORAGES[request.param]()
