"""Which worker of pytest-xdist runs a test: one runs all tests of a file.

A plugin of pytest, which `tests/conftest.py` names. The tests of a file compile much alike: in
two workers each would trace it, and load it. `--dist loadgroup` alone deals out single tests, and
for each looks through all that it has dealt out. A group (`xdist_group`) is several files that
share what takes long to make, or one. Groups and what is slow come first, small files last, so
that no worker waits long for the other at the end.
"""

import collections

import pytest

#: Files with few tests that take long.
SLOW = {
    "tests/check/test_lines.py",
    "tests/check/test_random.py",
    "tests/differential/test_random.py",
    "tests/faults/test_first_call_interrupts.py",
    "tests/laws/test_mixed_calls.py",
    "tests/laws/test_mixed_threads.py",
    "tests/migration/test_published.py",
}


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config, log):
    """Deals out files and groups, where groups are asked for."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return nodeid.split("::")[0] if scope == nodeid else scope

    config.option.loadscopereorder = False  # the order is that of the workers
    return ByFile(config, log)


def pytest_collection_modifyitems(config, items):
    """Sorts the tests of a worker: groups, slow files, others by their number of tests."""
    if hasattr(config, "workerinput"):
        sizes = collections.Counter(item.path for item in items)
        is_slow = lambda i: i.get_closest_marker("xdist_group") or i.nodeid.split("::")[0] in SLOW
        items.sort(key=lambda item: (not is_slow(item), -sizes[item.path]))
