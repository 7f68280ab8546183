"""dj.check: whether a step computes the same for R replicas as for one.

The step is run both ways, on the same rows, from the same state, and what comes out is compared.
If something differs, it is run again, with all values kept, to find the line and to try fixes. What
running cannot see (a mask that nobody reads, a batch that is equal on all replicas) the rules of
`lint` report from the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.check.comparing import APART, Comparison, Difference
from distjax._src.check.locating import Break, Locator, reductions_before
from distjax._src.check.replay import OWN_DRAWS, OWN_NUMBER, Node
from distjax._src.check.report import describe, finding, fix_text
from distjax._src.check.runs import Arguments, Options, Rows, Run, TracedStep, Trial
from distjax._src.context.reporting import STATE, Finding
from distjax._src.context.scoping import require_strategy
from distjax._src.diagnostics.explain_step import CutsSteps, Notes, lower_step, require_compiling
from distjax._src.lint.facts import EQUAL_BATCH
from distjax._src.program.jit import CompiledFunction, compile_on_replicas, jit
from distjax._src.program.program import Program
from distjax._src.replica.arguments import (
    function_name,
    positional_names,
    require_callable,
)
from distjax._src.strategies.pmap import MappedFunction
from distjax._src.strategies.strategy import Strategy
from distjax._src.traced_types import is_struct
from distjax._src.typing import PyTree
from distjax.errors import CheckError, UnsupportedError, message

#: What `lint` finds that running does not show.
UNSEEN = frozenset(
    (
        EQUAL_BATCH,
        STATE,
        "padded examples counted",
        "replica 0's initial value wins",
        "the same random numbers on every replica",
    )
)
#: How many fixes are tried.
_MOST_TRIED = 8


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
      distjax.errors.CheckError: step needs to compute the same for 2 replicas as for one...
    """
    require_callable(fn, "check")
    require_strategy(strategy, "check")
    require_compiling(strategy, "check")
    if rules_only or isinstance(strategy, CutsSteps):
        return _check_by_rules(fn, args, kwargs, strategy)
    _require_values((args, kwargs))
    numbers = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    found = _Check(fn, args, kwargs, strategy, numbers, tolerance).findings()
    if found:
        name = function_name(fn)
        count = next(f for f in found)
        raise CheckError(_text(name, found), tuple(found))


def _text(name: str, found: Sequence[Finding]) -> str:
    return describe(name, found)


def _check_by_rules(fn: Any, args: Any, kwargs: Any, strategy: Any) -> None:
    notes = Notes(collects_findings=True)
    lower_step(fn, args, kwargs, strategy, notes, "check")
    found = [finding for finding in notes.findings if finding.expected is None]
    if found:
        raise CheckError(describe(function_name(fn), found), tuple(found))


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
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strategy: Strategy | None,
        batch_argnums: Sequence[int],
        tolerance: float | None,
    ):
        self._fn, self._name = fn, function_name(fn)
        self._heard: dict[Finding, None] = {}
        self._excuses = False  # something differs, and is meant to
        mapped = fn if isinstance(fn, MappedFunction) else None
        topology = None if strategy is None else strategy.extended.topology
        if mapped is not None:
            args, kwargs = mapped.as_per_replica(args, kwargs)
        self._arguments = Arguments(
            args,
            kwargs,
            batch_argnums,
            topology,
            positional_names(fn),
            shares_rows=mapped is not None,
        )
        self._strategy = strategy
        stacks = mapped is not None and mapped.stacks
        self._trial = Trial(self._find_program, self._arguments, self._hear, stacks=stacks)
        self._compare = Comparison(args, tolerance).differences
        self._count = self._arguments.num_replicas

    def _find_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        fn = self._fn
        if isinstance(fn, MappedFunction):
            compiled = fn.program_for(args, kwargs).fresh_copy()
        elif self._strategy is not None:
            compiled = compile_on_replicas(self._strategy, fn, ())
        else:
            compiled = fn.fresh_copy() if isinstance(fn, CompiledFunction) else jit(fn)
        return compiled.current_program()

    def _hear(self, finding: Finding) -> None:
        self._heard[finding] = None

    # -- running ----------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Returns what is wrong with the step."""
        alone = TracedStep(self._trial, Options())
        self._alone = alone.run()
        several = TracedStep(self._trial, self._options())
        self._several = several.run()
        different = self._compare(self._several, self._alone)
        found = []
        if different:
            found = self._explain(different)
        if not different:
            found = self._with_other_rows(several, alone)
        seen = {f.rule for f in found}
        heard = [f for f in self._heard if f.expected is None and f.rule not in seen]
        if found or not self._excuses:
            heard = [f for f in heard if f.rule in UNSEEN]
        return [*found, *(f for f in heard if f.level != "note" or f.rule == STATE)]

    def _options(self, **changes: Any) -> Options:
        return Options(count=self._count, mates=self._alone.recording.draws, **changes)

    def _with_other_rows(self, several: TracedStep, alone: TracedStep) -> list[Finding]:
        """Runs the step on other rows: what agrees for these may do so by chance."""
        change = _redraw(self._arguments.rows, self._count)
        if change is None:
            return []
        different = self._compare(several.run(change), alone.run(change))
        if not different:
            return []
        self._change = change
        return self._explain(different, change)

    # -- explaining ---------------------------------------------------------------

    def _explain(self, different: Sequence[Difference], change: Any = None) -> list[Finding]:
        """Returns what is wrong, and where, from runs whose values are kept."""
        alone = TracedStep(self._trial, Options(keeps=True)).run(change)
        several = TracedStep(self._trial, self._options(keeps=True)).run(change)
        different = self._compare(several, alone)
        locator = Locator(several.recording.nodes, alone.recording.nodes, self._count)
        wrong = [d for d in different if not self._is_excused(d)]
        self._excuses |= len(wrong) < len(different)
        wrong = self._not_by_order(wrong, several, alone, change)
        wrong = self._not_by_constants(wrong, several, change)
        groups: dict[Any, list[tuple[Break | None, Difference]]] = {}
        for d in wrong:
            node = d.value.node
            breaks, is_rounding = ([], False) if node is None else locator.find(node)
            if is_rounding and not abs(d.factor - 1) > 0.05:
                continue
            first = breaks[0] if breaks else None
            groups.setdefault(_origin_of(first, d), []).append((first, d))
        return [
            finding(
                self._name,
                self._count,
                [b for b, _ in group if b is not None],
                [d for _, d in group],
                self._find_fix(group, several, change),
                change is not None,
            )
            for group in groups.values()
        ]

    @staticmethod
    def _is_excused(different: Difference) -> bool:
        """Returns whether a value differs by what is each replica's own, and meant to be."""
        tags = different.value.tags
        if different.what == APART:  # state stays equal, whatever it is computed from
            tags -= {OWN_NUMBER, OWN_DRAWS}
        return bool(tags)

    def _not_by_order(
        self, wrong: list[Difference], several: Run, alone: Run, change: Any
    ) -> list[Difference]:
        """Returns what does not depend on the order of the rows either."""
        sizes = {len(rows.whole) for rows in self._arguments.rows}
        if not wrong or len(sizes) != 1:
            return wrong
        order = np.random.default_rng(0).permutation(sizes.pop())
        options = Options(axes=several.recording.axes, order=tuple(map(int, order)))
        before = change or (lambda rows: rows.whole)
        shuffled = TracedStep(self._trial, options).run(lambda rows: before(rows)[order])
        moved = {d.key for d in self._compare(shuffled, alone)}
        return [d for d in wrong if d.key not in moved]

    def _not_by_constants(
        self, wrong: list[Difference], several: Run, change: Any
    ) -> list[Difference]:
        """Returns what differs still if numbers such as R stand for the number of replicas."""
        if not wrong:
            return wrong
        constants = {float(self._count): 1.0, 1 / self._count: 1.0}
        run = TracedStep(self._trial, Options(constants=constants)).run(change)
        if not run.recording.used_constants:
            return wrong
        left = {d.key for d in self._compare(several, run)}
        return [d for d in wrong if d.key in left]

    def _find_fix(
        self, group: Sequence[tuple[Break | None, Difference]], several: Run, change: Any
    ) -> str | None:
        """Returns a fix with which nothing of this differs, among a few that are tried."""
        keys = {d.key for _, d in group}
        for nodes, edit in _candidates(group, several)[:_MOST_TRIED]:
            edits = {node.place: edit for node in nodes}
            run = TracedStep(self._trial, self._options(edits=edits)).run(change)
            if not keys.intersection(d.key for d in self._compare(run, self._plain(change))):
                return fix_text(edit, nodes[0])
        return None

    def _plain(self, change: Any) -> Run:
        if change is None:
            return self._alone
        return TracedStep(self._trial, Options()).run(change)


def _origin_of(where: Break | None, different: Difference) -> Any:
    """Returns what values have in common that one mistake makes wrong."""
    if where is None:
        return different.what
    made_by = where.made_by
    if made_by is not None and made_by.is_reduction:
        return made_by.line, made_by.name
    return APART if different.what == APART else where.node.line


def _candidates(
    group: Sequence[tuple[Break | None, Difference]], several: Run
) -> list[tuple[tuple[Node, ...], str]]:
    """Returns changes that may mend a step, the likeliest first.

    A change is of all values that one line computes: the leaves of a tree of gradients.
    """
    breaks = [b for b, _ in group if b is not None]
    tried: list[tuple[tuple[Node, ...], str]] = []
    made = [b for b in breaks if b.made_by is not None and b.made_by.is_reduction]
    if made:
        first = made[0]
        power = 0 if first.kind is None else first.kind.power
        nodes = _alike(first.made_by, several)
        edits = ("divided", "without") if power > 0 else ("multiplied", "without", "divided")
        tried += [(nodes, edit) for edit in edits]
    came_in = tuple(b.came_in for b in breaks if b.came_in is not None and b not in made)
    if came_in:
        tried += [(came_in, "averaged"), (came_in, "summed")]
    starts = [b.node for b in breaks] or [d.value.node for _, d in group if d.value.node]
    for node in reductions_before(starts)[:2]:
        nodes = _alike(node, several)
        tried += [(nodes, edit) for edit in ("divided", "multiplied", "without")]
    return list(dict.fromkeys(tried))


def _alike(node: Node | None, several: Run) -> tuple[Node, ...]:
    """Returns the values that the same line computes in the same way."""
    nodes = several.recording.nodes
    return tuple(n for n in nodes if node and (n.line, n.name) == (node.line, node.name))


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


def _is_mask(x: jax.Array) -> bool:
    if jax_compat.is_key_dtype(x.dtype):
        return False
    array = np.asarray(x)
    return array.size > 0 and bool(((array == 0) | (array == 1)).all())
