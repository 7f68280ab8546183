"""The only door to what differs between JAX versions, and to its machinery.

It uses `jax.*`, `jax.core`, `jax.extend.core` and `jax.interpreters` only, of JAX 0.10.2 to 0.12.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.extend.backend as jeb
import jax.extend.core as jec
import numpy as np
from jax import core
from jax.interpreters import ad, batching, partial_eval

from distjax.typing import ArrayLike, DTypeLike, PyTree

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:2])

#: Before JAX 0.12 a CPU process with several devices hangs when about 30
#: programs with collectives are enqueued and none is awaited.
CPU_COLLECTIVES_NEED_THROTTLE: bool = JAX_VERSION < (0, 12)

Primitive = jec.Primitive
Jaxpr = jec.Jaxpr
ClosedJaxpr = jec.ClosedJaxpr
JaxprEqn = jec.JaxprEqn
Literal = jec.Literal
Var = jec.Var
Tracer = core.Tracer
find_top_trace = jec.find_top_trace
ShapedArray = core.ShapedArray
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
Zero = ad.Zero
dce_jaxpr = partial_eval.dce_jaxpr
is_undefined_primal = ad.is_undefined_primal


def only_compiles(devices: Iterable[jax.Device]) -> bool:
    """Returns whether `devices` are described, not present: programs compile, none runs.

    Such devices come from `jax.experimental.topologies`. JAX has no public question for them.
    """
    return any(type(d.client).__name__ == "CompileOnlyPyClient" for d in devices)


# -- traces -------------------------------------------------------------------


def current_trace() -> core.Trace:
    """Returns the JAX trace that operations of this thread go to."""
    return jec.find_top_trace(())


_EVAL_TRACE = current_trace()
#: The type of the current trace (`find_top_trace`) where no trace is under way.
EVAL_TRACE_TYPE = type(_EVAL_TRACE)


def in_trace(trace: core.Trace) -> AbstractContextManager[Any]:
    """Returns a context in which operations go to `trace`."""
    return jec.set_current_trace(trace)


def outside_traces() -> AbstractContextManager[Any]:
    """Returns a context in which operations run at once, whatever trace is under way.

    In `jax.ensure_compile_time_eval` the body of a `jit` without arguments runs
    operation by operation; here it is compiled.
    """
    return jec.set_current_trace(_EVAL_TRACE)


def tracing() -> bool:
    """Returns whether any JAX trace (jit, grad, vmap, ...) is under way."""
    return type(jec.find_top_trace(())) is not EVAL_TRACE_TYPE


def staging() -> bool:
    """Returns whether operations on constants are staged (as under `jit`)."""
    if not tracing():
        return False
    zero = np.int32(0)  # of one dtype on both sides, in 64-bit mode too
    return isinstance(jax.lax.add(zero, zero), Tracer)


def trace_jaxpr(
    fn: Callable[..., Any], avals: Sequence[Any], axis_env: Sequence[tuple[str, int]] = ()
) -> tuple[jec.Jaxpr, list[Any]]:
    """Traces `fn` and returns its jaxpr and the constants it closed over.

    JAX caches the traces of inner `jit`, `scan`, `cond` and `remat` by function,
    avals and axis names, not by our frames. So each trace under way has an axis name
    of its own, and no inner function hands back another trace's tracer. When the trace
    ends the name is used again, and with it the traces of jnp's own functions, unless
    the trace was `forget_inner_traces`.
    """
    lease = _TraceName()

    def named(*args: PyTree) -> Any:
        lease.trace = current_trace()
        return fn(*args)

    functools.update_wrapper(named, fn)
    try:
        closed = jax.make_jaxpr(named, axis_env=[*axis_env, (lease.name, 1)])(*avals)
    except BaseException:
        lease.is_reusable = False
        raise
    finally:
        lease.end()
    return open_jaxpr(closed)


class _TraceName:
    """The axis name of one trace under way.

    Attributes:
      name: the name, which no other trace under way has.
      trace: the trace, once it has begun.
      is_reusable: whether another trace may have the name after this one.
    """

    _free: ClassVar[list[str]] = []
    under_way: ClassVar[list[_TraceName]] = []
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        try:
            self.name = self._free.pop()
        except IndexError:
            self.name = f"_distjax_trace_{next(self._numbers)}"
        self.trace: core.Trace | None = None
        self.is_reusable = True
        self.under_way.append(self)

    def end(self) -> None:
        """Gives the name back."""
        self.under_way.remove(self)
        self.trace = None
        if self.is_reusable:
            self._free.append(self.name)


def forget_inner_traces(trace: core.Trace) -> None:
    """Says that a function inside `trace` depends on more than JAX knows of.

    JAX may keep the trace of that inner function: no later trace must find it.
    """
    is_inside = False
    for lease in tuple(_TraceName.under_way):  # outermost first
        is_inside = is_inside or lease.trace is trace
        lease.is_reusable = lease.is_reusable and not is_inside


def traced_avals(fn: Callable[[], list[Any]]) -> list[Any]:
    """Returns shapes and dtypes of what ``fn`` returns, by one trace."""
    jaxpr, _ = trace_jaxpr(fn, ())
    return [v.aval for v in jaxpr.outvars]


def aval_of(value: ArrayLike) -> ShapedArray:
    """Returns shape, dtype and weak type of an array or Python number."""
    aval = jax.typeof(value)
    return ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# -- jaxprs -------------------------------------------------------------------


def open_jaxpr(closed: jec.Jaxpr | jec.ClosedJaxpr) -> tuple[jec.Jaxpr, list[Any]]:
    """Returns (jaxpr, consts) of a jaxpr, closed or not; JAX 0.12 has one class for both."""
    jaxpr: Any = getattr(closed, "jaxpr", closed)
    return jaxpr, list(getattr(closed, "consts", None) or ())


def new_jaxpr(
    like: jec.Jaxpr,
    constvars: Sequence[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
) -> jec.Jaxpr:
    """Returns a jaxpr made of equations of the jaxpr `like`."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    info = like.debug_info._replace(arg_names=None, result_paths=None)
    return jec.Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, info)


def eval_jaxpr(jaxpr: jec.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates `jaxpr` under whatever trace is current."""
    return core.eval_jaxpr(jaxpr, consts, *args)


def live_equations(
    eqns: Sequence[Any], outvars: Sequence[Any], keep_effects: bool = True
) -> list[Any]:
    """Returns the equations that `outvars` depend on, and those with effects."""
    needed = {v for v in outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars) or (keep_effects and eqn.effects):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live[::-1]


def needed_for(jaxpr: jec.Jaxpr, outvars: Sequence[Any]) -> jec.Jaxpr:
    """Returns `jaxpr` cut down to the equations that `outvars` depend on."""
    eqns = live_equations(jaxpr.eqns, outvars, keep_effects=False)
    return new_jaxpr(jaxpr, jaxpr.constvars, jaxpr.invars, outvars, eqns)


def sub_jaxprs(eqn: jec.JaxprEqn) -> Iterator[jec.Jaxpr]:
    """Yields the jaxprs that an equation holds in its parameters."""
    # A `call_hi_primitive` has them in an object (`custom_root` is one from JAX 0.12 on).
    hidden = getattr(eqn.params.get("_prim"), "params", {})
    inner = {key: getattr(value, "jaxpr", value) for key, value in hidden.items()}
    for sub in jec.jaxprs_in_params({**eqn.params, **inner}):
        yield open_jaxpr(sub)[0]


def solver_call(eqn: jec.JaxprEqn) -> tuple[jec.Jaxpr, list[int]] | None:
    """Returns the jaxpr that a `custom_linear_solve` or `custom_root` runs, and on which operands.

    None for other equations. Its other jaxprs are for derivatives, whose rules JAX has
    applied by the time anybody sees the equation.
    """
    if eqn.primitive.name == "custom_linear_solve":
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        operands = [*range(first, first + lengths.solve), *range(sum(lengths), len(eqn.invars))]
        return open_jaxpr(eqn.params["jaxprs"].solve)[0], operands
    hidden = getattr(eqn.params.get("_prim"), "params", {})
    if "solve_jaxpr" in hidden:  # `custom_root` from JAX 0.12 on; before it is a `custom_jvp_call`
        jaxpr, _ = open_jaxpr(hidden["solve_jaxpr"])
        return jaxpr, list(range(len(jaxpr.invars)))
    return None


def meshes_of(jaxpr: jec.Jaxpr) -> Iterator[Any]:
    """Yields the meshes that equations name, at any depth."""
    for eqn in jaxpr.eqns:
        mesh = getattr(eqn.params.get("sharding"), "mesh", eqn.params.get("mesh"))
        if hasattr(mesh, "size"):
            yield mesh
        for sub in sub_jaxprs(eqn):
            yield from meshes_of(sub)


def spans_processes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Returns whether a mesh has devices of several processes; of an abstract one nobody knows."""
    return getattr(mesh, "is_multi_process", False)


def scan_sizes(eqn: jec.JaxprEqn) -> tuple[int, int]:
    """Returns (number of constants, number of carries) of a `scan` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # JAX 0.12 keeps the operands' tree in place of their numbers.
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def source_line(eqn: jec.JaxprEqn) -> str:
    """Returns "file:line (function)" of the user's line behind an equation."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_library_file(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an unknown line"


def user_stacklevel() -> int:
    """Returns the `stacklevel` for a warning of our caller that points at the user's line."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and is_library_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


_LIBRARY_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, jax.__file__)
)

#: What stands for a file where a user types: Python's and IPython's prompts, doctests. Other
#: names in brackets are of code that a library makes.
_PROMPTS = ("<stdin", "<python-input", "<ipython-input", "<console", "<doctest")


def is_library_file(name: str) -> bool:
    """Returns whether a source file belongs to distjax or JAX, or is none of the user's."""
    if name.startswith("<"):
        return not name.startswith(_PROMPTS)
    return name.startswith(_LIBRARY_FOLDERS)


# -- arrays -------------------------------------------------------------------


def is_key_dtype(dtype: DTypeLike | None) -> bool:
    """Returns whether `dtype` is that of typed PRNG keys."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def key_impl(dtype: DTypeLike) -> str:
    """Returns the name of the implementation of PRNG keys, which JAX tells of arrays only."""
    return str(jax.random.key_impl(jax.lax.empty((), dtype)))


def another_handle(array: jax.Array) -> jax.Array:
    """Returns a new array object over the same buffers."""
    shards = [s.data for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def is_device_mismatch(error: Exception) -> bool:
    """Returns whether JAX refused arrays because they are on different devices."""
    return "incompatible devices" in str(error)


def is_broken_cache(error: Exception) -> bool:
    """Returns whether an interrupt has left the cache of a `jax.jit` unusable."""
    return isinstance(error, RecursionError) and "Recursively calling <weakref" in str(error)


def as_uncommitted(array: jax.Array) -> jax.Array:
    """Returns a copy, by way of the host, that JAX puts wherever it is used."""
    if is_key_dtype(array.dtype):
        data = as_uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=key_impl(array.dtype))
    return jax.numpy.asarray(np.asarray(array))


# -- processes ----------------------------------------------------------------
# JAX has no public form of these questions. The two modules that answer them are found by a public
# function of each; on JAX 0.10.2 to 0.12 the names are the same.

_distributed: Any = sys.modules[jax.distributed.initialize.__module__]
_backends: Any = sys.modules[jeb.register_backend_factory.__module__]
_config: Any = jax.config  # its type does not know its options
_first_uses: list[str] = []
_gloo_hosts: list[str] = []


def coordination_client() -> Any:
    """Returns JAX's client of the coordination service, or None without one."""
    return _distributed.global_state.client


def detect_cluster(*known_method_and_timeout: object) -> tuple[Any, Any, Any, Any]:
    """Returns coordinator address, number of processes, process id and local devices.

    What JAX finds out about the cluster that this process was started in.

    Args:
      known_method_and_timeout: the four as far as they are known (None: not), JAX's name of
        a way to find out the rest (None: any), and how many seconds that may take.
    """
    detect = _distributed.clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(*known_method_and_timeout)


def first_use_of_a_backend() -> str | None:
    """Returns where a backend was first used, or None: it may still become part of a job."""
    if not _backends.backends_are_initialized():
        return None
    return _first_uses[-1] if _first_uses else "a line that is not known"


def make_gloo_listen_at(host: str) -> None:
    """Has CPU collectives listen at `host`; of itself JAX asks what the machine's name means."""
    _gloo_hosts[:] = [host]
    jeb.register_backend_factory("cpu", _make_cpu_client, priority=0, fail_quietly=False)


def _make_cpu_client() -> Any:
    frame = sys._getframe(user_stacklevel() - 1)  # pyright: ignore[reportPrivateUsage]
    _first_uses.append(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
    if not _gloo_hosts or _config.jax_cpu_collectives_implementation != "gloo":
        return _backends.make_cpu_client()
    make = _backends._jax.make_gloo_tcp_collectives
    return _backends.make_cpu_client(make(coordination_client(), hostname=_gloo_hosts[0]))


if not _backends.backends_are_initialized():  # in the place of JAX's own, to know the line
    jeb.register_backend_factory("cpu", _make_cpu_client, priority=0, fail_quietly=False)
