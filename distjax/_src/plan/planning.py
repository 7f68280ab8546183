"""dj.plan.plan: one step compiled for devices that are not there, under several strategies.

Nothing is computed that the compiler says: a plan is its memory analysis, its cost analysis and its
text, each number under the user's names. What does not fit is compiled as far as the compiler goes:
it says how much is missing, and the arguments are known from the trace.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from distjax._src.diagnostics.collectives import (
    Collective,
    collective_instructions,
    list_compiled,
    list_lowered,
)
from distjax._src.diagnostics.explain_step import Notes, lower_step
from distjax._src.placement import Topology
from distjax._src.plan import targets
from distjax._src.plan.arguments import Argument, arguments_of
from distjax._src.plan.reading import planned_collectives, read_memory, seconds_at_least
from distjax._src.plan.report import NotSplit, Plan, PlannedCollective, PlannedMemory, Report
from distjax._src.plan.schedule import Schedule
from distjax._src.plan.topologies import Described, describe, read_exhausted, squarest
from distjax._src.program.jit import CompiledProgram, LoweredProgram
from distjax._src.replica.arguments import function_name
from distjax._src.strategies.mirrored import MirroredStrategy
from distjax._src.strategies.sharded import (
    MIN_SPLIT_BYTES,
    CentralStorageStrategy,
    ShardedStrategy,
)
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import PyTree
from distjax._src.user_lines import UNKNOWN
from distjax.errors import UnsupportedError, describe_value, message

_sharded = lambda partition: functools.partial(ShardedStrategy, partition=partition)
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "mirrored": MirroredStrategy,
    "zero1": _sharded("optimizer"),
    "zero2": _sharded("gradients"),
    "zero3": _sharded("parameters"),
    "central": CentralStorageStrategy,
}
#: Arrays of fewer bytes are not worth a line.
_LARGE = MIN_SPLIT_BYTES
_MOST_EXAMPLES = 2**20


def plan(
    target: targets.Target | str,
    topology: str | Sequence[str],
    *,
    slices: int = 1,
    strategies: Sequence[str] = tuple(STRATEGIES),
    chips: Sequence[int] = (),
    model_axes: Mapping[str, int] | None = None,
    batch: bool = False,
    options: Mapping[str, str] | None = None,
) -> Report:
    """Returns what a step needs and does on devices that need not be there.

    The step is compiled for each topology and strategy, and nothing is run or put on a device.

    Args:
      target: ``def target(strategy): return fn, args``, or "file.py:function" or
        "module:function". ``fn`` is what the training loop calls. Of ``args``, arrays and
        `jax.ShapeDtypeStruct`s are mirrored, and ``dj.plan.batch(tree)`` is a global batch.
      topology: "v5e:16x16" and the like, "cpu:8", or several.
      slices: how many TPU slices of that shape, with a slower network between.
      strategies: of "mirrored", "zero1", "zero2", "zero3" and "central".
      chips: numbers of chips; each takes the squarest slice of the first topology's kind.
      model_axes: sizes of axes inside of a replica; planned beside the strategy without.
      batch: whether to find the largest batch per replica that fits.
      options: compiler options; planned beside the default ones.

    Cost: a compilation for each plan, seconds to minutes.

    Raises:
      ValueError: an unknown topology or strategy. TypeError: a target that is no function of
        a strategy, or returns no step. RuntimeError: no libtpu, another one, or in use.

    Example:
      >>> def target(strategy):
      ...     with strategy.scope():
      ...         w = dj.Variable(jnp.zeros((256, 256)), name="w")
      ...     rows = jax.ShapeDtypeStruct((16, 256), jnp.float32)
      ...     fn = lambda x: strategy.run(lambda x: x @ w.value, args=(x,))
      ...     return fn, (dj.plan.batch(rows),)
      >>> (mirrored,) = dj.plan.plan(target, "cpu:8", strategies=["mirrored"]).plans
      >>> mirrored.memory.by_cause["parameters"], mirrored.memory.by_cause["batch"]
      (262144, 2048)
    """
    names = [topology] if isinstance(topology, str) else list(topology)
    found = targets.require_target(targets.load(target) if isinstance(target, str) else target)
    _require_strategies(strategies)
    plans: list[Plan] = []
    for name in [squarest(names[0], n) for n in chips] or names:
        described = describe(name, slices)
        with described.describing():
            for strategy in strategies:
                for axes in [{}, dict(model_axes)] if model_axes else [{}]:
                    one = _OneStrategy(found, described, strategy, axes)
                    plans += one.plans(options or {}, batch)
    errors = [p for p in plans if p.memory is None]
    if len(errors) == len(plans) and _failures:
        raise _failures[0]
    _failures.clear()
    is_tpu = any(p.topology.partition(":")[0] not in ("cpu", "gpu", "cuda") for p in plans)
    libtpu = _libtpu_version() if is_tpu else ""
    return Report(function_name(found), jax.__version__, libtpu, tuple(plans))


#: What was raised for the plans that failed, until a report is made.
_failures: list[Exception] = []


def _libtpu_version() -> str:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _require_strategies(strategies: Sequence[str]) -> None:
    unknown = [s for s in strategies if s not in STRATEGIES]
    if unknown or not strategies:
        raise ValueError(
            message(
                "a plan needs names of strategies",
                got=", ".join(map(repr, unknown)) or describe_value(strategies),
                why="each is compiled for the topology",
                fix=f"--strategies with some of {','.join(STRATEGIES)}",
            )
        )


class _OneStrategy:
    """A target under one strategy on one topology.

    Args:
      target: the user's function.
      described: the topology.
      name: the name of the strategy.
      model_axes: sizes of the axes inside of a replica.
    """

    def __init__(
        self, target: targets.Target, described: Described, name: str, model_axes: dict[str, int]
    ):
        self._target, self._described = target, described
        self._name, self._axes = name, model_axes

    def plans(self, options: Mapping[str, str], batch: bool) -> Iterator[Plan]:
        """Yields the plans: with default compiler options, and with those given, if any."""
        try:
            strategy = self._make_strategy()
        except (UnsupportedError, ValueError) as error:
            _failures.append(error)
            yield self._plan(0, error=str(error))
            return
        step = targets.take_step(self._target, strategy)
        for given in [{}, dict(options)] if options else [{}]:
            try:
                found = self._planned(strategy, step, given, batch)
            except Exception as error:
                _failures.append(error)
                found = self._plan(
                    strategy.num_replicas_in_sync, compiler_options=given, error=_text(error)
                )
            yield found

    def _plan(self, num_replicas: int, **own: PyTree) -> Plan:
        d = self._described
        return Plan(d.name, d.slices, len(d.devices), self._name, self._axes, num_replicas, **own)

    def _make_strategy(self) -> Strategy:
        make, devices = STRATEGIES[self._name], self._described.devices
        if not self._axes:
            return make(devices)
        if "model_axes" not in inspect.signature(make).parameters:
            raise UnsupportedError(
                message(
                    f"{self._name} needs a strategy with model axes to be planned with them",
                    got=f"model_axes={self._axes}",
                    why="each of its replicas is one device",
                    fix="--strategies mirrored with --model-axes",
                )
            )
        return make(devices, model_axes=self._axes)

    def _planned(
        self, strategy: Strategy, step: targets.Step, options: dict[str, str], batch: bool
    ) -> Plan:
        topology = strategy.extended.topology
        args, notes = step.placed(strategy), Notes(collects_findings=True)
        with strategy.scope():
            lowered = lower_step(step.fn, args, {}, None, notes, "plan")
        arguments = arguments_of(lowered, notes, step.fn, args)
        written = list_lowered(lowered, notes.merge_lines, notes.axis_sizes)
        own: dict[str, Any] = dict(
            compiler_options=options,
            written=_grouped(written, topology.axis_name),
            not_split=tuple(_not_split(arguments, self._name, topology)),
        )
        compiled, refused = _compile(lowered, options)
        if compiled is None:
            memory = read_memory(None, arguments, self._described.limit_bytes, refused)
            notes_of = ("it does not fit: temporaries as far as the compiler counted them",)
            own |= dict(fits=False, memory=memory, notes=notes_of)
        else:
            own |= self._read(compiled, arguments, notes, topology, written)
        if batch and self._described.limit_bytes is not None and step.batch_size:
            per_replica = step.batch_size // topology.num_replicas
            own["largest_batch_per_replica"] = self._largest_batch(
                strategy, step, options, per_replica, bool(own["fits"])
            )
        return self._plan(topology.num_replicas, **own)

    def _read(
        self,
        compiled: CompiledProgram,
        arguments: Sequence[Argument],
        notes: Notes,
        topology: Topology,
        written: Sequence[Collective],
    ) -> dict[str, Any]:
        text = compiled.as_text()
        schedule = Schedule(text)
        costs = compiled.cost_analysis()
        costs = costs if isinstance(costs, dict) else {}
        memory = read_memory((compiled.memory_analysis(), schedule), arguments, self._limit, None)
        found = list(
            zip(
                list_compiled(text, notes.merge_lines, notes.axis_sizes),
                collective_instructions(text),
                strict=True,
            )
        )
        collectives, places = planned_collectives(found, schedule, arguments, topology, written)
        flops = costs.get("flops")
        return dict(
            fits=self._limit is None or memory.peak_bytes <= self._limit,
            memory=memory,
            flops_per_chip=None if flops is None or flops < 0 else flops,
            seconds_at_least=seconds_at_least(
                costs, collectives, self._described.speeds, topology.num_replicas
            ),
            compiled=tuple(collectives),
            notes=tuple(_notes(memory, schedule, arguments, self._described)),
            schedule={"live_bytes": _thinned(schedule.live_bytes), "collectives": places},
        )

    @property
    def _limit(self) -> int | None:
        return self._described.limit_bytes

    def _largest_batch(
        self,
        strategy: Strategy,
        step: targets.Step,
        options: dict[str, str],
        start: int,
        start_fits: bool,
    ) -> int:
        """Returns the largest batch per replica that fits, by bisection; 0: not even one does."""

        @functools.cache
        def fits(size: int) -> bool:
            notes = Notes(collects_findings=True)
            with strategy.scope():
                args = step.placed(strategy, size)
                lowered = lower_step(step.fn, args, {}, None, notes, "plan")
            compiled, _ = _compile(lowered, options)
            if compiled is None:
                return False
            peak = read_memory((compiled.memory_analysis(), None), [], None, None).peak_bytes
            return peak <= (self._limit or peak)

        good, bad = (start, start * 2) if start_fits else (0, start)
        while good and good < _MOST_EXAMPLES and fits(bad):
            good, bad = bad, bad * 2
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return good


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _compile(lowered: LoweredProgram, options: dict[str, str]) -> tuple[Any, str]:
    """Returns the compiled program; (None, what the compiler says) if there is no memory for it."""
    try:
        return lowered.compile(options or None), ""
    except Exception as error:
        if read_exhausted(str(error)) is None:
            raise
        return None, str(error)


def _grouped(collectives: Sequence[Collective], axis: str) -> tuple[PlannedCollective, ...]:
    """Returns the collectives in the code, those of one kind and line together."""
    found: dict[tuple[str, str], list[Collective]] = {}
    for each in collectives:
        found.setdefault((each.kind, each.source), []).append(each)
    return tuple(
        PlannedCollective(
            kind,
            sum(c.result_bytes for c in those),
            those[0].over or axis,
            len(those),
            () if line == UNKNOWN else (line,),
        )
        for (kind, line), those in found.items()
    )


_WHY = {
    "mirrored": "mirrored keeps a copy on each replica",
    "zero1": "zero1 splits the state of the optimizer only",
    "zero2": "zero2 splits gradients and the state of the optimizer only",
}


def _not_split(
    arguments: Sequence[Argument], strategy: str, topology: Topology
) -> Iterator[NotSplit]:
    for each in sorted(arguments, key=lambda a: -a.bytes_per_chip):
        if each.split or each.bytes_per_chip <= _LARGE or topology.num_replicas == 1:
            continue
        if not each.is_kept:
            why = "an argument: strategies split variables and modules, which they keep"
        elif strategy == "mirrored" or (each.cause == "parameters" and strategy in _WHY):
            why = _WHY[strategy]
        elif all(math.gcd(n, topology.num_replicas) == 1 for n in each.shape):
            why = (
                f"a module's array is not padded, and {topology.num_replicas} replicas have no "
                f"divisor in common with an axis of {' x '.join(map(str, each.shape))}"
            )
        else:
            why = (
                f"{strategy} keeps state that is neither parameter nor optimizer's on each replica"
            )
        yield NotSplit(each.name, each.bytes_per_chip, why)


def _notes(
    memory: PlannedMemory, schedule: Schedule, arguments: Sequence[Argument], described: Described
) -> Iterator[str]:
    again = memory.output_bytes - memory.alias_bytes
    kept = sum(v.bytes_per_chip for v in memory.by_variable if not v.donated and v.cause != "batch")
    if again > _LARGE and kept > _LARGE:
        yield (
            f"not donating costs {_mib(min(again, kept))}: new values have memory beside the old; "
            "dj.jit(step, donate_argnums=...) reuses it"
        )
    if schedule.has_loops:
        yield "the compiler counts flops and bytes in the body of a loop once"
    if described.name.startswith("cpu:"):
        yield "there is no limit of memory to compare with on CPUs: everything fits"


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _thinned(values: Sequence[int], most: int = 200) -> list[int]:
    """Returns at most so many values: the largest of each part."""
    step = max(1, -(-len(values) // most))
    return [max(values[i : i + step]) for i in range(0, len(values), step)]
