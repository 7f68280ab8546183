"""Eight CPU devices for every test, and the one table of strategies that laws run over.

With DISTJAX_TESTS_PLATFORM=cuda (`make accelerator`) tests run on the devices of that platform,
and rows of the table that need more of them than there are skip.
"""

import functools
import gc
import importlib.metadata
import os
import pathlib
import signal
import sys
import threading
import zlib

PLATFORM = os.environ.get("DISTJAX_TESTS_PLATFORM", "cpu")

# Kept, as the programs below are: each worker would compile 500 files again, half of what it takes
# to collect the tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Read when JAX is imported; children inherit them.
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
# Where it is installed: each worker describes TPUs that are not there, and uses none.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Most programs run once: a quarter of the time of the tests would be LLVM making them fast.
# Nearly all of them are small: parts for several threads are more work, not less time.
_QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
_IS_JAX_0_10 = importlib.metadata.version("jaxlib").startswith("0.10.")
if _IS_JAX_0_10:
    # A quarter of the time there; 0.12 has no such flag.
    _QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK_TO_COMPILE}".strip()

import jax

if PLATFORM == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts

# Compiling is most of the time of the tests, and most programs are those of the last run: JAX keys
# them by program, flags, device and version, and here by the lines that made them, which tests of
# `dj.explain` read in the compiled program. The workers of pytest-xdist share the folder.
os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "true"
_PROGRAMS = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "programs"
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("DISTJAX_TESTS_PROGRAMS", str(_PROGRAMS))
jax.config.update("jax_compilation_cache_dir", os.environ["DISTJAX_TESTS_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

import pytest
from jax._src import traceback_util  # noqa: TID251  (what is reused below has no public name)
from jax._src.interpreters import mlir  # noqa: TID251

import distjax as dj
from tests.api_table import pytest_addoption, pytest_configure  # noqa: F401  (hooks)
from tests.pairwise import pytest_collection_modifyitems  # noqa: F401  (a hook)
from tests.processes.laws import HOW
from tests.processes.laws import ROWS as SPANNING

#: Tests go to workers by files; those that take long are left to `make drill-test`.
pytest_plugins = ["tests.by_file", "tests.drill_mark"]

# A shell that runs the tests in the background has them ignore Ctrl-C, and many are about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Traces are many small objects that live for one test: by default a collection runs every 700.
gc.set_threshold(100_000, *gc.get_threshold()[1:])

REPLICA_COUNTS = (1, 2, 3, 8)


#: Arrays of tests are small: all are split.
_zero = functools.partial(dj.ShardedStrategy, min_split_bytes=0)


def _table():
    """Yields a name for the test id, what makes the strategy, and how many devices that takes."""
    yield "default", lambda devices: dj.get_strategy(), 1
    yield "one_device", lambda devices: dj.OneDeviceStrategy(), 1
    for n in REPLICA_COUNTS:
        yield f"mirrored{n}", dj.MirroredStrategy, n
        yield f"virtual{n}", lambda devices, n=n: dj.VirtualStrategy(n), 1
        for part in ("optimizer", "gradients", "parameters"):
            yield f"{part}{n}", functools.partial(_zero, partition=part), n
        yield f"central{n}", dj.CentralStorageStrategy, n
    yield "servers", lambda devices: dj.ParameterServerStrategy(2, 2), 1
    yield "groups", lambda devices: dj.ParameterServerStrategy([devices[:2], devices[2:]], 2), 4
    for n in (1, 2, 3):  # two devices for each replica: eight devices have no R = 8
        make = functools.partial(dj.MirroredStrategy, model_axes={"model": 2})
        yield f"two_each{n}", make, 2 * n
    for part in ("optimizer", "gradients", "parameters"):
        make = functools.partial(_zero, partition=part, model_axes={"model": 2})
        yield f"{part}_two_each2", make, 4
    make = functools.partial(dj.CentralStorageStrategy, model_axes={"model": 2})
    yield "central_two_each2", make, 4


def _devices(n):
    """Returns the first ``n`` devices; where an accelerator has fewer, the test skips."""
    if jax.device_count() < n:
        pytest.skip(f"needs {n} devices; {PLATFORM} has {jax.device_count()} here")
    return jax.devices()[:n]


#: Every way to run a step in one process: sharded strategies by what they split.
STRATEGIES = {name: (lambda make=make, n=n: make(_devices(n))) for name, make, n in _table()}

#: A row of each kind, and each number of replicas: for tests of what is built on strategies.
SAMPLE = "default one_device mirrored8 virtual3 parameters2 central3 two_each2".split()

#: Where tests of two replicas ask how these are made, on two devices and on one: each test runs on
#: both. Elsewhere one test runs on two devices, and the next one on one.
OF_REPLICAS = ("collectives", "conformance", "placement", "replica", "strategies", "variables")
PAIR = ["mirrored2", "virtual2"]


#: Rows whose programs are those of another row: `conformance/test_same_program.py` shows it, and
#: the laws run over the other one. (ZeRO 2 stays once, for values that are reduced to a variable.)
SAME_PROGRAM = {
    **{f"optimizer{n}": f"mirrored{n}" for n in REPLICA_COUNTS},
    **{f"gradients{n}": f"mirrored{n}" for n in (1, 2, 8)},
    "parameters1": "mirrored1",
    **{f"{part}_two_each2": "two_each2" for part in ("optimizer", "gradients")},
}

#: Laws need not all counts of every kind: `mirrored` and `virtual` have 1 replica, `mirrored` has
#: 8, and all but `two_each` have 3, no power of two. Other tests have 2: the fixture `pair`.
OTHER_COUNTS = {
    *("mirrored2", "virtual2", "virtual8", "parameters2", "parameters8"),
    *("central1", "central2", "central8", "two_each1", "two_each3"),
}

#: Rows that others have parts of: laws run over them in `make drill-test`. (What the devices of a
#: replica divide, and the replicas too, is `strategies/test_split_within_replicas.py`.)
DRILLS = {"mirrored1", "parameters_two_each2", "central_two_each2"}

#: A row of each way to keep variables: laws run over these both eagerly and in `dj.jit`.
BOTH_WAYS = {"mirrored3", "virtual3", "parameters3", "central3", "servers"}

#: Laws that are not those of parameter servers, and why.
NOT_AT_SERVERS = {
    **dict.fromkeys(
        "test_r167_strategy_of_a_variable test_defaults test_r215_r219_write_in_a_replica "
        "test_r223_assign_returns_the_component test_written_in_a_replica "
        "test_written_in_cross_replica_context test_refused_in_cross_replica_context "
        "test_written_in_an_update test_read".split(),
        "ON_READ variables with another aggregation than SUM are refused",
    ),
    "test_guarded_creation": "variables are made before a step",
    "test_refused_in_a_replica": "each worker may write, whatever the aggregation",
    "test_a_per_replica_value_is_not_assigned_across": "a worker has bare values",
}

#: Laws that hold of replicas that are the workers of parameter servers, too: the rest is that of
#: `servers`, or of replicas on one device.
OF_GROUPS = ("test_merging", "test_running", "test_updating")


def _asks_for(metafunc, name):
    """Whether a test takes a fixture of this file, which its module does not have of its own."""
    of_its_own = [*vars(metafunc.module)]
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        of_its_own += names.replace(",", " ").split() if isinstance(names, str) else names
    return name in metafunc.fixturenames and name not in of_its_own


def pytest_generate_tests(metafunc):
    """Laws (`tests/conformance`) run over the whole table, other tests over the sample.

    A part of both are drills: by turns, so that each row has tests of each module.

    A module that has a fixture ``strategy`` of its own chooses itself, and so does `tests/check`.
    """
    folder = metafunc.definition.path.parent.name
    names, rows, drills = [], [], DRILLS
    first = zlib.crc32(metafunc.function.__name__.encode())
    if _asks_for(metafunc, "strategy") and folder != "check":
        names, rows = ["strategy"], SAMPLE
        if folder != "conformance":
            drills = SAMPLE[first % 2 :: 2]
        else:
            rows = [row for row in STRATEGIES if row not in {*SAME_PROGRAM, *OTHER_COUNTS}]
            rows += SPANNING if PLATFORM == "cpu" else []  # one process to accelerators
        if metafunc.function.__name__ in NOT_AT_SERVERS:
            rows = [row for row in rows if row not in ("servers", "groups")]
        if metafunc.definition.path.stem not in OF_GROUPS:
            rows = [row for row in rows if row != "groups"]
    elif _asks_for(metafunc, "pair"):
        names, rows = ["pair"], PAIR
        if folder not in OF_REPLICAS:
            rows = [PAIR[first % 2], PAIR[not first % 2]]
    if _asks_for(metafunc, "how"):
        if not names:
            metafunc.parametrize("how", list(HOW), indirect=True)
        elif folder in OF_REPLICAS:
            names, rows = [*names, "how"], _with_each_how(rows, first)
        else:
            names, rows = [*names, "how"], _with_how(names, rows, first)
    elif names == ["pair"] and folder not in OF_REPLICAS:
        rows = rows[:1]
    if names:
        rows = [row if isinstance(row, tuple) else (row,) for row in rows]
        marks = [pytest.mark.table] if "strategy" in names else []
        drill = [*marks, pytest.mark.drill] if PLATFORM == "cpu" else marks
        is_drill = lambda row, how=None, is_other=False: row in drills or is_other
        rows = [
            pytest.param(*row[: len(names)], marks=drill if is_drill(*row) else marks)
            for row in rows
        ]
        metafunc.parametrize(names, rows, indirect=True)


def _with_each_how(rows, first):
    """Yields each row called both ways, and whether that is a drill: of most rows one way is."""
    for number, row in enumerate(rows):
        for i, how in enumerate(HOW):
            yield row, how, row not in BOTH_WAYS and (first + number + i) % len(HOW) > 0


def _with_how(names, rows, first):
    """Returns rows with how each is called: that `dj.jit` changes nothing is a law."""
    if names == ["pair"]:
        return [*zip(rows, reversed(HOW), strict=True)]
    # Of a sample every second row is a drill: those that are not are called both ways by turns.
    called = [(row, [*HOW][(first // 2 + i // 2) % len(HOW)]) for i, row in enumerate(rows)]
    return called + [("mirrored8", how, True) for how in HOW if ("mirrored8", how) not in called]


def _reuse(make, uses=10):
    """Returns what ``make`` made, ``uses`` times in each thread."""
    made = threading.local()

    def make_seldom():
        if not getattr(made, "uses_left", 0):
            made.context, made.uses_left = make(), uses
        made.uses_left -= 1
        return made.context

    return make_seldom


if _IS_JAX_0_10:
    # JAX 0.12 does it itself: to load the dialects of a new MLIR context takes 2.6 ms for each
    # program that is lowered, a tenth of the time of tests of many small programs.
    mlir.make_ir_context = _reuse(mlir.make_ir_context)

# JAX asks the disk about the file of each frame of each error that passes it, 20 ms an error.
traceback_util._path_starts_with = functools.cache(traceback_util._path_starts_with)


def _in_one_chunk(fn, /, *args, **kwargs):
    """Calls ``fn`` with room on the stack for all that it calls.

    Python keeps frames in chunks of 16 KiB, and unmaps one when its last frame returns: a loop
    that calls across an edge maps memory each time, and JAX's traces are deep. A frame this large
    gets a chunk of 1 MiB, half of it for the frames above: 4 % of the time of the tests.
    """
    return fn(*args, **kwargs)


_in_one_chunk.__code__ = _in_one_chunk.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Each test runs `_in_one_chunk`."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.update_wrapper(functools.partial(_in_one_chunk, test), test)
    return (yield)


def pytest_collection_finish():
    """Does not look again at what lives as long as the run: modules, and a lot of tests."""
    gc.freeze()


def pytest_sessionfinish():
    """pytest collects garbage several times at its end, to report what was left to close."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def strategy(request):
    """Each strategy of the table (or of its sample), made anew; the name of one that spans."""
    return request.param if request.param in SPANNING else STRATEGIES[request.param]()


@pytest.fixture
def make_another(request):
    """Makes one more strategy of the same row of the table."""
    return STRATEGIES.get(request.node.callspec.params["strategy"])


@pytest.fixture
def pair(request):
    """Two replicas, on two devices and on one."""
    return STRATEGIES[request.param]()


@pytest.fixture
def mirrored():
    """Two replicas on two devices."""
    return STRATEGIES["mirrored2"]()


@pytest.fixture
def how(request):
    """What a cross-replica function is passed through: nothing, or `dj.jit`."""
    return HOW[request.param]


@pytest.fixture
def checkpointer(tmp_path):
    """A Checkpointer of a directory that does not exist yet."""
    with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        yield checkpointer


def collect_and_freeze():
    """Collects garbage, and does not look again at what is left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_what_is_left():
    """After each module, nothing looks again at what it leaves, most of it in JAX's caches.

    What a full collection and `gc.get_referrers` look at grows during a run, to millions of
    objects. distjax looks so for the object that an array comes from (`find_baked`) wherever a
    program with constants is compiled: late in a run, that was more than the compilation.
    """
    yield
    collect_and_freeze()


@pytest.fixture
def collect_garbage():
    """Collects what a test has left: to look at all that JAX keeps would take seconds.

    `jax.checking_leaks` collects at the end of each trace.
    """
    collect_and_freeze()
    return gc.collect


@pytest.fixture
def switch_often():
    """Threads take turns at every chance: more goes wrong between two, where something can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(autouse=True)
def clean_context():
    """After each test, whatever it raised, the default context is active."""
    yield
    clean = not dj.has_strategy() and not dj.in_cross_replica_context()
    dj.set_strategy(None)  # so that one test that fails does not fail the next
    assert clean, "the test left a strategy active"
