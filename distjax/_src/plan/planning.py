"""dj.plan.plan: one step compiled for devices that are not there, under several strategies.

Nothing is computed that the compiler says: a plan is its memory analysis, its cost analysis and its
text, each number under the user's names. What does not fit is compiled as far as the compiler goes:
it says how much is missing, and the arguments are known from the trace.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from distjax._src import jax_compat
from distjax._src.diagnostics.collectives import list_compiled, list_lowered
from distjax._src.diagnostics.explain_step import Notes, lower_step
from distjax._src.plan import reading, targets
from distjax._src.plan.report import Record, Report
from distjax._src.plan.schedule import Schedule
from distjax._src.plan.topologies import Described, describe, read_exhausted, squarest
from distjax._src.program.jit import LoweredProgram
from distjax._src.replica.arguments import function_name
from distjax._src.strategies.mirrored import MirroredStrategy
from distjax._src.strategies.sharded import (
    MIN_SPLIT_BYTES,
    CentralStorageStrategy,
    ShardedStrategy,
)
from distjax._src.strategies.strategy import Strategy
from distjax._src.tables import format_bytes
from distjax.errors import describe_value, require

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "mirrored": MirroredStrategy,
    "zero1": functools.partial(ShardedStrategy, partition="optimizer"),
    "zero2": functools.partial(ShardedStrategy, partition="gradients"),
    "zero3": functools.partial(ShardedStrategy, partition="parameters"),
    "central": CentralStorageStrategy,
}
#: No larger batch per replica is looked for.
_MOST_EXAMPLES = 2**20
#: After so many tries for the largest batch, memory does not grow evenly.
_LINES = 7


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
    found = targets.load(target) if isinstance(target, str) else target
    unknown = [s for s in strategies if s not in STRATEGIES]
    require(
        bool(strategies) and not unknown,
        "a plan needs names of strategies",
        got=", ".join(map(repr, unknown)) or describe_value(strategies),
        why="each is compiled for the topology",
        fix=f"--strategies with some of {','.join(STRATEGIES)}",
    )
    plans, with_libtpu = list[Record](), False
    for name in [squarest(names[0], n) for n in chips] or names:
        described = describe(name, slices)
        with_libtpu |= described.speeds is not None
        with jax_compat.describing(described.devices):
            for strategy in strategies:
                for axes in [{}, dict(model_axes)] if model_axes else [{}]:
                    plans += _plans(found, described, strategy, axes, dict(options or {}), batch)
    errors = [plan.pop("raised") for plan in plans]
    if all(errors):
        raise errors[0]
    libtpu = importlib.metadata.version("libtpu") if with_libtpu else ""
    name = target if isinstance(target, str) else function_name(target)
    return Report(name, jax.__version__, libtpu, tuple(plans))


def _plans(
    target: targets.Target,
    described: Described,
    name: str,
    axes: dict[str, int],
    options: dict[str, str],
    batch: bool,
) -> Iterator[Record]:
    """Yields the plans of a strategy: with default options, and with those given, if any.

    What the compiler or a strategy has raised is in there, too, as `raised`.
    """
    blank = Record(topology=described.name, slices=described.slices, chips=len(described.devices))
    blank.update(strategy=name, model_axes=axes, num_replicas=0, compiler_options={}, error="")
    blank.update(fits=None, largest_batch_per_replica=None, memory=None, flops_per_chip=None)
    blank.update(seconds_at_least=reading.seconds_at_least({}, [], None), not_split=[], notes=[])
    blank.update(collectives=Record(written=[], compiled=[]))
    blank.update(schedule={"live_bytes": [], "collectives": []}, raised=None)
    try:
        strategy = STRATEGIES[name](described.devices, model_axes=axes or None)
    except ValueError as error:
        yield Record(blank | {"error": str(error), "raised": error})
        return
    blank.update(num_replicas=strategy.num_replicas_in_sync)
    step = targets.take_step(target, strategy)
    for given in [{}, options] if options else [{}]:
        try:
            found = _planned(described, name, strategy, step, given, batch)
        except Exception as error:
            told = f"{type(error).__name__}: {error}".removesuffix(": ")
            found = {"error": told, "raised": error}
        yield Record(blank | {"compiler_options": given} | found)


def _planned(
    described: Described,
    name: str,
    strategy: Strategy,
    step: targets.Step,
    options: dict[str, str],
    batch: bool,
) -> dict[str, Any]:
    """Returns what a plan says of a step."""
    topology, limit = strategy.extended.topology, described.limit_bytes
    sizes = dict(topology.mesh.shape) if topology.mesh is not None else {}
    lowered, args, notes = _lower(strategy, step, None)
    arguments = reading.arguments_of(lowered, notes, step[0], args)
    written = list_lowered(lowered, notes.merge_lines, sizes)
    told = reading.together([*map(reading.told_of, written)])
    collectives = Record(written=told, compiled=[])
    own: dict[str, Any] = {"collectives": collectives}
    if topology.num_replicas > 1:
        own["not_split"] = [*_not_split(arguments, name)]
    compiled = _compile(lowered, options)
    if isinstance(compiled, str):
        memory = reading.memory_of_refused(arguments, limit, compiled)
        why = "it does not fit: temporaries as far as the compiler counted them"
        own |= {"fits": False, "memory": memory, "notes": [why]}
    else:
        text = compiled.as_text()
        schedule, costs = Schedule(text), compiled.cost_analysis()
        costs = costs if isinstance(costs, dict) else {}
        memory = reading.read_memory(compiled.memory_analysis(), schedule, arguments, limit)
        found = list_compiled(text, notes.merge_lines, sizes)
        collectives["compiled"], places = reading.planned_collectives(
            found, written, schedule, arguments
        )
        flops = costs.get("flops", -1)
        seconds = reading.seconds_at_least(costs, collectives.compiled, described.speeds)
        part = max(1, -(-len(schedule.live_bytes) // 200))  # of each, the largest is kept
        parts = range(0, len(schedule.live_bytes), part)
        live = [max(schedule.live_bytes[i : i + part]) for i in parts]
        own |= {
            "fits": limit is None or memory.peak_bytes <= limit,
            "memory": memory,
            "flops_per_chip": None if flops < 0 else flops,
            "seconds_at_least": seconds,
            "notes": [*_notes(memory, schedule, described)],
            "schedule": {"live_bytes": live, "collectives": places},
        }
    if batch and limit is not None and (examples := targets.batch_size(step[1])):

        def peak_of(size: int) -> float:
            tried = _compile(_lower(strategy, step, size)[0], options)
            if isinstance(tried, str):
                return reading.memory_of_refused(arguments, limit, tried).peak_bytes
            return reading.total_of(tried.memory_analysis())["peak_bytes"]

        start = examples // topology.num_replicas
        largest = largest_batch(peak_of, start, memory.peak_bytes, limit)
        own["largest_batch_per_replica"] = largest
        if largest >= _MOST_EXAMPLES:
            own["notes"].append("no larger batch was looked for: more may fit")
    return own


def _lower(
    strategy: Strategy, step: targets.Step, per_replica: int | None
) -> tuple[LoweredProgram, tuple[Any, ...], Notes]:
    notes = Notes(collects_findings=True)
    with strategy.scope():
        args = targets.place(step[1], strategy, per_replica)
        return lower_step(step[0], args, {}, None, notes, "plan"), args, notes


def _compile(lowered: LoweredProgram, options: dict[str, str]) -> Any:
    """Returns the compiled program, or what the compiler says if there is no memory for it."""
    truths = {"true": True, "false": False}  # the compiler takes no text for them
    typed: dict[str, Any] = {key: truths.get(text.lower(), text) for key, text in options.items()}
    try:
        return lowered.compile(typed or None)
    except Exception as error:
        if read_exhausted(str(error)) is None:
            raise
        return str(error)


def largest_batch(peak_of: Callable[[int], float], start: int, peak: float, limit: int) -> int:
    """Returns a batch per replica that nearly fills the memory; 0: not even one example fits.

    Memory grows about evenly with the batch, so each try is where a line nearly meets the limit:
    that through the largest batch that fits and the smallest that does not, or the two largest
    known. The first one begins at nothing, so it stays below the batch looked for. Where more
    examples take no more, the compiler computes values again to save memory, and no more are tried,
    nor where that fills the memory but for 12 %: near the limit a try takes a minute.

    Args:
      peak_of: compiles for a batch per replica, and returns its peak.
      start: a batch per replica, whose peak is known.
      peak: that peak.
      limit: the memory there is.

    Example:
      >>> tried = []
      >>> largest_batch(lambda n: tried.append(n) or 1000 + 3 * n, 8, 1024, 100_000)
      32666
      >>> tried
      [773, 32666]
    """
    known: dict[int, float] = {0: 0.0, start: peak}
    good, bad = (start, _MOST_EXAMPLES + 1) if peak <= limit else (0, start)
    while bad - good > max(1, good // 64) and known[good] <= 0.88 * limit:
        n, m = (good, bad) if bad in known else sorted(known)[-2:]
        if (slope := (known[m] - known[n]) / (m - n)) <= 0:
            break
        size = n + int((0.99 * limit - known[n]) / slope)
        if len(known) > _LINES:
            size = math.isqrt(max(good, 1) * bad)
        size = min(max(size, good + 1), bad - 1)
        known[size] = peak_of(size)
        good, bad = (size, bad) if known[size] <= limit else (good, size)
    return good


def _not_split(arguments: reading.Arguments, strategy: str) -> Iterator[Record]:
    for path, told in sorted(arguments.items(), key=lambda pair: -pair[1].bytes_per_chip):
        if not told.split and told.bytes_per_chip > MIN_SPLIT_BYTES:
            why = told.why or f"{strategy} keeps the {told.cause} on each replica"
            if not reading.KEPT.match(path):
                why = "an argument: strategies split variables and modules, which they keep"
            yield Record(name=told.name, bytes=told.bytes_per_chip, why=why)


def _notes(memory: Record, schedule: Schedule, described: Described) -> Iterator[str]:
    again = memory.output_bytes - memory.alias_bytes
    kept = sum(v.bytes_per_chip for v in memory.by_variable if not v.donated and v.cause != "batch")
    if min(again, kept) > MIN_SPLIT_BYTES:
        yield (
            f"not donating costs {format_bytes(min(again, kept))}: new values have memory beside "
            "the old; dj.jit(step, donate_argnums=...) reuses it"
        )
    if any(each.opcode == "while" for each in schedule.everywhere.values()):
        yield "the compiler counts flops and bytes in the body of a loop once"
    if described.speeds is not None:
        yield f"the least times count by the speeds published at {described.speeds.source}"
    if described.name.startswith("cpu:"):
        yield "there is no limit of memory to compare with on CPUs: everything fits"
