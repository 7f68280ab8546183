"""run_steps_on_iterator: K steps as one compiled loop.

The elements of all K steps are stacked and moved in one transfer. The loop is a `dj.lax.scan` over
them, which carries the variables that a step writes and the outputs that it sets. The outputs of a
step are not known before it is traced, so it is first traced for their shapes: see
`_zeros_like_outputs`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distjax._src import traces
from distjax._src.collectives.ops import as_reduce_op
from distjax._src.context import StrategyLike, frames
from distjax._src.data.input_layout import InputLayout
from distjax._src.data.iterator import DistributedIterator, require_untraced
from distjax._src.placement import is_per_replica, require_held
from distjax._src.program.functions import FunctionCache
from distjax._src.program.program import Program
from distjax._src.replica import lax
from distjax._src.replica.arguments import Static, function_name, is_array, require_callable
from distjax._src.strategies.updating import cross_replica_step
from distjax._src.typing import KeywordArgs, PositionalArgs, PyTree, ReduceOp, ReduceOpLike
from distjax._src.variables.conversion import is_number, is_traced
from distjax._src.variables.state import TraceState
from distjax._src.variables.variable import ExtendedForVariables, Variable
from distjax.errors import TraceLeakError, describe_value, message, require_int


class MultiStepContext:
    """Collects what a step function of `run_steps_on_iterator` reports.

    Attributes:
      last_step_outputs: name -> output of the last step.
      non_tensor_outputs: name -> Python object.
      iterations: the number of steps that ran (0 inside a step function).

    Source: tf.distribute MultiStepContext.
    """

    def __init__(self, initial: Mapping[str, Any] | None = None):
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.iterations = 0

    @property
    def run_op(self) -> None:
        """None: the steps have already run (a graph-mode name)."""
        return None

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOpLike | None = None
    ) -> None:
        """Sets an output of this step; the last step's value is kept.

        Args:
          name: its key in `last_step_outputs`.
          output: a tree of values.
          reduce_op: how to reduce it over the replicas. None stores it as is;
            required in a replica context, where each replica has its own.

        Context: cross-replica, or replica (where it does a `merge_call`).

        Raises:
          ValueError: no reduce_op in a replica context, or an unknown one.
          TypeError: a leaf that is not an array or a number.
        """
        frame = frames.current()
        replica = frame.replica_context
        if reduce_op is not None:
            reduce_op = as_reduce_op(reduce_op, "set_last_step_output: reduce_op")
        elif replica is not None and frame.has_strategy:
            raise ValueError(
                message(
                    f"set_last_step_output({name!r}) needs a reduce_op in a replica context",
                    got="reduce_op=None",
                    why="each replica has an output of its own, and one is kept",
                    fix=f"context.set_last_step_output({name!r}, output, reduce_op='mean')",
                )
            )
        if replica is None or reduce_op is None:
            self._set(frame.strategy, output, name, reduce_op)
        else:
            replica.merge_call(self._set, args=(output, name, reduce_op))

    def _set(
        self, strategy: StrategyLike, output: PyTree, name: str, reduce_op: ReduceOp | None
    ) -> None:
        _require_arrays(output, name)
        reduced = output if reduce_op is None else strategy.reduce(reduce_op, output)
        self.last_step_outputs[name] = reduced

    def set_non_tensor_output(self, name: str, output: PyTree) -> None:
        """Sets a Python object as an output.

        In a replica context, stores a tuple of the replicas' objects; it has one
        element, since one trace stands for all replicas.

        Args:
          name: its key in `non_tensor_outputs`.
          output: any Python object.

        Context: cross-replica, or replica.

        Raises:
          TraceLeakError: a value of the program, which exists only while it runs.
        """
        if is_traced(output):
            raise TraceLeakError(
                f"set_non_tensor_output({name!r}) needs Python objects",
                got=f"a traced value in {describe_value(output)}",
                why="the object is kept as the trace has it, and a value of the program "
                "exists only while it runs",
                fix=f"context.set_last_step_output({name!r}, x, reduce_op='mean')",
            )
        self.non_tensor_outputs[name] = (output,) if frames.current().is_replica else output


def run_steps(
    programs: FunctionCache,
    fn: Callable[[MultiStepContext, Any], Any],
    iterator: Iterator[PyTree],
    iterations: int,
    initial_loop_values: Mapping[str, Any] | None,
) -> MultiStepContext:
    """Runs up to K steps: see `StrategyExtended.run_steps_on_iterator`."""
    iterations = require_steps(fn, iterator, iterations, initial_loop_values)
    context = MultiStepContext(initial_loop_values)
    is_ours = isinstance(iterator, DistributedIterator)
    chunks = iter(()) if is_ours else _stack_steps(iterator, iterations)
    while context.iterations < iterations:
        try:
            left = iterations - context.iterations
            steps = iterator.take(left) if is_ours else next(chunks)
        except StopIteration:
            if context.iterations == 0:
                raise
            break
        program = programs.get(fn)
        layout = Static(steps.layout)
        carried = context.last_step_outputs if initial_loop_values is not None else None
        outputs, others = program.call((layout, steps.arrays, carried), {})
        context.last_step_outputs.update(outputs)
        context.non_tensor_outputs.update(others)
        context.iterations += steps.num_steps
    return context


def require_steps(
    fn: Callable[..., Any], iterator: object, iterations: int, initial_loop_values: object
) -> int:
    """Returns `iterations` as an int; raises if an argument is not one of run_steps_on_iterator."""
    require_callable(fn, "run_steps_on_iterator")
    require_untraced(
        "run_steps_on_iterator",
        fix="call it in plain Python, since it compiles its loop itself; dj.check takes what fn "
        "does with one batch: dj.check(lambda batch: strategy.run(step, args=(batch,)), batch)",
    )
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            message(
                "run_steps_on_iterator needs an iterator",
                got=describe_value(iterator),
                why="each call goes on where the last one ended, and a dataset has no such place",
                fix="iterator = iter(dataset), once; run_steps_on_iterator(fn, iterator, 100)",
            )
        )
    if not (initial_loop_values is None or isinstance(initial_loop_values, Mapping)):
        raise TypeError(
            message(
                "run_steps_on_iterator: initial_loop_values needs a dict, or None",
                got=describe_value(initial_loop_values),
                why="each value is an output of the step before the first, by name",
                fix="run_steps_on_iterator(fn, iterator, 100, {'loss': 0.0})",
            )
        )
    return require_int(
        "run_steps_on_iterator: iterations",
        iterations,
        1,
        why="it is the number of steps to run",
        fix="run_steps_on_iterator(fn, iterator, iterations=100)",
    )


def _require_arrays(output: PyTree, name: str) -> None:
    for leaf in jax.tree.leaves(output):
        if not (is_array(leaf) or is_number(leaf) or isinstance(leaf, Variable)):
            raise TypeError(
                message(
                    f"set_last_step_output({name!r}) needs arrays and numbers",
                    got=describe_value(leaf),
                    why="it is carried through the compiled loop of steps",
                    fix=f"context.set_non_tensor_output({name!r}, ...)",
                )
            )


@dataclasses.dataclass(frozen=True)
class _GivenLayout:
    """How elements of the user's own iterator are built of their arrays.

    Some may be PerReplicas: those of a distributed dataset, by way of a generator or tqdm.
    """

    structure: Any

    def as_element(self, arrays: list[Any]) -> Any:
        """Returns one step's slices as an element."""
        return jax.tree.unflatten(self.structure, arrays)


class _GivenSteps(NamedTuple):
    """As `Steps`, for elements of the user's own iterator."""

    num_steps: int
    arrays: list[Any]
    layout: _GivenLayout


def _stack_steps(iterator: Iterator[PyTree], num_steps: int) -> Iterator[_GivenSteps]:
    """Yields the next `num_steps` elements of any iterator, stacked while their shapes are equal.

    If the iterator raises, the elements before come first.
    """
    alike: list[Any] = []
    try:
        for element in itertools.islice(iterator, num_steps):
            for leaf in jax.tree.leaves(element):
                require_held(leaf, "run_steps_on_iterator: an element")
            arrays = jax.tree.map(jnp.asarray, element)
            if alike and _form(arrays) != _form(alike[0]):
                yield _as_steps(alike)
                alike = []
            alike.append(arrays)
    except Exception:
        if alike:
            yield _as_steps(alike)
        raise
    if alike:
        yield _as_steps(alike)


def _form(element: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(element)
    return structure, [(x.shape, x.dtype) for x in leaves]


def _as_steps(elements: list[Any]) -> _GivenSteps:
    unwrapped = [jax.tree.leaves(element) for element in elements]
    arrays = [jnp.stack(leaves) for leaves in zip(*unwrapped, strict=True)]
    return _GivenSteps(len(elements), arrays, _GivenLayout(jax.tree.structure(elements[0])))


def _loop(
    fn: Callable[..., Any], layout: InputLayout | _GivenLayout, arrays: PyTree, initial: PyTree
) -> Any:
    """Emits the loop into the current trace; returns the outputs of the last step."""
    others: dict[str, Any] = {}

    def step(before: PyTree, slices: PyTree) -> dict[str, Any]:
        context = MultiStepContext(initial if before is None else before)
        fn(context, layout.as_element(slices))
        others.update(context.non_tensor_outputs)
        return jax.tree.map(jnp.asarray, context.last_step_outputs)

    first = jax.tree.map(lambda x: x[0], arrays)
    start = _zeros_like_outputs(lambda: step(None, first), initial)
    is_carried = initial is not None

    def body(before: PyTree, slices: PyTree) -> tuple[Any, None]:
        return step(before if is_carried else None, slices), None

    outputs, _ = lax.scan(body, start, arrays)
    return outputs, others


def _zeros_like_outputs(run: Callable[[], Any], initial: PyTree) -> Any:
    """Returns the first carry of the loop: `initial`, and zeros for all other outputs."""
    found: list[Any] = []
    outer = frames.current().state

    def trace() -> list[Any]:
        outs = lax.in_inner_trace(outer, run)
        found[:] = [jax.tree.structure(outs)]
        return jax.tree.leaves(outs)

    jaxpr, _ = traces.trace_jaxpr(trace, (), only_shapes=True)
    avals: list[Any] = [v.aval for v in jaxpr.outvars]
    zeros = jax.tree.unflatten(found[0], [jnp.zeros(a.shape, a.dtype) for a in avals])
    first = jax.tree.map(jnp.asarray, dict(initial or {}))
    for name, value in first.items():
        _require_like_output(name, value, zeros[name])
    return {**zeros, **first}


def _require_like_output(name: str, initial: PyTree, output: PyTree) -> None:
    shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (initial, output)]
    if shapes[0] == shapes[1] and jax.tree.structure(initial) == jax.tree.structure(output):
        return
    fix = f"{{{name!r}: jnp.zeros(...)}}, in the tree and shapes of the output"
    if any(map(is_per_replica, jax.tree.leaves(output, is_leaf=is_per_replica))):
        fix = (
            f"{{{name!r}: strategy.distribute_values_from_function(lambda ctx: jnp.zeros(...))}}; "
            f"or set_last_step_output({name!r}, output, 'mean')"
        )
    raise TypeError(
        message(
            f"run_steps_on_iterator: initial_loop_values[{name!r}] needs the form of the output",
            got=f"{describe_value(initial)}; set_last_step_output gets {describe_value(output)}",
            why="it is the output of the step before the first",
            fix=fix,
        )
    )


def make_steps_program(
    extended: ExtendedForVariables, resolve: Callable[[], Callable[..., Any]]
) -> Program:
    """Returns the program of a loop of steps, which does not keep the user's function alive."""

    def emit(
        fn: Callable[..., Any], state: TraceState, args: PositionalArgs, kwargs: KeywordArgs
    ) -> Any:
        layout, arrays, initial = args
        return _loop(fn, layout.value, arrays, initial)

    name = f"steps of {function_name(resolve())}"
    names = "layout", "elements", "initial_loop_values"
    return Program(cross_replica_step(extended, name, resolve, emit, names))
