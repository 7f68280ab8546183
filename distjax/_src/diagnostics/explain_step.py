"""dj.explain: what a step communicates, costs and proves, without running it; and dj.check.

Proofs are made while a program is traced, and only there are they tied to the user's paths. So the
step is traced anew, into a program of its own, which is discarded, while `Notes` listen (see
`hooks`). Shape-only traces (loops before their fixpoint, merge functions before localities are
known) run unheard, since their findings may not hold. Creating a variable
meanwhile is an error, raised in the constructor, so that no attribute is set.

With servers the collectives are those of a worker's programs, which run on its devices; all else
is read from the step as one program. Cutting a step traces merges unheard, so an operation of a
library in a merge has no line there.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from distjax._src import hooks, jax_compat, user_lines
from distjax._src.context import Finding, frames, require_strategy
from distjax._src.diagnostics.collectives import list_compiled, list_lowered, merge_scope, user_line
from distjax._src.diagnostics.explanation import (
    Cut,
    EqualReduction,
    Explanation,
    Memory,
    RunProof,
    VariableUse,
)
from distjax._src.lint import layer
from distjax._src.lint.between_runs import is_own, recall
from distjax._src.objects.stateful import written_names
from distjax._src.placement import PerReplica, Topology, is_per_replica
from distjax._src.placement import topology as kinds
from distjax._src.pmap import MappedFunction
from distjax._src.program.jit import (
    CompiledFunction,
    CompiledProgram,
    LoweredProgram,
    compile_on_replicas,
    jit,
)
from distjax._src.replica.analysis import Analysis
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    is_array_or_struct,
    keep_marks,
    mark_modules,
    positional_names,
    require_callable,
    user_path,
)
from distjax._src.replica.global_value import GlobalValue
from distjax._src.replica.trace import TracedRun
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import PyTree
from distjax._src.user_lines import keep_user_lines
from distjax._src.variables.conversion import is_number
from distjax._src.variables.state import PARTS_OF
from distjax.errors import ContextError, UnsupportedError, message

#: A path in the user's tree, and whether the value there may vary per replica (T).
Proof = tuple[str, bool]
_LETTERS = {kinds.MIRRORED: "M", kinds.PER_REPLICA: "T"}


@runtime_checkable
class CutsSteps(Protocol):
    """A strategy that splits steps into parts for workers and parts for servers."""

    def describe_cut(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> tuple[Cut, Sequence[jax.stages.Lowered]]:
        """Returns the parts of a step; and a worker's, lowered, if it has several devices."""
        ...


def explain(
    fn: Callable[..., Any],
    /,
    *args: PyTree,
    strategy: Strategy | None = None,
    full: bool = False,
    **kwargs: PyTree,
) -> Explanation:
    """Returns what a step communicates, costs and proves; runs and changes nothing.

    The step is traced again and compiled for these arguments: its Python side effects recur.

    Args:
      fn: a function compiled by `dj.jit`; or a cross-replica function, which calls
        `strategy.run`; or, with `strategy`, a replica function.
      *args: its arguments, as in a call.
      strategy: the strategy whose replicas run ``fn``.
      full: print a line for each array and collective, however many there are; otherwise what
        does not fit a screen is grouped by line and by module.
      **kwargs: its keyword arguments.

    Returns:
      An `Explanation`: collectives with bytes and the user's lines, flops, memory, the
      proofs, and reductions of values that are equal already. If the replicas share one
      device, nothing is communicated and no collective is listed.

    Context: any, outside traces. Cost: one trace and one compilation; if the workers of a
      `ParameterServerStrategy` have several devices, one more for each of their programs.

    Raises:
      ContextError: called inside a trace, or ``fn`` would create variables.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> def step(x):
      ...     return dj.get_replica_context().all_reduce("sum", x)
      >>> found = dj.explain(step, jnp.ones(3), strategy=strategy)
      >>> found.written_counts, found.results
      ({'all-reduce': CollectiveCount(num_ops=1, result_bytes=12)}, {'': 'M'})
      >>> [each.what for each in found.equal_reductions]  # x is equal on both replicas
      ['psum']
    """
    fn, args = with_object(fn, args)
    notes = Notes()
    lowered = lower_step(fn, args, kwargs, strategy, notes, "explain")
    compiled = lowered.compile()
    cutting = strategy if isinstance(strategy, CutsSteps) else None
    cut, of_worker = cutting.describe_cut(fn, args, kwargs) if cutting else (None, ())
    texts = [program.as_text() or "" for program in (compiled, *(p.compile() for p in of_worker))]
    arguments, known = _arguments(fn, args, kwargs), (notes.merge_lines, notes.axis_sizes)
    return Explanation(
        name=function_name(fn),
        arguments={path: notes.letter(leaf) for path, leaf in arguments.items()},
        results=dict(notes.results),
        runs=tuple(notes.runs),
        variables=_variables(notes),
        written=tuple(c for p in (lowered, *of_worker) for c in list_lowered(p, *known)),
        compiled=tuple(c for text in texts for c in list_compiled(text, *known)),
        flops=_flops(compiled),
        memory=_memory(compiled),
        equal_reductions=tuple(notes.equal_reductions),
        findings=tuple(notes.findings),
        possible_rows=_possible_rows(arguments, {run.num_replicas for run in notes.runs}),
        cut=cut,
        full=full,
    )


def lower_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: Strategy | None,
    notes: Notes,
    method: str,
) -> LoweredProgram:
    """Traces a step again and returns it lowered; `notes` hears what the traces prove.

    Without a strategy, whose replicas run it, ``fn`` is cross-replica code. `method` is the public
    function that the user called, for errors.
    """
    require_outside_traces(method)
    require_callable(fn, method)
    require_strategy(strategy, method)
    require_compiling(strategy, method)
    fn, args = with_object(fn, args)
    if strategy is not None:
        args, kwargs = strategy.extended.place_arguments((args, kwargs))
        step = compile_on_replicas(strategy, fn)
    else:
        step = fn.fresh_copy() if isinstance(fn, CompiledFunction) else jit(fn)
        if not isinstance(fn, CompiledFunction):  # a plain call would hand on marks
            args, kwargs = keep_marks((args, kwargs))
    with notes.listening(), explaining_context(fn, (args, kwargs), strategy, method):
        return step.lower(*args, **kwargs)


@contextlib.contextmanager
def explaining_context(
    fn: Callable[..., Any], arguments: PyTree, strategy: Strategy | None, method: str
) -> Generator[None]:
    """A context that tells of a missing ``strategy=`` in errors of code that it runs."""
    try:
        yield
    except Exception as error:
        keep_user_lines(error)
        if "unexpected keyword argument 'args'" in str(error):
            error.add_note(f"Call it like the step: dj.{method}(step, x, y, strategy=strategy)")
        if strategy is None and _is_cross_replica(arguments) and not isinstance(fn, _COMPILED):
            error.add_note(_cross_replica_note(function_name(fn), method))
        raise


#: What says itself how it is run.
_COMPILED = (CompiledFunction, MappedFunction)


def require_compiling(strategy: Strategy | None, method: str) -> None:
    if strategy is None or strategy.extended.compiles:
        return
    raise UnsupportedError(
        f"dj.{method} needs a strategy that compiles its steps",
        got=f"strategy={strategy!r}",
        why="the reference interpreter runs replicas as threads, and traces nothing",
        fix=f"dj.{method}(step, *args, strategy=dj.VirtualStrategy"
        f"({strategy.num_replicas_in_sync}))",
    )


def require_outside_traces(method: str) -> None:
    if frames.current().state is None and not jax_compat.tracing():
        return
    raise ContextError(
        f"dj.{method} needs to be called outside of run, dj.jit and other traces",
        got=f"a call inside a trace, in {frames.current().name}",
        why="it traces the step itself",
        fix=f"dj.{method}(step, x) where you would call step(x)",
    )


def with_object(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Unbinds a bound `dj.jit` method: returns its function, and args with the object."""
    if isinstance(fn, functools.partial) and isinstance(fn.func, CompiledFunction):
        return fn.func, (*fn.args, *args)
    return fn, args


def _is_cross_replica(arguments: PyTree) -> bool:
    """Returns whether code that takes these arguments here can only be cross-replica code."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_per_replica)
    return not frames.in_replica_context() or any(map(is_per_replica, leaves))


def _cross_replica_note(name: str, method: str) -> str:
    return (
        f"dj.{method} ran {name} as cross-replica code. If it is a replica function, it needs "
        f"strategy=...: dj.{method}({name}, ..., strategy=strategy)"
    )


# -- parts of the explanation --------------------------------------------------


def _arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, PyTree]
) -> dict[str, Any]:
    """Returns the arguments that are arrays or numbers, by path."""
    if isinstance(fn, CompiledFunction):
        args, kwargs = fn.mark_arguments(tuple(args), kwargs)
    partitioned = PartitionedTree(
        mark_modules((tuple(args), kwargs), is_data=is_array_or_struct),
        lambda leaf: is_array_or_struct(leaf) or is_number(leaf),
    )
    names = positional_names(fn)
    paths = (user_path(path, names) for path in partitioned.paths)
    return dict(zip(paths, partitioned.leaves, strict=True))


def _possible_rows(arguments: Mapping[str, Any], counts: Collection[int]) -> tuple[str, ...]:
    """Returns the paths of host arrays with as many rows as there are replicas, if over 1.

    A tree of rows, as from `jax_utils.replicate`, has them in all of its arrays; where only some
    have as many, it is by chance.
    """
    found: dict[str, dict[str, bool]] = {}
    for path, leaf in arguments.items():
        if is_array(leaf) and leaf.ndim:
            is_on_host = not isinstance(leaf, jax.Array) or not leaf.committed
            is_rows = is_on_host and 1 < leaf.shape[0] in counts
            found.setdefault(re.split(r"[.\[]", path)[0], {})[path] = is_rows
    return tuple(path for own in found.values() if all(own.values()) for path in own)


def _variables(notes: Notes) -> tuple[VariableUse, ...]:
    return tuple(
        VariableUse(
            v.name,
            _LETTERS.get(v.layout.kind, "V"),
            str(v.layout),
            v in notes.reads,
            v in notes.writes,
        )
        for v in dict.fromkeys((*notes.reads, *notes.writes))
    )


def _flops(compiled: CompiledProgram) -> float | None:
    costs = compiled.cost_analysis()
    flops = costs.get("flops") if isinstance(costs, dict) else None
    return None if flops is None or flops < 0 else flops  # XLA counts -1 for a callback


def _memory(compiled: CompiledProgram) -> Memory:
    stats: Any = compiled.memory_analysis()
    given, out = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temporaries = stats.alias_size_in_bytes, jax_compat.temporary_bytes(stats)
    on_host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes
    return Memory(
        argument_bytes=given,
        output_bytes=out,
        donated_bytes=alias,
        temporary_bytes=temporaries,
        peak_bytes=given + out + temporaries - alias,
        host_bytes=on_host + stats.host_temp_size_in_bytes - stats.host_alias_size_in_bytes,
    )


# -- what the traces prove --------------------------------------------------------


class Notes:
    """What `dj.explain` and `dj.check` hear of a trace.

    Duplicates are recorded once, since JAX traces some bodies more than once. If it
    `collects_findings`, they are only recorded instead of raised or warned about.
    """

    def __init__(self, collects_findings: bool = False) -> None:
        self.collects_findings = collects_findings
        self.findings: dict[Finding, None] = {}
        self.runs: dict[RunProof, None] = {}
        self.equal_reductions: dict[EqualReduction, None] = {}
        self.reads: Sequence[Any] = ()
        self.writes: Sequence[Any] = ()
        self.results: tuple[tuple[str, str], ...] = ()
        self.merge_lines: list[str] = []
        self._open_merges: list[int] = []
        #: name -> size of the axes of the mesh, if a replica has several devices.
        self.axis_sizes: Mapping[str, int] = {}

    @property
    def is_alone(self) -> bool:
        """Whether one replica ran the step, which is then explained as for several."""
        return bool(self.runs) and all(run.num_replicas == 1 for run in self.runs)

    def letter(self, value: PyTree) -> str:
        """Returns the letter of an argument."""
        return "T" if isinstance(value, PerReplica) or (self.is_alone and is_own(value)) else "M"

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this hears what is traced."""
        return hooks.listening(
            (hooks.on_program, self.on_program),
            (hooks.on_proved, self.on_proved),
            (hooks.on_segment, self.on_segment),
            (hooks.in_merge, self.in_merge),
            (hooks.on_reduced, self.on_reduced),
            (hooks.on_finding, self.on_finding),
            is_dry_run=True,
        )

    def on_program(
        self,
        reads: Sequence[Any],
        writes: Sequence[Any],
        results: Sequence[Proof],
        described: Mapping[Any, Sequence[Any]],
    ) -> None:
        """Records the variables and results of the whole program."""
        if self.is_alone:
            facts = described[layer.describe]
            differ = (fact is not None and fact.differs for fact in facts)
            results = [(path, x or y) for (path, x), y in zip(results, differ, strict=False)]
        self.reads, self.writes, self.results = reads, writes, _letters(_with_names(results))

    def on_proved(self, run: TracedRun, why: Sequence[tuple[str, bool, str]]) -> None:
        """Records what was proved about one replica function."""
        given, line, count = run.given, self._calling_line(), run.topology.num_replicas
        if run.topology.model_axes and run.topology.mesh is not None:
            self.axis_sizes = dict(run.topology.mesh.shape)
        reasons = tuple((p, "T" if varying else "M", text) for p, varying, text in _with_names(why))
        args = _letters([(p, x.varying) for p, x in zip(given.paths, given.values, strict=True)])
        paths = run.traced.result.paths
        proofs = [(path, x.varying) for path, x in zip(paths, run.results, strict=True)]
        results = _letters(_with_names(proofs))
        self.runs[RunProof(given.name, count, line, args, results, reasons)] = None

    def on_segment(
        self, jaxpr: jax_compat.Jaxpr, varying: Sequence[bool], topology: Topology
    ) -> None:
        """Records reductions of equal values in replica code."""
        for eqn in _Reductions(topology.axis_name).of_equal(jaxpr, varying):
            self._note_reduction(eqn.primitive.name, user_lines.source_line(eqn))
        for name, line in _reads_of_parts(jaxpr):
            if name.endswith("opt_state"):
                self.on_finding(Finding("note", _GATHERED_STATE, _gathered_text(name, line), line))

    @contextlib.contextmanager
    def in_merge(self, eqn: jax_compat.JaxprEqn) -> Generator[None]:
        """Stages a merge in a named scope, from which its line is found later."""
        index = len(self.merge_lines)
        self.merge_lines.append(user_lines.source_line(eqn))
        self._open_merges.append(index)
        with jax.named_scope(merge_scope(index)):
            yield
        self._open_merges.pop()

    def on_reduced(
        self, op: str, values: Sequence[GlobalValue], outs: Sequence[Any], topology: Topology
    ) -> None:
        """Records a reduction of an equal value in cross-replica code."""
        varying = [x.varying for x in values]
        if topology.num_replicas == 1:  # as on several
            facts = [recall(x.array) for x in values]
            varying = [fact is None or fact.differs for fact in facts]
        if not all(varying) and op != "GATHER":
            what = f"reduce({op.removesuffix('_within')})"
            self._note_reduction(what, self._calling_line())

    def on_finding(self, finding: Finding) -> bool:
        """Records a finding."""
        self.findings[finding] = None
        return self.collects_findings

    def _note_reduction(self, what: str, source: str) -> None:
        self.equal_reductions[EqualReduction(what, source)] = None

    def _calling_line(self) -> str:
        scopes = "/".join(map(merge_scope, self._open_merges))
        frames = list(user_lines.calling_frames())
        return user_line(frames, scopes, self.merge_lines) or user_lines.UNKNOWN


def _with_names(told: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns what was told about results, with the user's name of each array of an object."""
    names = written_names()
    if not names:
        return list(told)
    # A step with objects returns (the user's results, what became of the objects, their arrays).
    return [(names.get(path, path.removeprefix("[0]")), *rest) for path, *rest in told]


#: Short, for a report that fits a screen.
_GATHERED_STATE = "ZeRO undone: dj.flax.apply_gradients keeps the parts"


def _gathered_text(name: str, line: str) -> str:
    return message(
        f"{name}, which is split over the replicas, needs to be updated in parts",
        got=f"whole arrays, gathered on every device for {line}",
        why="optimizer.update computes with whole arrays: nothing is saved while the step runs",
        fix="dj.flax.apply_gradients(optimizer, model, grads), with each replica's own gradients, "
        "in place of all_reduce and optimizer.update",
    )


def _reads_of_parts(jaxpr: jax_compat.Jaxpr) -> Iterator[tuple[str, str]]:
    """Yields what is gathered for a step, by name, and the user's line that first reads it."""
    gathered: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        parts = PARTS_OF.search(str(eqn.source_info.name_stack))
        if parts:
            gathered.update(dict.fromkeys(eqn.outvars, parts[1]))
            continue
        for v in eqn.invars:
            if not isinstance(v, jax_compat.Literal) and v in gathered:
                yield gathered.pop(v), user_lines.source_line(eqn)


def _letters(proofs: Sequence[Proof]) -> tuple[tuple[str, str], ...]:
    return tuple((path, "T" if varying else "M") for path, varying in proofs)


class _Reductions(Analysis):
    """Finds reductions over the replicas whose operand never differs, in no round of a loop."""

    names = frozenset("psum psum_invariant pmax pmin reduce_scatter".split())

    def __init__(self, axis_name: str):
        super().__init__(axis_name)
        self._found: dict[int, tuple[jax_compat.JaxprEqn, list[bool]]] = {}

    def of_equation(self, eqn: jax_compat.JaxprEqn, ins: list[bool]) -> Sequence[bool] | None:
        """Remembers which operands of a reduction have ever differed."""
        # The user did not write the transpose of a reduction.
        is_own = "transpose(" not in str(eqn.source_info.name_stack)
        if eqn.primitive.name in self.names and is_own and self.over_replicas(eqn):
            before = self._found.get(id(eqn), (eqn, [False] * len(ins)))[1]
            self._found[id(eqn)] = eqn, [x or y for x, y in zip(before, ins, strict=True)]
        return super().of_equation(eqn, ins)

    def of_equal(self, jaxpr: jax_compat.Jaxpr, varying: Sequence[bool]) -> list[Any]:
        """Returns the reductions in replica code, at any depth, of which an operand is equal."""
        self.values(jaxpr, varying)
        return [eqn for eqn, ever in self._found.values() if not all(ever)]
