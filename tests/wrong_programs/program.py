"""A realistic wrong program beside its right version, and how it is run and checked."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from distjax.errors import CheckError, LocalityWarning, ReductionWarning

ctx = dj.get_replica_context
ON_READ, ON_WRITE = dj.VariableSynchronization.ON_READ, dj.VariableSynchronization.ON_WRITE
SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
BATCH, FEATURES = 4, 3

#: What a plain run says of a program.
ERROR, WARNING, SILENT = "error", "warning", "silent"
#: Why it says nothing of a program that `dj.check` finds, which runs it.
RUN = "where its numbers are wrong is told by running it for one replica, too"


@dataclasses.dataclass(frozen=True)
class Case:
    """One version of a program.

    Attributes:
      step: the replica function.
      args: its arguments.
      feed: the arguments of the next call, of a result; None: it is called once.
      runs: whether the step is cross-replica code, which calls `run` itself.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    feed: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] | None = None
    runs: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of the table.

    Attributes:
      build: ``build(strategy, is_right) -> Case``.
      level: the level at which a plain run tells of the wrong version.
      rule: the rule of a finding, or a part of an error's text.
      why: why the level is not higher.
      unseen: why `dj.check` finds nothing, either; "": it does.
      unequal: why the right version depends on the number of replicas, too; "": it does not.
      origin: "faults" (the list of 42) or "more".
      is_outside: whether the mistake is outside of the step, where `dj.check` does not look.
    """

    build: Callable[[Any, bool], Case]
    level: str
    rule: str
    why: str
    origin: str
    is_outside: bool
    unseen: str
    unequal: str

    @property
    def name(self) -> str:
        return self.build.__name__


TABLE: list[Program] = []


def program(
    level: str,
    rule: str = "",
    why: str = "",
    *,
    more: bool = False,
    outside: bool = False,
    unseen: str = "",
    unequal: str = "",
):
    """Adds a builder to the table."""

    def add(build: Callable[[Any, bool], Case]) -> Callable[[Any, bool], Case]:
        origin = "more" if more else "faults"
        TABLE.append(Program(build, level, rule, why, origin, outside, unseen, unequal))
        return build

    return add


# -- what the programs share ---------------------------------------------------


def on_replicas(strategy: Any, make: Callable[[int], Any]) -> Any:
    return strategy.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))


def inputs(strategy: Any) -> Any:
    draw = lambda r: np.random.default_rng(r).normal(size=(BATCH, FEATURES)).astype(np.float32)
    return on_replicas(strategy, draw)


def masks(strategy: Any) -> Any:
    return on_replicas(strategy, lambda r: np.arange(BATCH) < BATCH - r % 2)


def weights() -> Any:
    return np.full(FEATURES, 0.5, np.float32)


def errors_of(w: Any, x: Any) -> Any:
    return (x @ w - 1.0) ** 2


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean(errors_of(w, x))


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(loss_of)(w, x)


def mean(value: Any) -> Any:
    return ctx().all_reduce("mean", value)


def total(value: Any) -> Any:
    return ctx().all_reduce("sum", value)


def first_argument(result: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return result, *args[1:]


# -- running -------------------------------------------------------------------

KINDS = {LocalityWarning: WARNING, ReductionWarning: WARNING}


def run_plainly(strategy: Any, case: Case) -> tuple[str, str]:
    """Returns the level at which two plain calls tell of the program, and the texts."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            args = case.args
            for _ in range(2 if case.feed else 1):
                result = case.step(*args) if case.runs else strategy.run(case.step, args=args)
                args = case.feed(result, args) if case.feed else args
        except Exception as error:
            if not type(error).__module__.startswith("distjax") and "Fix: " not in str(error):
                raise
            return ERROR, str(error)
    texts = [str(c.message) for c in caught if c.category in KINDS]
    return (WARNING, "\n".join(texts)) if texts else (SILENT, "")


def check(strategy: Any, case: Case, **options: Any) -> tuple[Any, ...]:
    """Returns what `dj.check` finds."""
    try:
        dj.check(case.step, *case.args, strategy=None if case.runs else strategy, **options)
    except CheckError as error:
        return error.findings
    return ()


def require_silence_at(counts, build):
    """Asserts it of traces for some numbers of replicas, and of a run for the last of them.

    Args:
      counts: numbers of replicas.
      build: ``build(strategy) -> (step, *arguments)``.
    """
    for count in counts[:-1]:
        strategy = dj.VirtualStrategy(count)
        step, *args = build(strategy)
        found = check(strategy, Case(step, tuple(args)), rules_only=True)
        assert found == (), f"{count} replicas: {found}"
    strategy = dj.VirtualStrategy(counts[-1])
    require_silence(strategy, *build(strategy))


def require_silence(strategy, step, *args):
    """Asserts that neither a run of `step` nor a look at its trace has a word to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        warnings.simplefilter("error", LocalityWarning)
        strategy.run(step, args=args)
    assert dj.check(step, *args, strategy=strategy, rules_only=True) is None
