"""Mapping a function over the replicas of a topology.

`map_replicas` is the only place where a replica-view function becomes global-view code: under
`shard_map` if the replicas have devices of their own, under `vmap` if they share one, or if one has
them all (`Topology.maps_devices`).

Joining fuses consecutive maps into one. In a trace, what the replicas compute is one `shard_map`,
and its reduction is another. Between the two, XLA puts each array together and takes it apart
again. The compiled program does neither, but to find that out takes XLA a time that grows with the
square of the number of arrays.

Reductions of bfloat16 over model axes on CPU are float32 before XLA sees them. XLA on CPU reduces
bfloat16 in float32; where some axes of the mesh are automatic, as model axes are, its pass that
changes the type (`AllReducePromotion`, in JAX 0.10.2 to 0.12) does not know the copy in the code of
such a reduction, and aborts the process. The results are those that XLA would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from distjax._src import jax_compat, traces
from distjax._src.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from distjax._src.placement import Topology
from distjax._src.traces import run_compiled, struct
from distjax._src.typing import DTypeLike

#: The name that the function of each map has in traces.
_NAME = "distjax_replicas"


def map_replicas(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_varying: Sequence[bool],
    outs_varying: Sequence[bool] | bool,
) -> list[Any]:
    """Runs ``fn`` once per replica on global arrays, and returns such: [R, ...] where they vary.

    Outputs declared equal are taken from replica 0 unchecked.
    """
    if not topology.maps_devices:
        return _map_on_one_device(topology, fn, args, args_varying, outs_varying)

    if needs_wide_reductions(topology):
        fn, args = widen_reductions(fn, args, args_varying)

    def on_blocks(*blocks: jax.Array) -> list[Any]:
        local = [
            lax.squeeze(block, (0,)) if varies else block
            for block, varies in zip(blocks, args_varying, strict=True)
        ]
        outs = list(fn(*local))
        flags = _per_output(outs_varying, len(outs))
        return [
            lax.expand_dims(out, (0,)) if varies else out
            for out, varies in zip(outs, flags, strict=True)
        ]

    on_blocks.__name__ = on_blocks.__qualname__ = _NAME

    def spec(varying: bool) -> PartitionSpec:
        return PartitionSpec(topology.axis_name) if varying else PartitionSpec()

    mapped = jax.shard_map(
        on_blocks,
        mesh=topology.mesh,
        in_specs=tuple(map(spec, args_varying)),
        out_specs=spec(outs_varying)
        if isinstance(outs_varying, bool)
        else list(map(spec, outs_varying)),
        axis_names={topology.axis_name},
        check_vma=False,
    )
    if topology.model_axes and not jax_compat.staging():
        return run_compiled(mapped, args)
    return mapped(*args)


def is_replica_map(eqn: jax_compat.JaxprEqn) -> bool:
    """Returns whether an equation is a `shard_map` of `map_replicas`, not one of the user."""
    if eqn.primitive.name != "shard_map":
        return False
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    return code.debug_info.func_name == _NAME


def _per_output(outs_varying: Sequence[bool] | bool, count: int) -> Sequence[bool]:
    return [outs_varying] * count if isinstance(outs_varying, bool) else outs_varying


def _map_on_one_device(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_varying: Sequence[bool],
    outs_varying: Sequence[bool] | bool,
) -> list[Any]:
    mapped = jax.vmap(
        lambda *local: list(fn(*local)),
        in_axes=tuple(0 if varies else None for varies in args_varying),
        out_axes=0,
        axis_name=topology.axis_name,
        axis_size=topology.num_replicas,
    )
    outs = mapped(*args)
    flags = _per_output(outs_varying, len(outs))
    return [out if varies else out[0] for out, varies in zip(outs, flags, strict=True)]


def constrain_to_replicas(value: jax.Array, topology: Topology, *, varying: bool) -> jax.Array:
    """Returns a global value, [R, ...] if `varying`, constrained to live on the replicas."""
    value = jnp.asarray(value)
    if topology.mesh is None:
        return value
    if not topology.maps_devices:  # a single replica: on its devices, in whatever parts
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim)
        return lax.with_sharding_constraint(value, NamedSharding(topology.mesh, spec))
    if topology.model_axes:
        # A sharding constraint would also pin the model axes, which stay automatic.
        return map_replicas(topology, lambda x: [x], [value], [varying], [varying])[0]
    sharding = topology.per_replica if varying else topology.mirrored
    return lax.with_sharding_constraint(value, sharding)


# -- joining --------------------------------------------------------------------


#: Primitives whose code is in the global view where they are, and the parameters that hold it.
_HOLDERS = frozenset(("cond", "jit", "scan", "while"))
_CODE = frozenset(("jaxpr", "cond_jaxpr", "body_jaxpr", "branches"))
#: The parameters of a map that tell of its operands, its results and its code.
_OWN_PARAMS = frozenset(("jaxpr", "in_specs", "out_specs"))


def join_maps(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a global-view jaxpr in which a map that continues another one is part of it.

    A map continues another one if it takes results of it unchanged, a row for each replica, and
    if everything else that it takes is available there. (Results that are equal on all replicas
    keep maps apart: their derivative is the mean of the replicas' own.)
    """
    return _Joiner().join(jaxpr)


class _Joiner:
    """Joins the maps of code and of what it calls."""

    def __init__(self):
        #: By id: code and its joined form, held so that ids stay theirs.
        self._joined: dict[int, tuple[Any, Any]] = {}

    def join(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the code with its maps joined: itself if there are none to join."""
        eqns = self._join_equations(jaxpr)
        return jaxpr if eqns == jaxpr.eqns else jaxpr.replace(eqns=eqns)

    def _join_equations(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        joined: list[JaxprEqn | _Maps] = []
        made_at: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            index = max((made_at.get(v, -1) for v in _variables(eqn.invars)), default=-1)
            last = joined[index] if index >= 0 else None
            if isinstance(last, _Maps) and last.is_continued_by(eqn):
                last.add(eqn)
            else:
                index = len(joined)
                joined.append(_Maps(eqn) if is_replica_map(eqn) else self._join_inside(eqn))
            made_at.update((v, index) for v in eqn.outvars)
        used = _variables([v for e in joined for v in e.invars] + list(jaxpr.outvars))
        return [e.as_one(used) if isinstance(e, _Maps) else e for e in joined]

    def _join_inside(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name not in _HOLDERS:
            return eqn
        code = {key: eqn.params[key] for key in _CODE.intersection(eqn.params)}
        joined = {key: self._join_code(held) for key, held in code.items()}
        return eqn if joined == code else eqn.replace(params={**eqn.params, **joined})

    def _join_code(self, code: Jaxpr | ClosedJaxpr | tuple[ClosedJaxpr, ...]) -> Any:
        if isinstance(code, tuple):  # branches
            return tuple(map(self._join_code, code))
        if id(code) not in self._joined:  # JAX lowers code once, however often it is called
            jaxpr, consts = jax_compat.open_jaxpr(code)
            joined = self.join(jaxpr)
            self._joined[id(code)] = code, code if joined is jaxpr else ClosedJaxpr(joined, consts)
        return self._joined[id(code)][1]


class _Maps:
    """A map over the replicas, and those that continue it; none of them makes the `invars`."""

    def __init__(self, first: JaxprEqn):
        self._maps: list[JaxprEqn] = []
        self._out_specs: dict[Any, Any] = {}
        self.invars: list[Any] = []
        self.add(first)

    def is_continued_by(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation is a map that can be part of this one."""
        first = self._maps[0]
        # One that has effects stays behind those of the equations before it.
        if not is_replica_map(eqn) or eqn.effects or eqn.ctx is not first.ctx:
            return False
        pairs = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        taken = [(self._out_specs[v], spec) for v, spec in pairs if not self._is_given(v)]
        return _shared_params(eqn) == _shared_params(first) and all(
            made == spec != PartitionSpec() for made, spec in taken
        )

    def add(self, eqn: JaxprEqn) -> None:
        """Makes a map that continues this one part of it."""
        self._maps.append(eqn)
        self.invars += (v for v in eqn.invars if self._is_given(v))
        self._out_specs.update(zip(eqn.outvars, eqn.params["out_specs"], strict=True))

    def as_one(self, used: set[Any]) -> JaxprEqn:
        """Returns one map, with those results that are in `used`."""
        first = self._maps[0]
        if len(self._maps) == 1:
            return first
        # A scope around all of them stays around the map; else each equation has its own.
        scopes = [eqn.source_info.name_stack for eqn in self._maps]
        scope = scopes[0] if scopes.count(scopes[0]) == len(scopes) else scopes[0][:0]
        made: dict[Any, Any] = {}  # the maps' results -> what they are inside of the map
        operands, in_specs, eqns = list[Var](), list[Any](), list[JaxprEqn]()
        for eqn in self._maps:
            code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
            names: dict[Any, Any] = {}  # variables of the code -> those of the joined code
            for v, spec, inner in zip(eqn.invars, eqn.params["in_specs"], code.invars, strict=True):
                if self._is_given(v):
                    operands.append(Var(inner.aval))
                    in_specs.append(spec)
                names[inner] = operands[-1] if self._is_given(v) else made[v]
            eqns += (renamed(e, names, eqn, len(scope)) for e in code.eqns)
            made.update(zip(eqn.outvars, replaced(code.outvars, names), strict=True))
        outvars = [v for v in made if v in used]
        results = [made[v] for v in outvars]
        code, _ = jax_compat.open_jaxpr(first.params["jaxpr"])
        eqns = jax_compat.live_equations(eqns, results)
        params = {
            **first.params,
            "jaxpr": jax_compat.new_jaxpr(code, (), operands, results, eqns),
            "in_specs": tuple(in_specs),
            "out_specs": tuple(self._out_specs[v] for v in outvars),
        }
        place = first.source_info.replace(name_stack=scope)
        return first.replace(invars=self.invars, outvars=outvars, params=params, source_info=place)

    def _is_given(self, v: Var | Literal) -> bool:
        return isinstance(v, Literal) or v not in self._out_specs


def _shared_params(eqn: JaxprEqn) -> dict[str, Any]:
    return {key: value for key, value in eqn.params.items() if key not in _OWN_PARAMS}


def renamed(eqn: JaxprEqn, names: dict[Any, Any], holder: JaxprEqn, depth: int) -> JaxprEqn:
    """Returns an equation of the code of a map, as if it stood where the map does.

    `names` leads from variables of the code to those of the joined code, and those of the equation
    are added. The joined map has `depth` of the names of the map's scope.
    """
    invars, outvars = replaced(eqn.invars, names), [Var(v.aval) for v in eqn.outvars]
    names.update(zip(eqn.outvars, outvars, strict=True))
    place = holder.source_info
    place = place.replace(name_stack=place.name_stack[depth:] + eqn.source_info.name_stack)
    return eqn.replace(invars=invars, outvars=outvars, source_info=place)


def replaced(atoms: Sequence[Any], names: dict[Any, Any]) -> list[Any]:
    return [v if isinstance(v, Literal) else names[v] for v in atoms]


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {v for v in atoms if not isinstance(v, Literal)}


# -- reductions of bfloat16 -----------------------------------------------------


#: Primitives that reduce, and one whose derivative does.
_REDUCTIONS = frozenset("psum psum_invariant pmax pmin reduce_scatter all_gather".split())


def needs_wide_reductions(topology: Topology) -> bool:
    """Returns whether XLA cannot reduce bfloat16 over these replicas."""
    return bool(topology.model_axes) and topology.devices[0].platform == "cpu"


def widen_reductions(
    fn: Callable[..., Sequence[Any]], args: Sequence[Any], args_varying: Sequence[bool]
) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """Returns what to map over the replicas, and its arguments, with float32 for bfloat16."""
    # The derivative of an argument that is equal on all replicas is summed over them.
    is_summed = [
        not varying and _is_narrow(jax.typeof(x))
        for x, varying in zip(args, args_varying, strict=True)
    ]

    def cast(values: Sequence[Any], dtype: DTypeLike) -> list[Any]:
        return [
            lax.convert_element_type(x, dtype) if summed else x
            for x, summed in zip(values, is_summed, strict=True)
        ]

    def widened(*local: jax.Array) -> Sequence[Any]:
        own = cast(local, jnp.bfloat16)
        jaxpr, consts = traces.trace_jaxpr(lambda *own: fn(*own), own)
        return jax_compat.eval_jaxpr(Rewriter(_in_float32).rewrite(jaxpr), consts, own)

    return widened, cast(args, jnp.float32)


class Rewriter:
    """Rewrites equations in code and in what it calls; one stays if ``rewrite(eqn)`` is None."""

    def __init__(self, rewrite: Callable[[JaxprEqn], list[JaxprEqn] | None]):
        self._rewrite_equation = rewrite
        #: By id: code and its other form, held so that ids stay theirs.
        self._rewritten: dict[int, tuple[Any, Any]] = {}

    def rewrite(self, code: Jaxpr | ClosedJaxpr) -> Any:
        """Returns the code with these equations rewritten: itself if there are none."""
        if id(code) not in self._rewritten:  # JAX lowers code once, however often it is called
            self._rewritten[id(code)] = code, self._rewrite(code)
        return self._rewritten[id(code)][1]

    def _rewrite(self, code: Jaxpr | ClosedJaxpr) -> Any:
        jaxpr, consts = jax_compat.open_jaxpr(code)
        eqns = [e for eqn in jaxpr.eqns for e in self._equations(eqn)]
        if eqns == jaxpr.eqns:
            return code
        changed = jaxpr.replace(eqns=eqns)
        return changed if code is jaxpr else ClosedJaxpr(changed, consts)

    def _equations(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        instead = self._rewrite_equation(eqn)
        if instead is not None:
            return instead
        params = {key: self._param(value) for key, value in eqn.params.items()}
        is_same = all(params[key] is value for key, value in eqn.params.items())
        return [eqn if is_same else eqn.replace(params=params)]

    def _param(self, value: object) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.rewrite(value)
        if not isinstance(value, tuple):
            return value
        parts = [self._param(part) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        return getattr(type(value), "_make", tuple)(parts)  # those of a solver have names


def on_device(code: Jaxpr, sharding: Sharding) -> Jaxpr:
    """Returns code for one device: what it constrains to others, or moves there, stays on it."""

    def moved(place: object) -> Any:
        if not isinstance(place, Sharding) or _is_on(place, sharding):
            return place
        kind = place.memory_kind
        return sharding if kind is None else sharding.with_memory_kind(kind)

    def rewrite(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if eqn.primitive.name == "sharding_constraint":
            new = {"sharding": moved(eqn.params["sharding"])}
        elif eqn.primitive.name == "device_put":
            new = {"devices": tuple(map(moved, eqn.params["devices"]))}
        else:
            return None
        return [eqn.replace(params={**eqn.params, **new})]

    return Rewriter(rewrite).rewrite(code)


def _is_on(place: Sharding, sharding: Sharding) -> bool:
    is_abstract = isinstance(getattr(place, "mesh", None), AbstractMesh)  # which has no devices
    return not is_abstract and place.device_set == sharding.device_set


def _in_float32(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """Returns the equations that do what a reduction of bfloat16 does, in float32."""
    if eqn.primitive.name not in _REDUCTIONS or not any(_is_narrow(v.aval) for v in eqn.invars):
        return None
    ins, outs = list(map(_as_wide, eqn.invars)), list(map(_as_wide, eqn.outvars))
    changes = [(v, wide, eqn) for v, wide in zip(eqn.invars, ins, strict=True) if v is not wide]
    returns = [(wide, v, eqn) for v, wide in zip(eqn.outvars, outs, strict=True) if v is not wide]
    reduction = eqn.replace(invars=ins, outvars=outs)
    return [*starmap(_conversion, changes), reduction, *starmap(_conversion, returns)]


def _as_wide(atom: Var | Literal) -> Any:
    if not _is_narrow(atom.aval):
        return atom
    return Var(atom.aval.update(dtype=jnp.dtype(jnp.float32), weak_type=False))


def _conversion(source: Var | Literal, target: Var, place: JaxprEqn) -> JaxprEqn:
    """Returns the equation that converts one variable to the type of another, at a place."""
    dtypes = jnp.bfloat16, jnp.float32
    given, made = reversed(dtypes) if _is_narrow(target.aval) else dtypes
    convert = lambda x: lax.convert_element_type(x, made)
    (eqn,) = jax.make_jaxpr(convert)(struct((), given)).eqns
    return eqn.replace(
        invars=[source], outvars=[target], source_info=place.source_info, ctx=place.ctx
    )


def _is_narrow(aval: AbstractValue) -> bool:
    return isinstance(aval, ShapedArray) and aval.dtype == jnp.bfloat16
