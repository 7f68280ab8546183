"""Where variables are read and written in a trace: its state.

During a trace, a variable's value lives in the trace's state, outside of traces in its storage. The
first read stages a `variable` equation in the trace that owns the state, no matter how deeply
nested the reader is. When the trace is compiled, these equations become inputs of the program, and
the written values become outputs.

The initial values of variables that the traced function creates are outputs of the trace, too. When
it ends, the values are computed, the variables get their storage, and the function is traced again:
its constructors then return the variables already made, in order (`CreationLog`).
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import Any, Protocol

import jax

from distjax._src import jax_compat, traces
from distjax._src.jax_compat import ShapedArray
from distjax._src.typing import DTypeLike, PyTree
from distjax._src.variables.layouts import LocalForm
from distjax.errors import ContextError, TraceLeakError, message

variable_p = jax_compat.Primitive("distjax_variable")
#: The scope in which what a step is given in parts is gathered, with what it is a part of.
PARTS_OF = re.compile(r"distjax_parts_of:([\w.]*)")
#: The scope in which what the replicas wrote to objects is combined after a step.
COMBINED_WRITES = "distjax_combined_writes"


class WeakVariable(weakref.ref[Any]):
    """A variable as an equation parameter; call it to get the variable.

    The reference is weak because JAX's cache of abstract evaluations keeps parameters
    alive, and a variable keeps all its arrays alive. JAX itself refers to it weakly, for which
    it needs a class of its own.
    """


class TracedVariable(Protocol):
    """A variable, as a trace needs it; `is_being_made` while the trace that creates it is on."""

    name: str
    is_being_made: bool

    def traced_type(self, *, local: bool) -> ShapedArray:
        """Returns the type of its value at the start of a trace; raises if it has none."""
        ...

    def gather(self, local: jax.Array) -> Any:
        """Returns the value that a replica reads, from what it holds."""
        ...


@variable_p.def_abstract_eval
def _variable_abstract_eval(*, variable: WeakVariable, aval: ShapedArray) -> ShapedArray:
    return aval


@variable_p.def_impl
def _refuse_to_evaluate(*, variable: WeakVariable, aval: ShapedArray) -> Any:
    read: Any = variable()
    raise TraceLeakError(
        f"a read of variable {read.name!r} needs to be traced with its step",
        got="eager evaluation, though the step is being traced",
        why="jax.ensure_compile_time_eval() is active, or an interrupt (Ctrl-C) in a trace has "
        "left JAX's state of this thread behind",
        fix="leave `with jax.ensure_compile_time_eval():`; after an interrupt go on in a new "
        "thread, or restart the process",
    )


def find_variables(jaxpr: jax_compat.Jaxpr) -> dict[jax_compat.Var, Any]:
    """Returns the variables that `jaxpr` reads, by the names of their values."""
    reads = (e for e in jaxpr.eqns if e.primitive is variable_p)
    return {e.outvars[0]: e.params["variable"]() for e in reads}


def with_variables_as_inputs(jaxpr: jax_compat.Jaxpr) -> tuple[jax_compat.Jaxpr, list[Any]]:
    """Returns `jaxpr` with an input more for each variable that it reads, and these variables."""
    read = find_variables(jaxpr)
    code = jax_compat.new_jaxpr(
        jaxpr,
        jaxpr.constvars,
        [*jaxpr.invars, *read],
        jaxpr.outvars,
        [e for e in jaxpr.eqns if e.primitive is not variable_p],
    )
    return code, list(read.values())


class TraceState:
    """Values of variables during one trace, in one of the two views.

    Attributes:
      local_view: whether values are one replica's; else they are in global form ([R, ...] for a
        variable with one component per replica).
      read_order: variables whose value at the start of the trace is needed.
      creations: the log of variables created in this trace; None if none can be.
      memory: what layers above remember of the functions that run in this trace.
      expectations: by `id`, each array that `dj.expect` allows to come back different, and why.
    """

    def __init__(
        self,
        *,
        local_view: bool,
        parent: TraceState | None = None,
        creations: CreationLog | None = None,
    ):
        self.local_view = local_view
        self.trace = traces.begin_trace()
        self.parent = parent
        self.creations = creations
        self.read_order: list[Any] = []
        self.written: dict[Any, None] = {}
        self.expectations: dict[int, tuple[Any, str]] = {}
        self.memory: dict[Any, Any] = {}
        self._values: dict[Any, Any] = {}
        self._read_inside: set[Any] = set()  # read by functions whose traces JAX caches
        self._gathered: dict[Any, tuple[Any, Any]] = {}
        self._shards: dict[int, tuple[Any, Any, Any]] = {}

    def read(self, variable: TracedVariable) -> Any:
        """Returns the value of `variable` in this state's view."""
        trace = jax_compat.current_trace()
        if trace is not self.trace and type(trace) is type(self.trace):  # not that of grad, vmap
            self._read_inside.add(variable)
        return self._values[variable] if variable in self._values else self._initial(variable)

    def _initial(self, variable: TracedVariable) -> Any:
        """Returns the value at the start of the trace, kept from now on."""
        self.read_order.append(variable)
        parent = self.parent
        if parent is not None:
            is_known = variable in parent._values
            value = parent._values[variable] if is_known else parent._initial(variable)
        else:
            aval = variable.traced_type(local=self.local_view)
            with jax_compat.in_trace(self.trace):
                value = variable_p.bind(variable=WeakVariable(variable), aval=aval)
        self._values[variable] = value
        return value

    def gather(self, variable: TracedVariable) -> Any:
        """Returns the whole value of a partitioned variable, gathered where it is read.

        Gathered once in the state's own trace, but again in each inner trace, so that
        `jax.checkpoint` re-gathers it instead of saving the whole.
        """
        shard = self.read(variable)
        if jax_compat.current_trace() is not self.trace:
            return variable.gather(shard)
        held, whole = self._gathered.get(variable, (None, None))
        if held is not shard:
            whole = variable.gather(shard)
            self._gathered[variable] = (shard, whole)
        return whole

    def whole(self, shard: jax.Array, form: LocalForm, name: str = "") -> Any:
        """Returns the value gathered from this replica's shard, and remembers the shard.

        Code that is given the whole value can get the shard back with `shard_of`; if nothing
        else uses the whole value, the gather is dead code. No line of the user's asks for it:
        `dj.explain` tells its name.
        """
        with jax.named_scope(f"distjax_parts_of:{name}"):
            whole = form.gather(shard)
        self._shards[id(whole)] = (whole, shard, form)
        return whole

    def shard_of(self, whole: jax.Array) -> tuple[Any, Any] | None:
        """Returns the (shard, local form) that `whole` was gathered from, or None."""
        held = self._shards.get(id(whole))
        return None if held is None else held[1:]

    def bind(self, variable: TracedVariable, value: PyTree) -> None:
        """Sets the value that `variable` has at the start of the trace."""
        self._renew_readers(variable)
        self._values[variable] = value

    def write(self, variable: TracedVariable, value: PyTree) -> None:
        """Sets a new value of `variable`."""
        if jax_compat.trace_state.value is not self.trace:
            self.require_writable(variable)
        self._renew_readers(variable)
        self._values[variable] = value
        self.written[variable] = None

    def _renew_readers(self, variable: TracedVariable) -> None:
        """Keeps JAX from reusing cached traces of functions that read the former value."""
        state: TraceState | None = self
        while state is not None:
            if variable in state._read_inside:
                traces.renew_inner_traces()
                return
            state = state.parent

    def require_writable(self, variable: TracedVariable) -> None:
        """Raises TraceLeakError inside an inner trace."""
        if jax_compat.current_trace() is not self.trace:
            raise TraceLeakError(leak_text(variable, "write", "an inner trace"))


class MergeState(TraceState):
    """The state of a merge function that is called where the program is emitted."""


class ShapeState(MergeState):
    """The state of a merge function that is traced where it is bound, for its shapes and facts."""


# -- variables that a trace creates ---------------------------------------------


class CreationLog:
    """The variables that one trace creates, or that the previous trace created.

    Attributes:
      made: the previous trace's variables by position; a constructor that runs again returns the
        one made at its position.
      outermost: the log that counts constructors across all nested traces.
      values: the variables that this trace creates and their initial values, in its view.
      collected: in the outermost log, the variables that any of these traces created.
      makes_at_once: whether variables get their storage immediately, from concrete initial values
        (merge functions, whose shape trace is thrown away); they are `remembered`.
    """

    def __init__(
        self,
        made: list[Any] | None = None,
        outermost: CreationLog | None = None,
        makes_at_once: bool = False,
    ):
        self.outermost = outermost or self
        self.made = made or []
        self.makes_at_once = makes_at_once
        self.remembered: list[Any] = []
        self.values: dict[Any, Any] = {}
        self.collected: list[Any] = []
        self.position = 0
        self.reused: tuple[str, ...] = ()

    @staticmethod
    def within(state: TraceState) -> CreationLog | None:
        """Returns the log for a trace nested in the trace of `state`."""
        around = state.creations
        if around is None or around.makes_at_once:
            return None
        return CreationLog(outermost=around.outermost)

    def take(self, *, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> Any | None:
        """Returns the variable previously made at this position, or None."""
        top = self.outermost
        position, top.position = top.position, top.position + 1
        if not top.made:
            return None
        if position >= len(top.made):
            raise ContextError(_changed_text(name, "one variable more than in the trace before"))
        variable = top.made[position]
        if (variable.shape, variable.dtype, variable.name) != (tuple(shape), dtype, name):
            got = f"{name!r} {dtype}{list(shape)} at the place of {variable!r}"
            raise ContextError(_changed_text(name, got))
        top.reused = (*top.reused, name)
        return variable

    def collect(self, variable: TracedVariable, value: PyTree) -> None:
        """Records a new variable and its initial value in this trace."""
        self.values[variable] = value
        variable.is_being_made = True  # the rest of the trace may use it
        self.outermost.collected.append(variable)

    def take_values(self) -> list[Any]:
        """Returns the initial values and drops them, so no tracer outlives its trace."""
        values = list(self.values.values())
        self.values = dict.fromkeys(self.values)
        return values

    def close(self) -> None:
        """Ends the outermost trace; from now on its variables need a stored value."""
        for variable in self.collected:
            variable.is_being_made = False


def require_no_trace(name: str) -> None:
    """Raises TraceLeakError inside a JAX trace that distjax does not own."""
    if jax_compat.tracing():
        raise TraceLeakError(_creation_leak_text(name))


def require_own_trace(state: TraceState, name: str) -> None:
    """Raises TraceLeakError unless the trace of `state` can create a variable here."""
    creations = state.creations
    if creations is not None and not creations.makes_at_once:
        if jax_compat.current_trace() is state.trace:
            return
    raise TraceLeakError(_creation_leak_text(name))


def _creation_leak_text(name: str) -> str:
    return message(
        f"variable {name!r} needs to be created outside of inner traces",
        got="a creation from a traced value inside jax.jit, a loop, a branch, grad, vmap or a "
        "merge function, or in a step for parameter servers",
        why="its initial value belongs to the inner trace and would leak out of it",
        fix="create it before, under `with strategy.scope():`, or, except with parameter servers, "
        "at the top of the replica function; in a merge function from a concrete value or a "
        "function: dj.Variable(lambda: jnp.zeros(3))",
    )


def _changed_text(name: str, got: str) -> str:
    return message(
        f"variable {name!r} needs to be created in the same order each time",
        got=got,
        why="a function that creates variables is traced a second time, and each constructor is "
        "handed the variable made at its place",
        fix="create variables outside, or guard them: "
        "`if self.v is None: self.v = dj.Variable(...)`",
    )


# -- the texts of leak errors ---------------------------------------------------

#: Control flow that `dj.lax` provides too; `_LOOPS` adds what it does not.
_CARRYING_LOOPS = {"scan", "while_loop", "fori_loop", "cond", "switch"}
_LOOPS = _CARRYING_LOOPS | {"map", "associative_scan"}
_TRANSFORMS = {
    "value_and_grad_f": "grad",
    "grad_f": "grad",
    "vjp": "vjp",
    "jvp": "jvp",
    "linearize": "linearize",
    "vmap_f": "vmap",
    "cache_miss": "jit",
    "make_jaxpr_f": "make_jaxpr",
    "eval_shape": "eval_shape",
    "fun_remat": "checkpoint",
}


def leak_text(variable: TracedVariable, action: str, place: str) -> str:
    """Returns the text for using a variable in a trace that distjax does not own.

    `place` is where that happens, if the call stack shows no JAX construct.
    """
    construct = _enclosing_construct()
    inside = f"jax.{construct}" if construct in _TRANSFORMS.values() else f"jax.lax.{construct}"
    inside = inside if construct else place
    if construct in _CARRYING_LOOPS:
        fix = f"use distjax.lax.{construct}, which carries the variables that its body writes"
    elif action == "read" and construct not in (None, "jit"):
        fix = "read it before: value = v.value; or compile the code around it with distjax.jit, "
        fix += "which follows variables"
    elif place.startswith("an inner") or construct not in (None, "jit"):
        fix = "return the new value from the inner function and assign it outside"
        if construct == "jit":
            fix = (
                "distjax.jit in place of jax.jit, or leave jit out: run and distjax.jit compile "
                f"what they call; or {fix}"
            )
    elif jax.sharding.get_abstract_mesh().manual_axes:
        inside = "jax.pmap or jax.shard_map"
        fix = "dj.pmap(fn, strategy=strategy) in place of jax.pmap, or strategy.run: they follow "
        fix += "variables"
    else:
        fix = "compile the step with distjax.jit (dj.jit) in place of jax.jit: it follows variables"
    return message(
        f"a {action} of variable {variable.name!r} needs to happen in the function that "
        "distjax traces",
        got=f"a {action} inside {inside}",
        why="the value would be baked into the inner program"
        if action == "read"
        else "the new value belongs to the inner trace and would leak out of it",
        fix=fix,
    )


def _enclosing_construct() -> str | None:
    """Returns the innermost JAX construct on the call stack, for error texts.

    JAX builds constructs on one another (`fori_loop` on `scan`, `grad` on `linearize`), so
    of JAX calls with no user code between them, the outermost is the one the user wrote.
    Loops called by `dj.lax` are skipped, because they carry variables.
    """
    frame, found = sys._getframe(1), None  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("jax."):
            is_loop = name in _LOOPS and ".lax." in module
            found = name if is_loop else _TRANSFORMS.get(name, found)
        elif module == "distjax._src.replica.lax":
            found = None
        elif module not in ("contextlib", "functools"):
            if found or module == "distjax._src.program.program":
                return found
        frame = frame.f_back
    return found
