"""Stacks of layers that are split over the replicas: a scan over one gathers a layer at a time.

A replica that reads a split variable gathers all of it. If it is a stack of layers of which scans
take one after the other, forward and backward, each turn can gather its own layer instead, and
reduce the gradient of that: gathered layers, and gradients, then take the memory of one. Programs
written by hand with shardings alone do so. Here such a gather is moved into the scans, and the
reduction of what a scan returns into that scan, in the code of one replica, once its maps have been
joined. A stack of which replicas hold whole layers is first exchanged for parts of every layer.
Padding, which is one call with its collective (`PartitionedLayout`), is done by layer, too.
What else takes the whole stack leaves the gather where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import jax_compat, traces
from distjax._src.collectives.mapping import Rewriter, is_replica_map, renamed, replaced
from distjax._src.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from distjax._src.typing import PyTree

#: The collectives that can be done by layer -> the parameter with the axis that they join or split.
_AXES = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}
#: What pads a stack, or leaves its padding out -> the parameters with an entry for each axis.
_PADDING = {
    "pad": ("padding_config",),
    "reshape": ("new_sizes",),
    "slice": ("start_indices", "limit_indices", "strides"),
}
#: What may hold a collective: each device of a replica does its own part; with padding.
_HOLDERS = ("shard_map", "jit")
#: The calls that XLA inlines, too.
_CALLS = frozenset(("closed_call", "eval_jaxpr", "jit"))
_CONVERT = "convert_element_type"
#: What a result passes through from one map to the next.
_VIEWS = frozenset(("broadcast_in_dim", "reshape", "squeeze"))


def by_layer(code: Jaxpr) -> Jaxpr:
    """Returns global-view code with gathers and reductions of stacks inside of scans."""
    return Rewriter(_of_map).rewrite(code)


def _of_map(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    if not is_replica_map(eqn):
        return None
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    if not any(_collective(e) for e in jax_compat.equations_of(code)):
        return [eqn]
    code = _inlined(code)
    eqns: list[JaxprEqn] = code.eqns
    for collective in code.eqns:
        eqns = _moved(eqns, code.outvars, collective)
    if eqns is code.eqns:
        return [eqn]
    return [eqn.replace(params={**eqn.params, "jaxpr": code.replace(eqns=eqns)})]


def _inlined(code: Jaxpr) -> Jaxpr:
    """Returns code with that of the functions that it calls, as far as there are scans in it."""
    eqns, names = list[JaxprEqn](), dict[Any, Any]()
    known = lambda atoms: [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]
    for eqn in code.eqns:
        eqn = eqn.replace(invars=known(eqn.invars))
        inner, consts = code, []
        if eqn.primitive.name in _CALLS:
            inner, consts = jax_compat.called_jaxpr(eqn)
        if inner is code or consts or not _has_scans(inner):
            eqns.append(eqn)
            continue
        inner = _inlined(inner)
        own = dict(zip(inner.invars, eqn.invars, strict=True))
        for e in inner.eqns:
            new = renamed(e, own, eqn, 0)
            place = e.source_info.replace(name_stack=new.source_info.name_stack)  # its own line
            eqns.append(new.replace(source_info=place))
        names.update(zip(eqn.outvars, replaced(inner.outvars, own), strict=True))
    return code.replace(eqns=eqns, outvars=known(code.outvars))


def _has_scans(code: Jaxpr) -> bool:
    return any(e.primitive.name == "scan" for e in jax_compat.equations_of(code))


def _has(atoms: Iterable[Any], v: PyTree) -> bool:
    return any(atom is v for atom in atoms)


def _ends(eqn: JaxprEqn) -> tuple[Any, Any]:
    """Returns what a collective takes, and what it makes."""
    return eqn.invars[0], eqn.outvars[0]


def _with_code(eqn: JaxprEqn, code: Jaxpr, **params: PyTree) -> JaxprEqn:
    """Returns an equation with other code."""
    jaxpr, consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    held = code if eqn.params["jaxpr"] is jaxpr else ClosedJaxpr(code, consts)
    return eqn.replace(params={**eqn.params, **params, "jaxpr": held})


# -- collectives of stacks --------------------------------------------------------


def _collective(eqn: JaxprEqn) -> JaxprEqn | None:
    """Returns the gather or reduction over the replicas that an equation is, or holds; or None."""
    if eqn.primitive.name in _HOLDERS:
        code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
        has_all = all(not spec or spec[0] is None for spec in eqn.params.get("in_specs", ()))
        return _collective_in(code) if len(eqn.invars) == 1 and has_all else None
    is_one = eqn.primitive.name in _AXES and eqn.params["tiled"] and len(eqn.invars) == 1
    return eqn if is_one and not eqn.params.get("axis_index_groups") else None


def _collective_in(code: Jaxpr) -> JaxprEqn | None:
    """Returns the only collective of code that does nothing else but pad, layer by layer."""
    made, found = code.invars[0], list[JaxprEqn]()
    for eqn in code.eqns:
        takes_more = not all(isinstance(v, Literal) for v in eqn.invars[1:])
        if not eqn.invars or eqn.invars[0] is not made or takes_more or len(eqn.outvars) != 1:
            return None
        collective = _collective(eqn)
        if collective is not None:
            found.append(collective)
        elif eqn.primitive.name not in _PADDING or not _has_layers_of(eqn):
            return None
        made = eqn.outvars[0]
    is_all = len(found) == 1 and len(code.outvars) == 1 and code.outvars[0] is made
    return found[0] if is_all else None


def _has_layers_of(eqn: JaxprEqn) -> bool:
    """Whether what an equation makes has the layers of what it takes."""
    taken, made = _ends(eqn)
    is_shifted = any(eqn.params["padding_config"][0]) if eqn.primitive.name == "pad" else False
    return taken.aval.shape[:1] == made.aval.shape[:1] and not is_shifted


def _of_layer(eqn: JaxprEqn, taken: PyTree, made: PyTree) -> JaxprEqn:
    """Returns the collective of a stack as that of one layer."""
    return _retyped(eqn, taken, made, _sliced, _params_of_layer)


def _params_of_layer(eqn: JaxprEqn) -> dict[str, Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _AXES:
        params[_AXES[name]] -= 1
    elif name == "shard_map":
        for key in ("in_specs", "out_specs"):
            params[key] = tuple(PartitionSpec(*spec[1:]) for spec in params[key])
    for key in _PADDING.get(name, ()):
        params[key] = params[key] and params[key][1:]
    return params


def _retyped(
    eqn: JaxprEqn,
    taken: PyTree,
    made: PyTree,
    become: Callable[[Any], Var],
    params_of: Callable[[JaxprEqn], dict[str, Any]],
) -> JaxprEqn:
    """Returns a collective for values of another type, `become(v)` instead of a variable."""
    new = eqn.replace(invars=[taken, *eqn.invars[1:]], outvars=[made], params=params_of(eqn))
    if eqn.primitive.name not in _HOLDERS:
        return new
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    own, eqns = [become(code.invars[0])], list[JaxprEqn]()
    for e in code.eqns:
        own.append(become(e.outvars[0]))
        eqns.append(_retyped(e, own[-2], own[-1], become, params_of))
    return _with_code(new, code.replace(invars=own[:1], outvars=own[-1:], eqns=eqns))


def _sliced(stack: PyTree) -> Var:
    """Returns a variable for a layer of a stack."""
    aval = stack.aval
    spec = PartitionSpec(*aval.sharding.spec[1:])
    sharding = NamedSharding(aval.sharding.mesh, spec)
    return Var(aval.update(shape=aval.shape[1:], sharding=sharding))


def _moved(eqns: list[JaxprEqn], results: Sequence[Any], eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations with a collective of a stack in the scans; the same if it cannot be."""
    collective = _collective(eqn)
    if collective is None:
        return eqns
    is_gather = collective.primitive.name == "all_gather"
    move = _gather_inside if is_gather else _reduce_inside
    key, (taken, made) = _AXES[collective.primitive.name], _ends(eqn)
    if collective.params[key] > 0:
        return move(eqns, results, eqn)
    if not _is_alone(eqn):
        return eqns
    # Each replica holds whole layers: exchange them for a part of every layer.
    aval, count = (made if is_gather else taken).aval, collective.params["axis_size"]
    spec = eqn.params["in_specs"][0] if eqn is not collective else ()
    sizes = enumerate(aval.shape)
    is_free = lambda i: i >= len(spec) or spec[i] is None
    axis = next((i for i, n in sizes if i and n % count == 0 and is_free(i)), None)
    if axis is None:
        return eqns

    def part_of(whole: Var) -> Var:
        aval: PyTree = whole.aval
        shape = (*aval.shape[:axis], aval.shape[axis] // count, *aval.shape[axis + 1 :])
        return Var(aval.update(shape=shape))

    def along(e: JaxprEqn, taken: PyTree, made: PyTree) -> list[JaxprEqn]:
        return [e.replace(invars=[taken], outvars=[made], params={**e.params, key: axis})]

    def exchange(e: JaxprEqn, taken: PyTree, made: PyTree) -> list[JaxprEqn]:
        return _exchange(taken, made, (axis, 0) if is_gather else (0, axis), e)

    part = part_of(made if is_gather else taken)
    if is_gather:
        instead = [
            *_remade(eqn, taken, part, part_of, exchange),
            *_remade(eqn, part, made, part_of, along),
        ]
        by_part = instead[-1]
    else:
        instead = [
            *_remade(eqn, taken, part, part_of, along),
            *_remade(eqn, part, made, part_of, exchange),
        ]
        by_part = instead[0]
    trial = [e for old in eqns for e in (instead if old is eqn else [old])]
    moved = move(trial, results, by_part)
    return eqns if moved is trial else moved


def _is_alone(eqn: JaxprEqn) -> bool:
    """Whether nothing is padded beside a collective."""
    if eqn.primitive.name != "shard_map":
        return eqn.primitive.name in _AXES
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    return len(code.eqns) == 1 and code.eqns[0].primitive.name in _AXES


def _remade(
    eqn: JaxprEqn,
    taken: PyTree,
    made: PyTree,
    part_of: Callable[[Var], Var],
    make: Callable[[JaxprEqn, PyTree, PyTree], list[JaxprEqn]],
) -> list[JaxprEqn]:
    """Returns other equations in place of a collective, in the map of it if there is one.

    Args:
      eqn: the collective, or its map.
      taken: what the equations take.
      made: what they make; one of the two is a part of the stack.
      part_of: returns a variable for a part of a stack.
      make: returns the equations.
    """
    if eqn.primitive.name != "shard_map":
        return make(eqn, taken, made)
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    inside: list[Any] = [*code.invars, *code.outvars]
    ends = zip(_ends(eqn), (taken, made), inside, strict=True)
    whole = max(inside, key=lambda v: v.aval.size)
    own = [Var(v.aval) if old is new else part_of(whole) for old, new, v in ends]
    inner = code.replace(invars=own[:1], outvars=own[1:], eqns=make(code.eqns[0], *own))
    return [_with_code(eqn.replace(invars=[taken], outvars=[made]), inner)]


def _exchange(
    taken: PyTree, made: PyTree, axes: tuple[int, int], place: JaxprEqn
) -> list[JaxprEqn]:
    """Returns the equations of an all-to-all that splits one axis, and joins another one."""
    name, count = place.params["axis_name"], place.params["axis_size"]
    (bound,) = name if isinstance(name, tuple) else (name,)
    exchange = lambda x: [lax.all_to_all(x, bound, *axes, tiled=True)]
    code, _ = traces.trace_jaxpr(exchange, [taken.aval], [(bound, count)])
    names: dict[Any, Any] = {code.invars[0]: taken}
    eqns = [renamed(e, names, place, 0).replace(ctx=place.ctx) for e in code.eqns]
    return [*eqns[:-1], eqns[-1].replace(outvars=[made])]


# -- into scans -------------------------------------------------------------------


def _gather_inside(
    eqns: list[JaxprEqn], results: Sequence[Any], gather: JaxprEqn
) -> list[JaxprEqn]:
    """Returns the equations with a gather inside of the scans, if they alone take its result."""
    shard, whole = _ends(gather)
    users = [e for e in eqns if _has(e.invars, whole)]
    if _has(results, whole):
        return eqns
    if len(users) == 1 and users[0].primitive.name == _CONVERT:
        # Each replica converts its own part before it is gathered.
        (convert,) = users
        convert_type = lambda v: Var(v.aval.update(dtype=convert.params["new_dtype"]))
        narrow = convert_type(shard)
        narrows = convert.replace(invars=[shard], outvars=[narrow])
        gathers = _retyped(gather, narrow, convert.outvars[0], convert_type, lambda eqn: eqn.params)
        trial = [gathers if e is convert else narrows if e is gather else e for e in eqns]
        moved = _gather_inside(trial, results, gathers)
        return eqns if moved is trial else moved
    instead = {id(e): _gathering(e, gather) for e in users}
    if not instead or None in instead.values():
        return eqns
    return [instead.get(id(e)) or e for e in eqns if e is not gather]


def _gathering(user: JaxprEqn, gather: JaxprEqn) -> JaxprEqn | None:
    """Returns what takes the shards in place of the stack, and gathers layers; None: it cannot."""
    shard, whole = _ends(gather)
    consts: Sequence[Any] = user.invars if user.primitive.name == "remat2" else []
    if user.primitive.name == "scan":
        consts, carry, _ = jax_compat.split_scan_inputs(user, user.invars)
        if _has(carry, whole):
            return None
    elif not consts:
        return None
    code, _ = jax_compat.open_jaxpr(user.params["jaxpr"])
    invars, eqns = list(code.invars), list(code.eqns)
    for i, v in enumerate(user.invars):
        if v is not whole:
            continue
        inner = code.invars[i]
        if i >= len(consts):
            invars[i] = _sliced(shard)
            eqns = [_of_layer(gather, invars[i], inner), *eqns]
            continue
        invars[i] = Var(shard.aval)
        outside = gather.replace(invars=[invars[i]], outvars=[inner])
        trial = [outside, *eqns]
        eqns = _gather_inside(trial, code.outvars, outside)
        if eqns is trial:
            return None
    given = [shard if v is whole else v for v in user.invars]
    return _with_code(user.replace(invars=given), code.replace(invars=invars, eqns=eqns))


def _reduce_inside(
    eqns: list[JaxprEqn], results: Sequence[Any], reduction: JaxprEqn
) -> list[JaxprEqn]:
    """Returns the equations with a reduction inside of the scan whose result it alone takes."""
    (stack, total), maker = _ends(reduction), reduction
    dropped, shape = list[JaxprEqn](), stack.aval.shape
    converts: JaxprEqn | None = None
    while maker is reduction or maker.primitive.name in _VIEWS or maker.primitive.name == _CONVERT:
        if maker.primitive.name == _CONVERT:
            if converts is not None:
                return eqns
            converts = maker
        dropped.append(maker)
        stack, _ = _ends(maker)
        takers = sum(_has(e.invars, stack) for e in eqns) + _has(results, stack)
        maker = next((e for e in eqns if _has(e.outvars, stack)), None)
        if maker is None or takers > 1:
            return eqns
    if stack.aval.shape != shape:
        return eqns
    at = next(i for i, v in enumerate(maker.outvars) if v is stack)
    code = _reducing(maker, at, reduction, converts)
    if code is None:
        return eqns
    made = [total if v is stack else v for v in maker.outvars]
    new = _with_code(maker.replace(outvars=made), code)
    return [new if e is maker else e for e in eqns if not any(e is d for d in dropped)]


def _reducing(
    maker: JaxprEqn, at: int, reduction: JaxprEqn, converts: JaxprEqn | None
) -> Jaxpr | None:
    """Returns the code of a scan whose result `at` is converted and reduced in it; None: not so."""
    if maker.primitive.name not in ("scan", "remat2"):
        return None
    code, _ = jax_compat.open_jaxpr(maker.params["jaxpr"])
    made, (_, total) = code.outvars[at], _ends(reduction)
    if isinstance(made, Literal):
        return None
    outvars: list[Any] = list(code.outvars)
    eqns, is_remat = list(code.eqns), maker.primitive.name == "remat2"
    if not is_remat and at < len(jax_compat.split_scan_inputs(maker, maker.invars)[1]):
        return None  # a carry
    if converts is not None:
        taken, wide = made, Var(made.aval.update(dtype=converts.params["new_dtype"]))
        eqns.append(converts.replace(invars=[taken], outvars=[wide]))
        made = wide
    if is_remat:
        outvars[at] = Var(total.aval)
        outside = reduction.replace(invars=[made], outvars=[outvars[at]])
        trial = [*eqns, outside]
        eqns = _reduce_inside(trial, outvars, outside)
        return None if eqns is trial else code.replace(outvars=outvars, eqns=eqns)
    outvars[at] = _sliced(total)
    eqns.append(_of_layer(reduction, made, outvars[at]))
    return code.replace(outvars=outvars, eqns=eqns)
