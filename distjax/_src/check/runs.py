"""Runs a step on the first device: for R replicas, or for one with the whole batch.

The step is traced anew while other topologies stand in for those of its strategies, and evaluated
on copies of its arguments and variables; what comes out is kept here and nowhere else. The rows of
the batch are dealt out to as many replicas as there are in a run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from distjax._src import hooks, jax_compat
from distjax._src.check.replay import NO_TAGS, Node, Options, Place, Recording, Tags
from distjax._src.collectives import ops
from distjax._src.objects.stateful import is_stateful
from distjax._src.placement import (
    PerReplica,
    Topology,
    exchanging_topologies,
    is_batch,
    one_device_topology,
    require_same_topology,
    transfer,
)
from distjax._src.program.program import Program
from distjax._src.replica.arguments import PartitionedTree, is_array, is_one_leaf, user_path
from distjax._src.replica.global_value import AlreadyPlaced
from distjax._src.typing import PyTree
from distjax._src.variables.policy import Combine
from distjax._src.variables.variable import Variable
from distjax.errors import UnsupportedError, message

#: Why a value may differ: it depends on an argument that is no part of the batch.
OWN_VALUES = "an argument with a value of each replica's own"


def stand_in_for(topology: Topology, count: int | None) -> Topology:
    """Returns the topology on which a step is run: so many replicas on the first device.

    Args:
      topology: a strategy's.
      count: how many; None: as many as the strategy has, but at least two.
    """
    if not topology.devices:
        return topology
    count = max(topology.num_replicas, 2) if count is None else count
    mesh = topology.users_mesh
    if mesh is not None and len(mesh.axis_names) == 1:  # a step constrains over model axes only
        mesh = None  # so that there is one topology for all numbers of replicas that `pmap` makes
    return one_device_topology(topology.devices[0], count, topology.axis_name, mesh)


# -- arguments ------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Rows:
    """An argument that is part of the batch.

    Attributes:
      path: the user's name for it.
      whole: the rows of all replicas, [G, ...].
    """

    path: str
    whole: jax.Array


#: Returns other rows in the place of those of an argument.
Change = Callable[[Rows], jax.Array]


class Arguments:
    """A step's arguments, as any number of replicas gets them.

    Args:
      args: positional arguments, with a PerReplica for what each replica has of its own.
      kwargs: keyword arguments.
      batch_argnums: the positional arguments that are parts of the batch.
      topology: the strategy's; None: not known.
      names: the names of the positional arguments.
      shares_rows: whether equal rows stand for one value, as in calls of `dj.pmap`.

    Attributes:
      is_guess: whether nothing says which arguments are parts of the batch: then all that can be.
      rows: the arguments that are.
      num_replicas: R, of the step that is checked.
      place_of_run: the device of the run; None: not known.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_argnums: Sequence[int],
        topology: Topology | None,
        names: Sequence[str],
        shares_rows: bool = False,
    ):
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(
            (args, kwargs), is_leaf=_is_argument
        )
        leaves = [leaf for _, leaf in pairs]
        paths = [user_path(jax.tree_util.keystr(path), names) for path, _ in pairs]
        numbers = [i for i, a in enumerate(args) for _ in jax.tree.leaves(a, is_leaf=_is_argument)]
        numbers += [-1] * (len(leaves) - len(numbers))
        placed = [x.topology for x in leaves if isinstance(x, PerReplica) and x.topology.devices]
        self._topology = next(iter(placed), topology)
        self.num_replicas = 2
        if self._topology is not None:
            self.num_replicas = stand_in_for(self._topology, None).num_replicas
        self.place_of_run: Sharding | None = None
        if self._topology is not None:
            self.place_of_run = SingleDeviceSharding(self._topology.devices[0])
        known = [
            n in batch_argnums or is_batch(x.stacked if isinstance(x, PerReplica) else x)
            for n, x in zip(numbers, leaves, strict=True)
        ]
        self.is_guess = not any(known)
        self._leaves: list[Any] = []
        for leaf, path, is_known in zip(leaves, paths, known, strict=True):
            is_own = isinstance(leaf, PerReplica)
            if is_own and topology is not None:
                require_same_topology(leaf, topology, f"argument {path}")
            array = self.on_device(leaf.stacked if is_own else leaf)
            if is_own and not is_known and shares_rows and _are_equal(array):
                self._leaves.append(PerReplica(array[:1], leaf.topology))
            elif (is_known or (is_own and self.is_guess)) and _can_join(leaf):
                rest = array.shape[2 if is_own else 1 :]
                self._leaves.append(Rows(path, array.reshape(-1, *rest)))
            else:
                self._leaves.append(leaf if is_own else array)
        self.is_guess = self.is_guess and bool(self.rows)

    def keep_apart(self) -> None:
        """Takes no argument for part of the batch that is only guessed to be."""
        assert self._topology is not None, "there is a PerReplica"
        count = self.num_replicas
        for i, x in enumerate(self._leaves):
            if isinstance(x, Rows):
                stacked = x.whole.reshape(count, -1, *x.whole.shape[1:])
                self._leaves[i] = PerReplica(stacked, stand_in_for(self._topology, count))
        self.is_guess = False

    @property
    def rows(self) -> list[Rows]:
        """The arguments that are parts of the batch."""
        return [x for x in self._leaves if isinstance(x, Rows)]

    def on_device(self, x: PyTree) -> Any:
        """Returns an array on the device of the run; anything else as it is."""
        if not is_array(x):
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise UnsupportedError(
                message(
                    "dj.check needs arrays of this process",
                    got="an array on devices of several processes",
                    why="the step is run on one device, for R replicas and for one",
                    fix="dj.check(step, *args, strategy=strategy, rules_only=True); or the step in "
                    "one process",
                )
            )
        return transfer(x, self.place_of_run)

    def given(self, count: int, change: Change | None = None) -> Any:
        """Returns (args, kwargs) for so many replicas."""
        new = [self._leaf(x, count, change) for x in self._leaves]
        return jax.tree.unflatten(self._treedef, new)

    def are_own(self) -> list[bool]:
        """Returns which leaves are values of each replica's own, and no part of the batch."""
        return [isinstance(x, PerReplica) and x.stacked.shape[0] > 1 for x in self._leaves]

    def _leaf(self, x: PyTree, count: int, change: Change | None) -> Any:
        if isinstance(x, Rows):
            whole = x.whole if change is None else change(x)
            if len(whole) % count:
                raise UnsupportedError(_uneven_text(x.path, len(whole), count))
            stacked = whole.reshape(count, len(whole) // count, *whole.shape[1:])
        elif isinstance(x, PerReplica):
            stacked = self.on_device(x.stacked)
            stacked = stacked[np.arange(count) % len(stacked)]
        else:
            return x
        assert self._topology is not None, "a PerReplica, or a strategy, tells it"
        return PerReplica(stacked, stand_in_for(self._topology, count))

    def place(self, call: PyTree, count: int) -> Any:
        """Returns the arguments with the arrays of objects where the step runs."""

        def place(x: PyTree) -> Any:
            if not isinstance(x, PerReplica):
                return self.on_device(x)
            stand_in = stand_in_for(x.topology, count)
            if stand_in is x.topology:
                return x
            stacked = self.on_device(x.stacked)
            return PerReplica(stacked[np.arange(count) % len(stacked)], stand_in)

        return jax.tree.map(place, call, is_leaf=is_one_leaf)


def _is_argument(value: object) -> bool:
    return is_one_leaf(value) or is_stateful(value)


def _are_equal(stacked: jax.Array) -> bool:
    """Returns whether all rows are equal."""
    data = jax.random.key_data(stacked) if jax_compat.is_key_dtype(stacked.dtype) else stacked
    rows = np.asarray(data)
    return bool((rows == rows[:1]).all())


def _can_join(x: PyTree) -> bool:
    """Returns whether the replicas' values of an argument may be rows of one batch."""
    if not hasattr(x, "dtype"):
        return False
    is_raw_key = x.dtype == jnp.uint32 and tuple(x.shape) == (2,)
    return len(x.shape) > 0 and not (jax_compat.is_key_dtype(x.dtype) or is_raw_key)


def _uneven_text(path: str, rows: int, count: int) -> str:
    return message(
        f"dj.check needs a batch that {count} replicas can share",
        got=f"{rows} rows in {path}",
        why="the step is run on the same rows for one replica and for several",
        fix=f"a batch of {count * (rows // count + 1)} rows",
    )


# -- runs -----------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Value:
    """A result of a run, or new state.

    Attributes:
      name: the user's name for it.
      array: its value; [R, ...] if `varying`.
      varying: whether it may differ between replicas.
      before: the value that it updates; None: it is no state, as far as is known.
      tags: why it may differ between R replicas and one.
      node: what computes it; None: not known.
    """

    name: str
    array: Any
    varying: bool
    before: Any = None
    tags: Tags = NO_TAGS
    node: Node | None = None


@dataclasses.dataclass(eq=False)
class Run:
    """What came out of a run.

    Attributes:
      values: results and new state, by what identifies them in every run.
      result: the user's results.
      recording: what its trace recorded.
      answers: what its callbacks returned, [R, ...].
      components: of variables with a component for each replica, what it has left; not of those
        that sum, which nobody reads apart.
      num_replicas: for how many replicas it ran.
    """

    values: dict[Any, Value]
    result: Any
    recording: Recording
    answers: Mapping[Place, Any]
    components: Mapping[Variable, Any]
    num_replicas: int


class Trial:
    """A step that can be run in several ways.

    Args:
      find_program: returns the program that compiles it, for such arguments.
      arguments: its arguments.
      hear: told of each finding of a trace for several replicas.
    """

    def __init__(
        self,
        find_program: Callable[..., Program],
        arguments: Arguments,
        hear: Callable[[Any], None],
    ):
        self.find_program, self.arguments = find_program, arguments
        self.hear = hear
        self._values: dict[Variable, Any] = {}
        self._components: dict[tuple[Variable, int], Any] = {}

    def advance(self, *runs: Run) -> bool:
        """Lets later runs start with the components that these have left.

        Returns whether there are any: other state is the same for all replicas.
        """
        for run in runs:
            count = run.num_replicas
            self._components.update(((v, count), x) for v, x in run.components.items())
        return bool(self._components)

    def value_of(self, variable: Variable, count: int) -> Any:
        """Returns what the variable holds, for so many replicas."""
        if (variable, count) in self._components:
            return self._components[variable, count]
        if variable not in self._values:
            self._values[variable] = self.arguments.on_device(variable.stored.value())
        value = self._values[variable]
        if not is_per_component(variable) or len(value) == count:
            return value
        name, one = variable.aggregation.name, combined(variable, value)
        if name == "SUM":
            return jnp.concatenate([one, jnp.zeros((count - 1, *one.shape[1:]), one.dtype)])
        return jnp.broadcast_to(one, (count, *one.shape[1:]))


def is_per_component(variable: Variable) -> bool:
    """Returns whether the variable has a component for each replica."""
    return variable.policy.stacked and not variable.strategy.extended.is_default


def combined(variable: Variable, components: jax.Array) -> jax.Array:
    """Returns the one component [1, ...] that stands for those of all replicas."""
    rule = variable.policy.cross_read
    if rule is Combine.REFUSE:
        return components[:1]
    combine = functools.partial(ops.combine, rule.name, axis_name="r", num_replicas=len(components))
    return jax.vmap(combine, axis_name="r")(components)[:1].astype(components.dtype)


class TracedStep:
    """A step traced for a number of replicas, compiled, to be run with several batches.

    Args:
      trial: the step.
      options: how it is traced.

    Attributes:
      recording: what the trace recorded.
    """

    def __init__(self, trial: Trial, options: Options):
        self._trial, self._options = trial, options
        self._exchange = functools.partial(stand_in_for, count=options.count)
        args, kwargs = self._given(None)
        with exchanging_topologies(self._exchange):
            program = trial.find_program(args, kwargs)
        self._found, args, kwargs, self._changes = program.trace(
            args,
            kwargs,
            lambda: exchanging_topologies(self._exchange),
            functools.partial(trial.arguments.place, count=options.count),
            self._emit,
        )
        found = self._found
        if trial.arguments.place_of_run is not None:
            found.move_to(trial.arguments.place_of_run)
        own = enumerate(found.constants)
        self._modes_at = [i for i, x in own if x is options.modes and x is not None]
        self._constants = list(map(trial.arguments.on_device, found.constants))
        self._first = args, kwargs
        self._program = program
        self._spec: Any = None  # how results are built, once it is compiled

        def evaluate(args: PyTree, kwargs: PyTree, values: Sequence[Any], constants: PyTree) -> Any:
            found.constants = constants
            pairs = dict(zip(found.reads, values, strict=True))
            arrays, self._spec, new = found.evaluate(args, kwargs, pairs)
            return arrays, [new[v] for v in found.writes]

        self._evaluate = jax.jit(evaluate, compiler_options=jax_compat.QUICK_COMPILATION)

    @functools.cached_property
    def eps(self) -> float:
        """The rounding of the least precise numbers that it computes with."""
        avals: list[Any] = [v.aval for eqn in self._found.equations for v in eqn.outvars]
        kinds = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
        floats = (kind for kind in kinds if jnp.issubdtype(kind, jnp.inexact))
        return max((float(jnp.finfo(kind).eps) for kind in floats), default=0.0)

    def _given(self, change: Change | None) -> Any:
        return self._trial.arguments.given(self._options.count, change)

    def run(self, change: Change | None = None, modes: Sequence[int] = ()) -> Run:
        """Evaluates the step; with other rows of the batch, or other `Options.modes`."""
        trial, count, found = self._trial, self._options.count, self._found
        args, kwargs = self._first
        if change is not None:
            place = functools.partial(trial.arguments.place, count=count)
            given, by_name = self._given(change)
            args, kwargs = self._program.take_apart(given, by_name, place)
        stored = [trial.value_of(v, count) for v in found.reads]
        with exchanging_topologies(self._exchange):
            constants = list(self._constants)
            for i in self._modes_at if modes else ():
                constants[i] = trial.arguments.on_device(jnp.array(modes, jnp.int32))
            outs, new = self._evaluate(args, kwargs, stored, constants)
            result, _, told = self._spec.unpack(outs)
        values = self._results(outs)
        for variable, array, (node, tags) in zip(found.writes, new, self._written, strict=True):
            before = trial.value_of(variable, count)
            if is_per_component(variable):
                array, before = combined(variable, array)[0], combined(variable, before)[0]
            name = f"variable {variable.name!r}"
            values[variable] = Value(name, array, False, before, tags, node)
        if self._changes is not None:
            result = result[0].build()
        answers = dict(zip(self.recording.answers, jax.tree.map(jnp.asarray, told), strict=True))
        pairs = zip(found.writes, new, strict=True)
        components = {v: x for v, x in pairs if is_per_component(v) and v.aggregation.name != "SUM"}
        return Run(values, result, self.recording, answers, components, count)

    def _emit(
        self, emit: Callable[..., Any], fn: PyTree, state: PyTree, args: PyTree, kwargs: PyTree
    ) -> Any:
        """Emits the step; returns its results, and the values that were kept."""
        options = self._options
        self.recording = recording = Recording(options)

        def hear(finding: PyTree) -> bool:
            if options.count > 1:
                self._trial.hear(finding)
            return True

        own = self._trial.arguments.are_own()
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_argument)
        if len(leaves) == len(own):  # else there are objects among them, which were taken apart
            for x in (x for x, is_own in zip(leaves, own, strict=True) if is_own):
                recording.record(x.stacked, None, frozenset((OWN_VALUES,)))
        listening = hooks.listening(
            (hooks.emitters, recording.make_emitter),
            (hooks.on_reduced, recording.on_reduced),
            (hooks.on_finding, hear),
            is_dry_run=True,
        )
        with listening:
            returned = emit(fn, state, args, kwargs)
        is_result = lambda x: is_array(x) or isinstance(x, AlreadyPlaced)
        arrays = list(map(_array_of, PartitionedTree(returned, is_result).leaves))
        written = [state.read(v) for v in state.written]
        node_of = recording.node_behind if recording.keeps else recording.node_at
        self._known = [(node_of(x), recording.tags_of(x)) for x in arrays]
        self._written = [(node_of(x), recording.tags_of(x)) for x in written]
        kept = tuple(x for x in recording.values if x is not None)
        return returned, kept, list(recording.answers.values())

    def _results(self, outs: Sequence[Any]) -> dict[Any, Value]:
        """Returns the results by path, and gives the nodes their values."""
        recording, known = self.recording, self._known
        kept = iter(outs[len(known) :])
        for node, value in zip(recording.nodes, recording.values, strict=True):
            node.value = None if value is None else next(kept)
            if node.index is not None and node.index.value is not None and node.inputs:
                taken = int(np.clip(np.ravel(node.index.value)[0], 0, len(node.inputs) - 1))
                node.inputs, node.index = (node.index, node.inputs[taken]), None
        found: dict[Any, Value] = {}
        for (path, varying), array, (node, tags) in zip(
            self._found.results, outs, known, strict=False
        ):
            path = path.removeprefix("[0]")
            name, before = path, None
            if self._changes is not None:
                name = path.removeprefix("[0]")
                if path in self._changes:
                    name, before = self._changes[path]
            found[path] = Value(name, array, varying, before, tags, node)
        return found


def _array_of(value: PyTree) -> Any:
    if isinstance(value, AlreadyPlaced):
        return value.array
    return value.stacked if isinstance(value, PerReplica) else value
