"""The only module that deals with JAX version differences and JAX internals.

It supports JAX 0.10.2 to 0.12 and imports only `jax`, `jax.core`, `jax.extend` and
`jax.interpreters`. Five internal modules are reached through public names; see "traces",
"settings" and "processes".
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.extend.backend as jeb
import jax.extend.core as jec
import numpy as np
from jax import core
from jax.interpreters import ad, batching, partial_eval

from distjax._src.typing import ArrayLike, DTypeLike
from distjax._src.user_lines import UNKNOWN, calling_line

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:2])

T = TypeVar("T")

#: Before JAX 0.12, a CPU process with several devices hangs: see `collectives/eager.py`.
CPU_COLLECTIVES_NEED_THROTTLE: bool = JAX_VERSION < (0, 12)
#: Before JAX 0.12, a program on several devices aborts the process if it donates a deleted array.
REFUSES_TO_DONATE_DELETED: bool = JAX_VERSION >= (0, 12)
#: XLA's options to compile faster what runs but once.
QUICK_COMPILATION: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if JAX_VERSION < (0, 11):  # halves it once more there; in 0.12 it changes nothing
    QUICK_COMPILATION["xla_cpu_use_fusion_emitters"] = False

Primitive = jec.Primitive
Jaxpr = jec.Jaxpr
ClosedJaxpr = jec.ClosedJaxpr
JaxprEqn = jec.JaxprEqn
Literal = jec.Literal
Var = jec.Var
Tracer = core.Tracer
ShapedArray = core.ShapedArray
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
Zero = ad.Zero
dce_jaxpr = partial_eval.dce_jaxpr
is_undefined_primal = ad.is_undefined_primal


def only_compiles(devices: Iterable[jax.Device]) -> bool:
    """Returns whether `devices`, all of one client, can only be compiled for, not run on.

    Such devices come from `jax.experimental.topologies` (JAX has no public API to ask), or are
    those that `describing` names.
    """
    first = next(iter(devices), None)
    if first is None or first in _described:
        return first is not None
    return type(first.client).__name__ == "CompileOnlyPyClient"


_described: set[jax.Device] = set()


@contextlib.contextmanager
def describing(devices: Iterable[jax.Device]) -> Generator[None]:
    """A context in which devices that exist are only compiled for: nothing is put on them."""
    added = {*devices} - _described
    _described.update(added)
    try:
        yield
    finally:
        _described.difference_update(added)


# -- traces -------------------------------------------------------------------


# `jex.core.find_top_trace(())` returns the value of a thread-local that every call of a program
# asks for. The module is located through it; the names used are the same in JAX 0.10.2 to 0.12.
_core: Any = sys.modules[jec.find_top_trace.__module__]
#: Its `value` is the trace that receives this thread's operations, found in C.
trace_state: Any = _core.trace_state_strong_ref
#: That trace when nothing is being traced.
EVAL_TRACE: core.Trace = _core.eval_trace


def current_trace() -> core.Trace:
    """Returns the JAX trace that receives this thread's operations."""
    return trace_state.value


def in_trace(trace: core.Trace) -> AbstractContextManager[Any]:
    """Returns a context in which operations are recorded in `trace`."""
    return jec.set_current_trace(trace)


def outside_traces() -> AbstractContextManager[Any]:
    """Returns a context in which operations run eagerly, even while tracing.

    Unlike under `jax.ensure_compile_time_eval`, a `jit` without arguments is compiled here
    rather than run operation by operation.
    """
    return jec.set_current_trace(EVAL_TRACE)


def tracing() -> bool:
    """Returns whether any JAX trace (jit, grad, vmap, ...) is active."""
    return trace_state.value is not EVAL_TRACE


def staging() -> bool:
    """Returns whether operations on constants are staged (as under `jit`)."""
    if not tracing():
        return False
    zero = np.int32(0)  # the same dtype on both sides, in 64-bit mode too
    return isinstance(jax.lax.add(zero, zero), Tracer)


def resize_axis(name: str, size: int) -> None:
    """Gives an axis that an enclosing `jax.make_jaxpr(axis_env=...)` binds another size there."""
    _core.extend_axis_env_nd([(name, size)]).__enter__()  # `make_jaxpr` restores what was bound


def aval_of(value: ArrayLike) -> ShapedArray:
    """Returns the shape, dtype and weak type of an array or Python number."""
    aval = jax.typeof(value)
    return ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# -- jaxprs -------------------------------------------------------------------

#: Primitives that return their operand, in a sharding or a layout in memory.
CONSTRAINTS = frozenset(("layout_constraint", "relayout", "sharding_constraint"))


def open_jaxpr(closed: jec.Jaxpr | jec.ClosedJaxpr) -> tuple[jec.Jaxpr, list[Any]]:
    """Returns (jaxpr, consts) of an open or closed jaxpr; JAX 0.12 has one class for both."""
    jaxpr: Any = getattr(closed, "jaxpr", closed)
    return jaxpr, list(getattr(closed, "consts", None) or ())


def new_jaxpr(
    like: jec.Jaxpr,
    constvars: Sequence[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
) -> jec.Jaxpr:
    """Returns a jaxpr built from equations of the jaxpr `like`."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    info = like.debug_info._replace(arg_names=None, result_paths=None)
    atoms = list(constvars), list(invars), list(outvars)
    return jec.Jaxpr(*atoms, list(eqns), effects, info, is_high=like.is_high)


def eval_jaxpr(
    jaxpr: jec.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    bind: Callable[[jec.JaxprEqn, list[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Evaluates `jaxpr` under whatever trace is current, each equation by `bind` if it is given."""
    if bind is None:
        return core.eval_jaxpr(jaxpr, consts, *args)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, bind(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def bind_equation(
    eqn: jec.JaxprEqn, ins: Sequence[Any], params: Mapping[str, Any] | None = None
) -> Sequence[Any]:
    """Evaluates an equation, with its own parameters or these, under the current trace."""
    with eqn.ctx.manager:
        given = eqn.primitive.get_bind_params(params or eqn.params)
        outs = eqn.primitive.bind(*ins, **given)
    return outs if eqn.primitive.multiple_results else [outs]


def called_jaxpr(eqn: jec.JaxprEqn) -> tuple[jec.Jaxpr, list[Any]]:
    """Returns (jaxpr, consts) of an equation that calls one jaxpr on its operands."""
    keys = (key for key in ("jaxpr", "call_jaxpr", "call") if key in eqn.params)
    return open_jaxpr(eqn.params[next(keys)])


def equation_of(value: ArrayLike) -> Any:
    """Returns the equation that computes a tracer; None for that of an argument or of `grad`."""
    return getattr(value, "parent", None) if isinstance(value, Tracer) else None


def output_number(value: ArrayLike, eqn: jec.JaxprEqn) -> int:
    """Returns which output of its equation (`equation_of`) a tracer is."""
    tracer: Any = value
    return next(i for i, v in enumerate(eqn.outvars) if v is tracer.val)


def live_equations(
    eqns: Sequence[Any], outvars: Sequence[Any], keep_effects: bool = True
) -> list[Any]:
    """Returns the equations that `outvars` depend on, plus those with effects."""
    needed = {v for v in outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars) or (keep_effects and eqn.effects):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live[::-1]


def needed_for(jaxpr: jec.Jaxpr, outvars: Sequence[Any]) -> jec.Jaxpr:
    """Returns `jaxpr` reduced to the equations that `outvars` depend on."""
    eqns = live_equations(jaxpr.eqns, outvars, keep_effects=False)
    like = new_jaxpr(jaxpr, (), jaxpr.invars, outvars, eqns)
    # Not `like` itself: in JAX 0.12 it would take the constants as arguments; `replace` keeps them.
    return jaxpr.replace(
        outvars=like.outvars, eqns=like.eqns, effects=like.effects, debug_info=like.debug_info
    )


def sub_jaxprs(eqn: jec.JaxprEqn) -> Iterator[jec.Jaxpr]:
    """Yields the jaxprs held in an equation's parameters."""
    params = eqn.params
    if "_prim" in params:
        # `call_hi_primitive` keeps them in an object (`custom_root` is one as of JAX 0.12).
        hidden = getattr(params["_prim"], "params", {})
        params = {**params, **{key: getattr(held, "jaxpr", held) for key, held in hidden.items()}}
    for sub in jec.jaxprs_in_params(params):
        yield open_jaxpr(sub)[0]


def equations_of(
    jaxpr: jec.Jaxpr, enters: Callable[[jec.JaxprEqn], bool] = lambda eqn: True
) -> Iterator[jec.JaxprEqn]:
    """Yields the equations of a jaxpr and those inside of them that it `enters`, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        if enters(eqn):
            for sub in sub_jaxprs(eqn):
                yield from equations_of(sub, enters)


def solver_call(eqn: jec.JaxprEqn) -> tuple[jec.Jaxpr, list[int]] | None:
    """Returns (jaxpr, operand indices) of a `custom_linear_solve` or `custom_root`, or None.

    A solver's other jaxprs are derivative rules, which JAX applied before the equation is visible.
    """
    if eqn.primitive.name == "custom_linear_solve":
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        operands = [*range(first, first + lengths.solve), *range(sum(lengths), len(eqn.invars))]
        return open_jaxpr(eqn.params["jaxprs"].solve)[0], operands
    hidden = getattr(eqn.params.get("_prim"), "params", {})
    if "solve_jaxpr" in hidden:  # `custom_root` from JAX 0.12 on; before, a `custom_jvp_call`
        jaxpr, _ = open_jaxpr(hidden["solve_jaxpr"])
        return jaxpr, list(range(len(jaxpr.invars)))
    return None


def split_scan_inputs(eqn: jec.JaxprEqn, ins: list[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns a `scan` equation's inputs: constants, carry, and what is scanned over."""
    if "num_consts" not in eqn.params:  # JAX 0.12 stores the operands' tree instead of their counts
        consts, carry, xs = eqn.params["ft_in"].update(ins).unpack()
        return list(consts), list(carry), list(xs)
    carry = eqn.params["num_consts"]
    xs = carry + eqn.params["num_carry"]
    return ins[:carry], ins[carry:xs], ins[xs:]


def split_while_inputs(eqn: jec.JaxprEqn, ins: list[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns a `while` equation's inputs: constants of cond, constants of body, and carry."""
    body = eqn.params["cond_nconsts"]
    carry = body + eqn.params["body_nconsts"]
    return ins[:body], ins[body:carry], ins[carry:]


# -- arrays -------------------------------------------------------------------


def is_key_dtype(dtype: DTypeLike | None) -> bool:
    """Returns whether `dtype` is a typed PRNG key dtype."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def key_impl(dtype: DTypeLike) -> str:
    """Returns the PRNG implementation of a key dtype; JAX reveals it for arrays only."""
    return str(jax.random.key_impl(jax.lax.empty((), dtype)))


def shards_of(array: jax.Array) -> Sequence[Any]:
    """Returns this process's shards of an array, or those of a copy.

    Before JAX 0.12, an interrupt while an array is taken apart for the first time leaves it with
    some of its shards for ever. A program that copies it still sees all.
    """
    shards = array.addressable_shards
    is_whole = len(shards) == len(array.sharding.addressable_devices)
    if is_whole or not array.is_fully_addressable:  # a copy would be a program of all processes
        return shards
    return jax.numpy.copy(array).addressable_shards


def is_device_mismatch(error: Exception) -> bool:
    """Returns whether JAX rejected arrays because they are on different devices."""
    return "incompatible devices" in str(error)


def is_broken_cache(error: Exception) -> bool:
    """Returns whether an interrupt has corrupted the cache of a `jax.jit`."""
    return isinstance(error, RecursionError) and "Recursively calling <weakref" in str(error)


def as_uncommitted(array: jax.Array) -> jax.Array:
    """Returns an uncommitted copy of `array`, made via the host."""
    if is_key_dtype(array.dtype):
        data = as_uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=key_impl(array.dtype))
    return jax.numpy.asarray(np.asarray(array))


# -- compiled programs --------------------------------------------------------

#: What a table of the parts of a result adds to `temporary_bytes` on a TPU: it has 512 bytes, and
#: the next value begins at a multiple of 16 KiB.
TABLE_BYTES: int = 2**14 if JAX_VERSION >= (0, 12) else 2**15 - 512


def temporary_bytes(stats: object) -> int:
    """Returns the bytes of the temporaries of a program, given its `memory_analysis()`.

    In the `temp_size_in_bytes` of libtpu, gaps between temporaries count twice. As of JAX 0.12 the
    analysis also has what is allocated in all, constants with it.
    """
    own: Any = stats
    if not (allocated := getattr(own, "total_allocation_bytes", 0)):
        return own.temp_size_in_bytes
    kept = own.argument_size_in_bytes + own.output_size_in_bytes - own.alias_size_in_bytes
    return min(own.temp_size_in_bytes, allocated - kept)


# -- settings -----------------------------------------------------------------


def trace_context() -> Hashable:
    """Returns the settings of this thread that a trace depends on, such as 64-bit mode."""
    return _config_module.trace_context()


# JAX has no public API for this; the name is the same in JAX 0.10.2 to 0.12.
_config_module: Any = sys.modules[type(jax.config).__module__]
_config: Any = jax.config  # type checkers do not know its options


def compiles() -> bool:
    """Returns whether `jax.jit` compiles, as it does unless `jax.disable_jit` is on."""
    return not _config.jax_disable_jit


# -- processes ----------------------------------------------------------------
# JAX has no public API for these. The internal modules are located through a public name of
# each; the names used are the same in JAX 0.10.2 to 0.12.

_distributed: Any = sys.modules[jax.distributed.initialize.__module__]
_backends: Any = sys.modules[jeb.register_backend_factory.__module__]
_jaxlib: Any = sys.modules[jax.Device.__module__]
_first_uses: list[str] = []
_gloo_hosts: list[str] = []


def coordination_client() -> Any:
    """Returns JAX's coordination service client, or None if there is none."""
    return _distributed.global_state.client


def preemption_sync_manager() -> Any:
    """Returns what JAX asks whether all processes stop at a step, or None if there is none."""
    return _distributed.global_state.preemption_sync_manager


@contextlib.contextmanager
def delaying_preemption_service(stand_in: object) -> Generator[None]:
    """A context in which JAX joins a job, and has `stand_in` in place of its sync manager then.

    If JAX is told to have none, it has none.
    """
    if not _config.jax_enable_preemption_service:
        yield
        return
    _config.update("jax_enable_preemption_service", False)
    try:
        yield
    finally:
        _config.update("jax_enable_preemption_service", True)
    _distributed.global_state.preemption_sync_manager = stand_in


def begin_preemption_service() -> None:
    """Makes JAX's sync manager, in place of a stand-in, and with it a handler of SIGTERM in C++."""
    _distributed.global_state.preemption_sync_manager = None
    _distributed.global_state.initialize_preemption_sync_manager()


def detect_cluster(*known_method_and_timeout: object) -> tuple[Any, Any, Any, Any]:
    """Detects (coordinator address, number of processes, process id, local devices), as JAX does.

    Args:
      known_method_and_timeout: the four values where known (else None), JAX's name of a
        detection method (None: any), and the timeout in seconds.
    """
    detect = _distributed.clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(*known_method_and_timeout)


def first_use_of_a_backend() -> str | None:
    """Returns the line that first used a backend; None: the process can still join a job."""
    if not _backends.backends_are_initialized():
        return None
    return _first_uses[-1] if _first_uses else UNKNOWN


def make_gloo_listen_at(host: str) -> None:
    """Makes CPU collectives listen at `host`; by default JAX resolves the hostname."""
    _gloo_hosts[:] = [host]
    jeb.register_backend_factory("cpu", _make_cpu_client, priority=0, fail_quietly=False)


def _make_cpu_client() -> Any:
    _first_uses.append(calling_line())
    if not _gloo_hosts or _config.jax_cpu_collectives_implementation != "gloo":
        return _backends.make_cpu_client()
    make = _jaxlib.make_gloo_tcp_collectives
    return _backends.make_cpu_client(make(coordination_client(), hostname=_gloo_hosts[0]))


if not _backends.backends_are_initialized():  # replaces JAX's factory to record the line
    jeb.register_backend_factory("cpu", _make_cpu_client, priority=0, fail_quietly=False)


def forget_refusals(jitted: Callable[..., Any]) -> None:
    """Lets JAX use its fast path for arguments that a jitted function has refused before.

    Once its body has raised for them, the fast path is off for good: 25 us become 350 (0.10, 0.12).
    """
    getattr(jitted, "_clear_cache", lambda: None)()
