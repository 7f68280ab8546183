"""Discovery: traces a step, to find the variables that it touches.

In the trace, the first read of a variable stages a `variable` equation, and writes are kept in the
trace's state (see `variables/state.py`). Here these equations become inputs of the jaxpr, and the
last values written its outputs. A build compiles this jaxpr: it does not call the function again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from distjax._src import hooks, jax_compat, traces
from distjax._src.collectives.mapping import join_maps, on_device
from distjax._src.collectives.stacks import by_layer
from distjax._src.context import Frame, StrategyLike, frames
from distjax._src.objects.plain_objects import Surroundings
from distjax._src.objects.reached import Reached
from distjax._src.objects.stateful import active_bridge, explaining_errors, is_stateful
from distjax._src.placement import AuxData, PerReplica, require_held, stand_in, with_aux
from distjax._src.replica.arguments import PartitionedTree, is_array, nodes_of, user_path
from distjax._src.replica.global_value import AlreadyPlaced, place_output, to_storage
from distjax._src.replica.trace import add_value_note
from distjax._src.traces import stage_call, type_of
from distjax._src.typing import ArrayLike, PyTree
from distjax._src.variables.construct import compute_initial
from distjax._src.variables.state import CreationLog, TraceState, with_variables_as_inputs
from distjax._src.variables.variable import Variable
from distjax.errors import TraceLeakError

# -- step ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What a program compiles: a user's function, and how it runs inside the trace.

    Attributes:
      resolve: returns the function, which a program need not keep alive.
      emit: ``emit(fn, state, args, kwargs)`` runs it in the trace of `state`; returns global-view
        results.
      place: returns (args, kwargs) with arrays on other devices moved to the program's devices.
      strategy: in whose cross-replica context it runs, and for which objects are placed; None: the
        one that these are placed for.
      keeps_context: whether it runs in the context of its call instead.
      ignores_user_mesh: whether it runs without the mesh that the user has set (`jax.set_mesh`).
      takes_objects: whether stateful objects may be among its arguments, or captured by it.
    """

    resolve: Callable[[], Callable[..., Any]]
    emit: Callable[[Callable[..., Any], TraceState, tuple[Any, ...], dict[str, Any]], Any]
    place: Callable[[PyTree], Any]
    name: str
    argument_names: Sequence[str]
    strategy: StrategyLike | None
    donate_argnums: tuple[int, ...] = ()
    keeps_context: bool = False
    ignores_user_mesh: bool = True
    takes_objects: bool = True

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        return self.resolve()

    def frame(self, state: TraceState) -> Frame:
        """Returns the frame that the function runs in, with variables in `state`."""
        if self.keeps_context or self.strategy is None:
            return dataclasses.replace(frames.current(), state=state)
        return Frame(self.strategy, state=state)


# -- output spec --------------------------------------------------------------
# How the array results of a program become the user's results.
#
# What is not an array in a signature's results (Python objects, the result tree) leaves a compiled
# call in the auxiliary data of its output tree, since a cache hit runs none of our Python code
# inside `jit`. A compiled program returns ``(written, {spec: None}, outputs, token)``: the spec is
# the key of a dict, which `jit` builds in C, and so it does the user's results if it can.


#: Trees that JAX builds in C.
_BUILT_IN = (tuple, list, dict, type(None))


class OutputSpec:
    """The results of one signature, apart from their arrays.

    Attributes:
      unpack: ``unpack(arrays)`` returns the user's results.
      is_built: whether the program returns the user's results instead of their arrays.
      recreated: the names of existing variables that constructors returned again.
      completion: the index of the array that is ready when the program has completed; None: its
        token is.
    """

    __slots__ = ("completion", "is_built", "recreated", "unpack")

    def __init__(
        self,
        partitioned: PartitionedTree,
        per_replica: tuple[AuxData | None, ...],
        recreated: tuple[str, ...],
    ):
        self.recreated = recreated
        self.completion: int | None = None
        is_plain = partitioned.is_of_arrays
        combine = partitioned.treedef.unflatten if is_plain else partitioned.combine
        if any(aux is not None for aux in per_replica):
            combine, is_plain = functools.partial(_unpack, combine, per_replica), False
        self.unpack: Callable[[Sequence[jax.Array]], Any] = combine
        kinds = (kind for kind, _ in nodes_of(partitioned.treedef))
        self.is_built = is_plain and all(kind in _BUILT_IN for kind in kinds)

    def results(self, outputs: PyTree) -> Any:
        """Returns the user's results."""
        return outputs if self.is_built else self.unpack(outputs)


def _unpack(
    combine: Callable[[Sequence[Any]], Any],
    per_replica: tuple[AuxData | None, ...],
    arrays: Sequence[jax.Array],
) -> Any:
    return combine(
        [
            array if aux is None else with_aux(array, aux)
            for array, aux in zip(arrays, per_replica, strict=True)
        ]
    )


def spec_of(returned: tuple[Any, ...]) -> OutputSpec:
    """Returns the spec in the result of a compiled program."""
    (spec,) = returned[1]
    return spec


# -- which result shows that a program has completed ---------------------------

#: Elements of a result that may be held for the next launch.
_SMALL = 256


def show_end(
    spec: OutputSpec,
    results: Sequence[Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    donate_argnums: Sequence[int],
) -> jax.Array | None:
    """Sets in `spec` which result shows that the program has completed; if none, returns a token.

    The token is one more result, which shows it. It costs ten microseconds on eight devices.
    """
    donated = [arg for i, arg in enumerate(args) if i in donate_argnums]
    spec.completion = _find_completion(results, (args, kwargs), donated)
    return jnp.zeros((), jnp.int8) if spec.completion is None else None


def completion_of(returned: tuple[Any, ...]) -> Any:
    """Returns what is ready when the program that returned this is done; None: nothing tells."""
    completion = spec_of(returned).completion
    return returned[3] if completion is None else jax.tree.leaves(returned[2])[completion]


def _find_completion(results: Sequence[Any], inputs: PyTree, donated: PyTree) -> int | None:
    """Returns the number of a result that shows that the program has completed, as a loss does.

    It is held for a while (see `Ledger`, `throttle`), so it has to be small; JAX hands on an input
    at once; and what takes the place of a donated input is gone with the next call.
    """
    kinds = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(donated)}
    given = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    for number, x in enumerate(results):
        if not isinstance(x, jax.Array):  # a constant of the program
            continue
        is_kept = x.size <= _SMALL and (x.shape, x.dtype) not in kinds
        if is_kept and id(x) not in given and not jax_compat.is_key_dtype(x.dtype):
            return number
    return None


def as_global(variable: Variable, stored: jax.Array) -> Any:
    """Returns a variable's stored array as its value in the global view."""
    return variable.layout.from_stored(stored, variable.shape)


def _initial_in_stored_form(variable: Variable, value: jax.Array) -> Any:
    """Returns an initial value in stored form, copied: a result of `jit` may be an input of it."""
    if not variable.size:
        return value
    return variable.layout.to_stored(jnp.broadcast_to(jnp.copy(value), variable.global_shape))


def _store_initial(variable: Variable, value: jax.Array) -> None:
    if variable.size:
        variable.stored.swap(value)
    else:  # JAX cannot place empty outputs: those are placed separately
        variable.stored.set(value)


class Discovered:
    """A traced function with its variables as inputs and outputs.

    Attributes:
      facts: what layers know about each array result.
      roots: the function and the Python objects among its arguments, until they are recorded.
      takes_spread: whether an argument is an array on several devices, where it is not traced.
    """

    def __init__(
        self,
        name: str,
        jaxpr: jax_compat.Jaxpr,
        consts: list[Any],
        treedef: jax.tree_util.PyTreeDef,
        partitioned: PartitionedTree,
        per_replica: tuple[Any, ...],
        writes: list[Any],
        log: CreationLog,
        facts: Mapping[Any, Any],
        takes_spread: bool,
    ):
        self.name = name.rsplit(".", 1)[-1]
        self._consts, self._treedef = consts, treedef
        self._partitioned, self._per_replica = partitioned, per_replica
        self._log = log
        self.roots: list[Any] = []
        self.writes = writes
        self.created = list(log.values)
        self.facts, self.takes_spread = facts, takes_spread
        code, self.reads = with_variables_as_inputs(jaxpr)
        self._jaxpr = by_layer(join_maps(code))
        read = self._jaxpr.invars[len(self._jaxpr.invars) - len(self.reads) :]
        self._constraints = _constraints_of(self._jaxpr)
        written = self._jaxpr.outvars[len(per_replica) : len(per_replica) + len(writes)]
        state_vars = [*read, *written]
        self._state_vars = {v for v in state_vars if not isinstance(v, jax_compat.Literal)}
        initial = self._jaxpr.outvars[len(per_replica) + len(writes) :]
        self._initial = dict(zip(self.created, initial, strict=True))

    @functools.cached_property
    def spans_devices(self) -> bool:
        """Whether the program runs on several devices, as far as the trace shows."""
        return any(mesh.size > 1 for mesh in self.meshes)

    @functools.cached_property
    def meshes(self) -> frozenset[Any]:
        """The meshes of its arguments and equations."""
        topologies = (aux[0] for kind, aux in nodes_of(self._treedef) if kind is PerReplica)
        of_arguments = (t.mesh for t in topologies if t.mesh is not None)
        return frozenset((*of_arguments, *_meshes_of(self._jaxpr)))

    def record(self, reached: Reached) -> None:
        """Records the objects that the trace has reached, once."""
        roots, self.roots = self.roots, []
        if roots:
            reached.record(roots, (*self.reads, *self.writes, *self.created))

    def make_created(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Computes the initial values of created variables, for a call, and stores them.

        By one program per strategy, with output shardings, so that no value is ever whole on one
        device.
        """
        groups: dict[Any, list[Variable]] = {}
        for variable in self.created:
            if variable.storage is None:  # on devices that only compile there is nothing to compute
                groups.setdefault(variable.strategy, []).append(variable)
        if not groups:
            return
        read = (as_global(v, v.stored.hand_out()) for v in self.reads)
        inputs = [*jax.tree.leaves(step.place((args, kwargs))), *read]
        values: dict[Variable, Any] = {}
        for variables in groups.values():
            values.update(zip(variables, self._initial_values(variables, inputs), strict=True))
        for variable, value in values.items():
            _store_initial(variable, value)

    def _initial_values(
        self, variables: Sequence[Variable], inputs: Sequence[Any]
    ) -> Sequence[Any]:
        part = jax_compat.needed_for(self._jaxpr, [self._initial[v] for v in variables])

        def initial(arrays: Sequence[Any]) -> list[Any]:
            values = jax_compat.eval_jaxpr(part, self._consts, arrays)
            return [_initial_in_stored_form(*pair) for pair in zip(variables, values, strict=True)]

        shardings = [v.sharding if v.size else None for v in variables]
        return compute_initial(variables, initial, (inputs,), shardings)

    @property
    def equations(self) -> Iterator[jax_compat.JaxprEqn]:
        """The equations of its code, at any depth."""
        return jax_compat.equations_of(self._jaxpr)

    @property
    def constants(self) -> list[Any]:
        """The arrays that the step captured."""
        return self._consts

    @constants.setter
    def constants(self, values: Sequence[Any]) -> None:
        self._consts = list(values)

    @property
    def results(self) -> list[tuple[str, bool]]:
        """The paths of the array results, and whether each differs per replica."""
        varying = (w is not None for w in self._per_replica)
        return list(zip(self._partitioned.paths, varying, strict=True))

    def move_to(self, sharding: Sharding) -> None:
        """Lets it be evaluated on one device, whichever its code names."""
        self._jaxpr = on_device(self._jaxpr, sharding)
        self._constraints = _constraints_of(self._jaxpr)

    def evaluate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[Any, Any]
    ) -> tuple[list[Any], OutputSpec, dict[Any, Any]]:
        """Returns the array results, their form, and the new values of written variables."""
        inputs = [*jax.tree.leaves((args, kwargs)), *(as_global(v, values[v]) for v in self.reads)]
        outs = stage_call(self._jaxpr, self._consts, inputs, self.name)
        num_results = len(self._per_replica)
        new = dict(zip(self.writes, outs[num_results:], strict=False))
        results = zip(outs[:num_results], self._jaxpr.outvars[:num_results], strict=True)
        arrays = [self._as_result(value, atom) for value, atom in results]
        if not jax_compat.compiles():  # copies: an array of the user may be written, and donated
            new = {v: jnp.copy(x) for v, x in new.items()}
        return arrays, OutputSpec(self._partitioned, self._per_replica, self._log.reused), new

    def _as_result(self, value: ArrayLike, atom: jax_compat.Var | jax_compat.Literal) -> Any:
        """Returns the value of an output as the user gets it."""
        if isinstance(atom, jax_compat.Literal):
            return value
        if atom in self._state_vars:
            # Its own buffer: the variable's will be donated while the user holds the result.
            return jnp.copy(value)
        if atom in self._constraints:
            # Once more, since JAX does not look for the layout of a result inside of calls.
            return jax_compat.bind_equation(self._constraints[atom], [value])[0]
        return value


def _constraints_of(jaxpr: jax_compat.Jaxpr) -> dict[Any, jax_compat.JaxprEqn]:
    """Returns the constraints in code by what they return."""
    found = (e for e in jaxpr.eqns if e.primitive.name in jax_compat.CONSTRAINTS)
    return {e.outvars[0]: e for e in found}


def discover(
    step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], log: CreationLog
) -> Discovered:
    """Traces a step and returns it with its variables found; `log` records the created ones."""
    given, treedef = jax.tree.flatten((args, kwargs))
    around = Surroundings(step.function, is_stateful, (args, kwargs), step.argument_names)
    found: dict[str, Any] = {"takes_spread": any(map(_is_spread, given))}

    def trace(*arrays: jax.Array) -> list[Any]:
        state = TraceState(local_view=False, creations=log)
        hooks.tell(hooks.on_stand_ins, arrays, given)
        for array, argument in zip(arrays, given, strict=True):
            stand_in(array, argument)
        with frames.with_frame(step.frame(state)) as entered:
            result = step.emit(step.function, state, *jax.tree.unflatten(treedef, arrays))
            partitioned = PartitionedTree(result, _is_result)
            for leaf in partitioned.leaves:
                require_held(leaf, f"a result of {step.name}")
        topology = entered.strategy.extended.topology
        leaves = partitioned.take_leaves()
        facts = {describe: describe(leaves) for describe in hooks.describe}
        results = [place_output(leaf, topology) for leaf in leaves]
        per_replica = tuple(r.aux if isinstance(r, PerReplica) else None for r in results)
        writes = list(state.written)
        outs = [r.stacked if isinstance(r, PerReplica) else r for r in results]
        outs += [to_storage(v, state.read(v)) for v in writes]
        found.update(partitioned=partitioned, per_replica=per_replica, writes=writes, facts=facts)
        return [*outs, *log.take_values()]

    with contextlib.closing(log), _naming_arguments(step, args, kwargs), around.watching():
        with explaining_errors():
            jaxpr, consts = traces.trace_jaxpr(trace, list(map(type_of, given)))
    discovered = Discovered(step.name, jaxpr, consts, treedef, log=log, **found)
    discovered.roots = [step.function, *around.objects]
    around.require_no_leaks(found["partitioned"].objects)
    around.require_inputs(jaxpr, consts)
    _require_no_baked_state(consts)
    hooks.tell(
        hooks.on_program,
        discovered.reads,
        discovered.writes,
        discovered.results,
        discovered.facts,
    )
    return discovered


def _is_spread(value: object) -> bool:
    """Returns whether an argument is an array on several devices; tracers do not tell."""
    if not isinstance(value, jax.Array) or isinstance(value, jax_compat.Tracer):
        return False
    return len(value.sharding.device_set) > 1


@contextlib.contextmanager
def _naming_arguments(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
    """Names the arguments in errors of a trace about their values."""
    try:
        yield
    except Exception as error:
        leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
        paths = [user_path(jax.tree_util.keystr(key), step.argument_names) for key, _ in leaves]
        add_value_note(error, step.name, paths, [leaf for _, leaf in leaves])
        raise


def _meshes_of(jaxpr: jax_compat.Jaxpr) -> Iterator[Any]:
    """Yields the meshes named by equations at any depth."""
    for eqn in jax_compat.equations_of(jaxpr):
        mesh = getattr(eqn.params.get("sharding"), "mesh", eqn.params.get("mesh"))
        if hasattr(mesh, "size"):
            yield mesh


def _is_result(value: object) -> bool:
    return is_array(value) or isinstance(value, AlreadyPlaced)


def _require_no_baked_state(consts: Sequence[Any]) -> None:
    """Raises if an object's state entered the trace as a constant."""
    bridge = active_bridge() if consts else None
    found = bridge.find_baked(consts) if bridge is not None else None
    if found is None:
        return
    raise TraceLeakError(
        f"{found} needs to be an argument, or captured where distjax can see it",
        got="its current value as a constant of the compiled program",
        why="distjax searches arguments, closures, globals that the code names and attributes "
        "of your objects; what it does not find would be read once and never again",
        fix="pass the object: strategy.run(step, args=(model, batch))",
    )


def signature_of(tree: PyTree) -> tuple[Any, ...]:
    """Returns what a trace depends on: the tree, and each leaf's type."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(map(type_of, leaves))
