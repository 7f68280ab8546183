"""dj.check: whether a step computes the same for R replicas as for one.

The step is run both ways, on the same rows, from the same state, and what comes out is compared.
If something differs, it is run again, with all values kept, to find the line and to try fixes. What
running cannot see (a mask that nobody reads, a batch that is equal on all replicas) the rules of
`lint` report from the same trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.check.comparing import (
    APART,
    Comparison,
    Difference,
    largest_change,
    without_quotients,
)
from distjax._src.check.locating import Break, Locator
from distjax._src.check.mending import Fix, changes, fix_text
from distjax._src.check.replay import EDITS, OWN_DRAWS, OWN_NUMBER, Options, Tags
from distjax._src.check.report import (
    describe,
    excuse_note,
    finding,
    padding_finding,
)
from distjax._src.check.runs import Arguments, Change, Rows, Run, TracedStep, Trial
from distjax._src.context import STATE, Finding, require_strategy
from distjax._src.diagnostics.explain_step import (
    CutsSteps,
    Notes,
    explaining_context,
    lower_step,
    require_compiling,
    require_outside_traces,
    with_object,
)
from distjax._src.lint.findings import UNSEEN
from distjax._src.pmap import MappedFunction
from distjax._src.program.jit import CompiledFunction, compile_on_replicas, jit
from distjax._src.program.program import Program
from distjax._src.replica.arguments import (
    function_name,
    keep_marks,
    positional_names,
    require_callable,
)
from distjax._src.strategies.strategy import Strategy
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax._src.user_lines import UNKNOWN, last_line
from distjax.errors import CheckError, UnsupportedError, describe_value, is_int, message


def check(
    fn: Callable[..., Any],
    /,
    *args: PyTree,
    strategy: Strategy | None = None,
    batch_argnums: int | Sequence[int] = (),
    rules_only: bool = False,
    tolerance: float | None = None,
    **kwargs: PyTree,
) -> None:
    """Raises if the numbers of a step depend on the number of replicas.

    Runs the step for R replicas and for one, on the same global batch, from the same state, and
    compares results and new state. Changes nothing: variables, modules and iterators are as before.
    Random numbers are the same in both runs. Meant for a test of your training step.

    Args:
      fn: a function compiled by `dj.jit` or `dj.pmap`; or a cross-replica function, which calls
        `strategy.run`; or, with `strategy`, a replica function.
      *args: its arguments, as in a call. The batch comes from `distribute_dataset`.
      strategy: the strategy whose replicas run ``fn``.
      batch_argnums: numbers of positional arguments that are parts of the batch, though they do
        not come from `distribute_dataset`: their rows are one replica's after another's.
      rules_only: whether the step is only traced, and examined by the rules that warn in a
        plain run; for a step that cannot run on one device.
      tolerance: how much of a change of state, or of a result, is rounding; default: 1e-3 of
        a change, 2e-5 of a result.
      **kwargs: its keyword arguments.

    Context: any, outside traces. Cost: two traces and compilations, on the first device; where
      something differs a few more.

    Raises:
      CheckError: something differs: what, by what factor, the line where the law breaks, and a fix
        if one was tried with success.
      UnsupportedError: the step cannot be run for another number of replicas.
      ContextError: called inside a trace, or ``fn`` would create variables.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> batch = next(iter(strategy.distribute_dataset([np.arange(4, dtype=np.float32)])))
      >>> def step(w, x):
      ...     return w - 0.1 * jax.lax.psum(jnp.mean(x), "replica")
      >>> dj.check(step, jnp.float32(1.0), batch, strategy=strategy)
      Traceback (most recent call last):
      distjax.errors.CheckError: step needs to pass dj.check...
    """
    _require_checkable(fn, strategy, "check")
    if rules_only or isinstance(strategy, CutsSteps):
        return _check_by_rules(fn, args, kwargs, strategy)
    _check_by_running(fn, args, kwargs, strategy, batch_argnums, tolerance)


def assert_replica_invariant(
    fn: Callable[..., Any],
    /,
    *args: PyTree,
    counts: Sequence[int] = (1, 2, 4),
    strategy: Strategy | None = None,
    batch_argnums: int | Sequence[int] = (),
    tolerance: float | None = None,
    **kwargs: PyTree,
) -> None:
    """Raises unless a step computes the same for several numbers of replicas.

    `dj.check` for other numbers than that of the strategy's replicas: for a test suite, which runs
    on any machine. Everything else is as there.

    Args:
      fn: as for `dj.check`.
      *args: its arguments; each number divides the rows of the batch.
      counts: the numbers of replicas; each is compared with one.
      strategy: as for `dj.check`; how many replicas it has does not matter.
      batch_argnums: as for `dj.check`.
      tolerance: as for `dj.check`.
      **kwargs: its keyword arguments.

    Context: any, outside traces.

    Raises:
      CheckError, UnsupportedError: as `dj.check`.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> (batch,) = strategy.distribute_dataset([np.arange(8, dtype=np.float32)])
      >>> def step(w, x):
      ...     return w - 0.1 * jax.lax.pmean(jnp.mean(x), "replica")
      >>> dj.testing.assert_replica_invariant(step, 1.0, batch, strategy=strategy)
    """
    _require_checkable(fn, strategy, "testing.assert_replica_invariant")
    for count in counts:
        if count > 1:
            _check_by_running(fn, args, kwargs, strategy, batch_argnums, tolerance, count)


def _require_checkable(fn: PyTree, strategy: Strategy | None, method: str) -> None:
    require_outside_traces(method)
    require_callable(fn, method)
    require_strategy(strategy, method)
    require_compiling(strategy, method)


def _check_by_running(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: Strategy | None,
    batch_argnums: int | Sequence[int],
    tolerance: float | None,
    count: int | None = None,
) -> None:
    _require_values((args, kwargs))
    _require_tolerance(tolerance)
    numbers = _as_numbers(batch_argnums, len(args))
    fn, args = with_object(fn, args)
    with explaining_context(fn, (args, kwargs), strategy, "check"):
        check = _Check(fn, args, kwargs, strategy, numbers, tolerance, count)
        found = check.findings()
    if found:
        raise CheckError(describe(function_name(fn), found), tuple(found))


def _check_by_rules(fn: PyTree, args: PyTree, kwargs: PyTree, strategy: PyTree) -> None:
    notes = Notes(collects_findings=True)
    lower_step(fn, args, kwargs, strategy, notes, "check")
    found = [finding for finding in notes.findings if finding.expected is None]
    if found:
        raise CheckError(describe(function_name(fn), found), tuple(found))


def _as_numbers(batch_argnums: PyTree, count: int) -> tuple[int, ...]:
    """Returns `batch_argnums` as a tuple; raises a ValueError for what is no such number."""
    numbers = (batch_argnums,) if is_int(batch_argnums) else batch_argnums
    if isinstance(numbers, (tuple, list)) and all(is_int(n) and 0 <= n < count for n in numbers):
        return tuple(numbers)
    raise ValueError(
        message(
            f"dj.check: batch_argnums needs numbers of the {count} positional arguments",
            got=describe_value(batch_argnums),
            why="these arguments are parts of the batch, whose rows one replica gets together",
            fix="dj.check(step, state, batch, strategy=strategy, batch_argnums=1)",
        )
    )


def _require_tolerance(tolerance: PyTree) -> None:
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is None or (is_number and tolerance > 0):
        return
    raise ValueError(
        message(
            "dj.check: tolerance needs a number above 0, or None",
            got=describe_value(tolerance),
            why="it is how much of a change of state, or of a result, is rounding",
            fix="dj.check(step, *args, strategy=strategy, tolerance=1e-2)",
        )
    )


def _require_values(call: PyTree) -> None:
    if not any(map(is_struct, jax.tree.leaves(call))):
        return
    raise UnsupportedError(
        message(
            "dj.check needs arrays with values",
            got="a jax.ShapeDtypeStruct among the arguments",
            why="it runs the step, for R replicas and for one",
            fix="dj.check(step, *args, strategy=strategy, rules_only=True); or an array of zeros",
        )
    )


class _Check:
    """One check of a step."""

    def __init__(
        self,
        fn: PyTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strategy: Strategy | None,
        batch_argnums: Sequence[int],
        tolerance: float | None,
        count: int | None,
    ):
        self._fn, self._name = fn, function_name(fn)
        self._heard: dict[Finding, None] = {}
        self._excused: dict[str, Tags] = {}  # what differs, and is meant to, and why
        mapped = fn if isinstance(fn, MappedFunction) else None
        topology = None if strategy is None else strategy.extended.topology
        if mapped is not None:
            args, kwargs = mapped.as_per_replica(args, kwargs)
        elif isinstance(fn, CompiledFunction):
            args, kwargs = fn.mark_arguments(args, kwargs)
        elif strategy is None:  # a plain call would hand on marks
            args, kwargs = keep_marks((args, kwargs))
        self._arguments = Arguments(
            args,
            kwargs,
            batch_argnums,
            topology,
            positional_names(fn),
            shares_rows=mapped is not None,
        )
        self._strategy = strategy
        self._trial = Trial(self._find_program, self._arguments, self._hear)
        compared = Comparison((*args, *kwargs.values()), tolerance, stacks=mapped is not None)
        self._compare = compared.differences
        self._count = count or self._arguments.num_replicas

    def _find_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        fn = self._fn
        if isinstance(fn, MappedFunction):
            compiled = fn.program_for(args, kwargs)
        elif self._strategy is not None:
            compiled = compile_on_replicas(self._strategy, fn)
        else:
            compiled = fn if isinstance(fn, CompiledFunction) else jit(fn)
        return compiled.new_program()

    def _hear(self, finding: Finding) -> None:
        self._heard[finding] = None

    # -- running ----------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Returns what is wrong with the step."""
        alone = self._trace_alone()
        several = TracedStep(self._trial, Options(self._count, alone.recording.draws, answers=None))
        self._several = several.run()
        self._answers = self._several.answers
        if self._answers:
            alone = TracedStep(self._trial, Options(answers=self._answers))
        self._traced_alone, self._alone = alone, alone.run()
        different = self._differences(self._several, self._alone)
        found = self._explain(different) if different else []
        found = found or self._with_other_rows(several, alone) or self._once_more(several, alone)
        return [*found, *self._of_rules(is_found=bool(found))]

    def _differences(self, several: Run, alone: Run) -> list[Difference]:
        return without_quotients(self._compare(several, alone), several, alone, self._count)

    def _once_more(self, several: TracedStep, alone: TracedStep) -> list[Finding]:
        """Runs the step once more, with the components that it has left in variables.

        Their mean may be right though they stay apart: it shows where the next step reads them.
        """
        if not self._trial.advance(self._several, self._alone):
            return []
        self._several, self._alone = several.run(), alone.run()
        different = self._differences(self._several, self._alone)
        return self._explain(different) if different else []

    def _of_rules(self, *, is_found: bool) -> list[Finding]:
        """Returns what the rules say of what running has not shown."""
        heard = [f for f in self._heard if f.expected is None]
        heard = [f for f in heard if f.level != "note" or f.rule == STATE]
        if is_found:  # which has told of state already
            notes = [excuse_note(self._excused)] if self._excused else []
            return [*(f for f in heard if f.rule in UNSEEN - {STATE}), *notes]
        return heard if self._excused else [f for f in heard if f.rule in UNSEEN]

    def _trace_alone(self) -> TracedStep:
        """Traces the step for one replica; first with all the rows that there may be."""
        try:
            return TracedStep(self._trial, Options())
        except Exception as error:
            if type(error).__module__.startswith("distjax"):  # which is none of shapes
                raise
            refused = error
        TracedStep(self._trial, Options(self._count, {}))  # raises an error of the user's own
        if self._arguments.is_guess:
            self._arguments.keep_apart()
            return self._trace_alone()
        raise UnsupportedError(_shape_text(self._name, self._count, refused)) from refused

    def _options(self, **changes: PyTree) -> Options:
        draws = self._alone.recording.draws
        return Options(self._count, draws, answers=self._answers, **changes)

    def _options_alone(self, **changes: PyTree) -> Options:
        return Options(answers=self._answers, **changes)

    def _with_other_rows(self, several: TracedStep, alone: TracedStep) -> list[Finding]:
        """Runs the step on other rows: what agrees for these may do so by chance."""
        change = _redraw(self._arguments.rows, self._count)
        if change is None:
            return []
        with_masks = several.run(change)
        different = self._differences(with_masks, alone.run(change))
        if different:
            return self._explain(different, change)
        fill = _fill_padding(self._arguments.rows, change)
        if fill is None:
            return []
        different = self._compare(several.run(fill), with_masks)
        return [padding_finding(self._name, different)] if different else []

    # -- explaining ---------------------------------------------------------------

    def _explain(
        self, different: Sequence[Difference], change: Change | None = None
    ) -> list[Finding]:
        """Returns what is wrong, and where, from runs whose values are kept."""
        wrong = self._not_by_order(self._not_by_rounding(different, change), change)
        if not wrong:
            return []
        several, locator = self._keep_values(change)
        before = self._differences(several, self._plain(change))
        keys = {d.key for d in wrong}
        wrong = [d for d in before if d.key in keys and not self._excuse(d)]
        mistakes = _mistakes_of(self._not_by_constants(wrong, several, change), locator)
        for mistake in mistakes:
            mistake.fix = self._find_fix(mistake, {d.key for d in before}, change, locator)
            mended = None if mistake.fix is None else mistake.fix.node
            if mistake.where is not None:
                mistake.line = locator.line_to_mend(mistake.where, mended)
            elif mended is not None:
                mistake.line = mended.told
        return self._tell(mistakes, is_redrawn=change is not None)

    def _keep_values(self, change: Change | None) -> tuple[Run, Locator]:
        """Runs the step both ways with all values kept.

        Returns the run of R replicas, and what finds where its values are no longer those of one.
        """
        traced = TracedStep(self._trial, self._options_alone(keeps=True))
        disturbed = [node.value for node in traced.run(self._disturb(change)).recording.nodes]
        alone = traced.run(change)
        several = TracedStep(self._trial, self._options(keeps=True)).run(change)
        nodes = several.recording.nodes, alone.recording.nodes
        written = {key: value.node for key, value in several.values.items()}
        return several, Locator(*nodes, disturbed, self._count, written)

    def _tell(self, mistakes: Sequence[_Mistake], *, is_redrawn: bool) -> list[Finding]:
        """Returns a finding for each mistake, but for what comes of another one."""
        wrong = [d for mistake in mistakes for d in mistake.wrong]
        mended = {
            id(m): {d.key for d in wrong if m.fix is not None and d.key not in m.fix.left}
            for m in mistakes
        }
        found, told = dict[int, Finding](), set[Any]()
        # A fix that mends more is of the mistake; what else it mends comes of that.
        for mistake in sorted(mistakes, key=lambda m: -len(mended[id(m)])):
            own = {d.key for d in mistake.wrong}
            if own <= told:
                continue
            own |= mended[id(mistake)]
            told |= own
            of_it = [d for d in wrong if d.key in own]
            where, fix, line = mistake.where, mistake.fix, mistake.line
            line = last_line(self._fn) if line == UNKNOWN else line
            found[id(mistake)] = finding(
                self._name, self._count, where, of_it, fix, line, is_redrawn
            )
        return [found[id(m)] for m in mistakes if id(m) in found]

    def _excuse(self, different: Difference) -> bool:
        """Returns whether a value differs by what is each replica's own, and meant to be."""
        tags = different.value.tags
        if different.what == APART:  # state stays equal, whatever it is computed from
            tags -= {OWN_NUMBER, OWN_DRAWS}
        if tags:
            self._excused[different.value.name or "the result"] = tags
        return bool(tags)

    def _not_by_rounding(
        self, different: Sequence[Difference], change: Change | None
    ) -> list[Difference]:
        """Returns what differs by more than if the rows change by a few roundings."""
        plain, disturbed = self._plain(change), self._traced_alone.run(self._disturb(change))
        left = []
        for d in different:
            own, value = plain.values.get(d.key), disturbed.values.get(d.key)
            ours = d.value.array[0] if d.value.varying else d.value.array
            if own is not None and value is not None and d.what == "differs":
                theirs = own.array[0] if own.varying else own.array
                rounding = largest_change(own.array, value.array)
                if 0 < largest_change(ours, theirs) <= 4 * rounding:
                    continue
            left.append(d)
        return left

    def _disturb(self, change: Change | None) -> Change:
        """Returns rows that differ from others by a few roundings of the step."""
        eps = self._traced_alone.eps

        def disturb(x: Rows) -> jax.Array:
            whole = x.whole if change is None else change(x)
            if jax_compat.is_key_dtype(whole.dtype) or not jnp.issubdtype(whole.dtype, jnp.inexact):
                return whole
            noise = np.random.default_rng(2).uniform(-4, 4, whole.shape)
            return (whole * (1 + eps * noise)).astype(whole.dtype)

        return disturb

    def _not_by_order(
        self, different: Sequence[Difference], change: Change | None
    ) -> list[Difference]:
        """Returns what does not depend on the order of the rows."""
        sizes = {len(rows.whole) for rows in self._arguments.rows}
        if not different or len(sizes) != 1:
            return list(different)
        order = np.random.default_rng(0).permutation(sizes.pop())
        before = change or (lambda rows: rows.whole)
        traced, axes = self._traced_alone, self._several.recording.axes
        if axes:  # each row draws its own numbers
            options = self._options_alone(axes=axes, order=tuple(map(int, order)))
            traced = TracedStep(self._trial, options)
        shuffled = traced.run(lambda rows: before(rows)[order])
        moved = {d.key for d in self._compare(shuffled, self._plain(change))}
        return self._without(different, moved, "the order of the rows")

    def _not_by_constants(
        self, wrong: list[Difference], several: Run, change: Change | None
    ) -> list[Difference]:
        """Returns what differs still if numbers such as R stand for the number of replicas."""
        if not wrong:
            return wrong
        constants = {float(self._count): 1.0, 1 / self._count: 1.0}
        nodes = several.recording.nodes  # a number of rows is another one there
        lines = {
            n.line for n in nodes if not constants.keys().isdisjoint(map(_as_float, n.literals))
        }
        options = self._options_alone(constants=constants, constant_lines=lines)
        traced = TracedStep(self._trial, options)
        if not traced.recording.used_constants:  # so there is nothing to compile
            return wrong
        agreeing = {d.key for d in wrong} - {
            d.key for d in self._compare(several, traced.run(change))
        }
        return self._without(wrong, agreeing, "a number in the code that is R, or 1 / R")

    def _without(
        self, different: Sequence[Difference], keys: Collection[PyTree], why: str
    ) -> list[Difference]:
        """Returns what differs but for what is excused, which a note tells of."""
        named = (d.value.name or "the result" for d in different if d.key in keys)
        self._excused.update((name, frozenset((why,))) for name in named)
        return [d for d in different if d.key not in keys]

    def _find_fix(
        self, mistake: _Mistake, before: Set[PyTree], change: Change | None, locator: Locator
    ) -> Fix | None:
        """Returns a fix with which nothing of a mistake differs, of those that are tried.

        Args:
          mistake: what is wrong.
          before: the keys of all that differs without it.
          change: other rows of the batch.
          locator: knows what each value is to that of one replica.
        """
        keys = {d.key for d in mistake.wrong}
        ends = [d.value.node for d in mistake.wrong if d.value.node is not None]
        tried = changes(mistake.breaks, ends, locator)
        nodes = dict.fromkeys(node for edited in tried for node in edited.nodes)
        if not nodes:
            return None
        edits = {node.place: i for i, node in enumerate(nodes)}
        unchanged = jnp.zeros(len(edits), jnp.int32)
        traced = TracedStep(self._trial, self._options(edits=edits, modes=unchanged))
        for own, edit, told, is_term in tried:
            modes = [EDITS.index(edit) if node in own else 0 for node in nodes]
            different = self._differences(traced.run(change, modes), self._plain(change))
            left = frozenset(d.key for d in different)
            if keys.isdisjoint(left) and left <= before:  # what was right still is
                return Fix(fix_text(edit, told, is_term=is_term), told, left, is_term)
        return None

    def _plain(self, change: Change | None) -> Run:
        """Returns the run of the one replica."""
        return self._alone if change is None else self._traced_alone.run(change)


def _as_float(literal: PyTree) -> float:
    """Returns a number of the code; NaN for what is none."""
    try:
        return float(literal)
    except (TypeError, ValueError):
        return float("nan")


def _shape_text(name: str, count: int, error: Exception) -> str:
    return message(
        f"{name} needs to run for one replica as for {count}, to be compared",
        got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        why="with one replica the batch has the rows of all; a number of rows, or of replicas, "
        "that is written into the step does not fit",
        fix="x.shape[0], or ctx.num_replicas_in_sync, in its place; batch_argnums=... if other "
        "arguments are the batch; or rules_only=True",
    )


# -- mistakes ---------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Mistake:
    """What is wrong by one mistake.

    Attributes:
      wrong: the values that differ.
      breaks: where the law breaks on the way to them, if that was found.
      fix: what mends them; None: nothing that was tried.
      line: where it is to be mended.
    """

    wrong: list[Difference] = dataclasses.field(default_factory=list)
    breaks: list[Break] = dataclasses.field(default_factory=list)
    fix: Fix | None = None
    line: str = UNKNOWN

    @property
    def where(self) -> Break | None:
        """The break to tell of: one whose line is known, and a reduction's, if there is one."""
        rank = lambda b: (
            b.made_by is None or not b.made_by.is_reduction or b.made_by.line == UNKNOWN,
            b.node.line == UNKNOWN,
        )
        return min(self.breaks, key=rank, default=None)


def _mistakes_of(wrong: Sequence[Difference], locator: Locator) -> list[_Mistake]:
    """Returns values that differ, by the mistake that makes them so, without what is rounding."""
    found: dict[Any, _Mistake] = {}
    lost = list[Difference]()
    for d in wrong:
        node = d.value.node
        breaks, is_rounding = ([], False) if node is None else locator.find(node)
        if is_rounding and not abs(d.factor - 1) > 0.05:
            continue
        if not breaks and node is not None and node.line != UNKNOWN:
            breaks = [Break(node)]  # right on each replica, and not in all
        if not breaks:  # its way could not be followed
            lost.append(d)
            continue
        mistake = found.setdefault(_origin_of(breaks[0], d), _Mistake())
        mistake.wrong.append(d)
        mistake.breaks.append(breaks[0])
    if lost:  # with what is known
        found.setdefault(next(iter(found), None), _Mistake()).wrong.extend(lost)
    return list(found.values())


def _origin_of(where: Break, different: Difference) -> Any:
    """Returns what values have in common that one mistake makes wrong."""
    for node in (where.made_by, where.node):
        if node is not None and node.is_reduction:
            return node.line, node.name
    return APART if different.what == APART else where.node.line


# -- other rows -----------------------------------------------------------------


def _redraw(rows: Sequence[Rows], count: int) -> Callable[[Rows], jax.Array] | None:
    """Returns other values for masks: numbers 0 and 1, with more of these on later replicas.

    A mask without zeros, or with as many on each replica, hides a wrong count. Rows are dealt out
    anew, too. None: there is no mask.
    """
    masks = [x for x in rows if _is_mask(x.whole)]
    if not masks:
        return None
    rng = np.random.default_rng(1)
    drawn: dict[int, np.ndarray] = {}
    for x in masks:
        size = len(x.whole) // count
        density = (np.arange(len(x.whole)) // max(size, 1) + 1.0) / (count + 1)
        own = rng.random(x.whole.shape) < density.reshape(-1, *[1] * (x.whole.ndim - 1))
        own[:: max(size, 1)] = True  # at least one on each replica
        drawn[id(x)] = own.astype(x.whole.dtype)
    return lambda x: jnp.asarray(drawn[id(x)]) if id(x) in drawn else x.whole


def _fill_padding(
    rows: Sequence[Rows], change: Callable[[Rows], jax.Array]
) -> Callable[[Rows], jax.Array] | None:
    """Returns the same rows, but for those that the mask of a `dj.Batch` says are padding.

    None: there is no such batch.
    """
    masks = {x.path.removesuffix("mask"): change(x) for x in rows if x.path.endswith(".mask")}
    if not masks:
        return None

    def fill(x: Rows) -> jax.Array:
        whole = change(x)
        mask = next((m for path, m in masks.items() if x.path.startswith(f"{path}data")), None)
        if mask is None or mask.ndim != 1 or len(mask) != len(whole):
            return whole
        return jnp.where(mask.reshape(-1, *[1] * (whole.ndim - 1)) != 0, whole, whole[::-1])

    return fill


def _is_mask(x: jax.Array) -> bool:
    if jax_compat.is_key_dtype(x.dtype):
        return False
    array = np.asarray(x)
    return array.size > 0 and bool(((array == 0) | (array == 1)).all())
