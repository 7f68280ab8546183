"""One cluster of Ray's for all tests in this folder, and two strategies on it."""

import os
import signal

import pytest

import distjax as dj


def make_engine(**options):
    """An engine whose processes share the tests' compiled programs."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": os.environ["DISTJAX_TESTS_PROGRAMS"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return dj.servers.RayEngine(runtime_env={"env_vars": variables}, **options)


def surroundings():
    """What starting a cluster must not change."""
    return dict(os.environ), signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts it in an empty home; returns that, and what was around before and after."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        before = surroundings()
        make_engine()
        return home, before, surroundings()


@pytest.fixture(scope="session")
def served(cluster):
    """Two workers and two servers."""
    return dj.ParameterServerStrategy(workers=2, servers=2, engine=make_engine())


@pytest.fixture(scope="session")
def coordinator(served):
    """One for most tests: its workers end with it, and others would have to start."""
    with dj.Coordinator(served) as coordinator:
        yield coordinator


@pytest.fixture(scope="session")
def bounded(cluster):
    """Two workers and one server, a bound on staleness, and all of a merge at the server."""
    return dj.ParameterServerStrategy(
        workers=2, engine=make_engine(), max_staleness=1, cut="arguments"
    )
