"""What a trace for `dj.check` records, and how random numbers are made the same for any R.

A step is traced for one replica, then for R. Draws are numbered by line, so that each draw of
the R replicas knows the shape of the same draw of the one: if that is R times as large, each
replica takes its part of the large draw, from replica 0's key, which is that of the one replica.
So both use the same numbers, in loops and branches, too. Where the key is equal on all replicas
the draw stays as it is: every replica draws the same, and the difference is found like any other.

To find a line, all values are kept, each with the values that it is computed from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax._src import jax_compat, user_lines
from distjax._src.collectives.mapping import map_replicas
from distjax._src.collectives.ops import OWN_INDEX
from distjax._src.context import current_reason, reason_in
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal
from distjax._src.jaxprs import CALLS, Flow
from distjax._src.placement import Topology
from distjax._src.replica.analysis import MERGE_NAME
from distjax._src.replica.emit import JaxprEmitter, OneDevice
from distjax._src.replica.global_value import GlobalValue
from distjax._src.typing import PyTree
from distjax._src.user_lines import INSTALLED
from distjax._src.variables.state import variable_p
from distjax.errors import UnsupportedError, message

#: Primitives that draw as many numbers, or keys, as their parameter `shape` says.
DRAWS = frozenset(("random_bits", "random_split"))
#: Primitives that call the host.
CALLBACKS = frozenset("debug_callback debug_print io_callback pure_callback".split())
#: What runs code some number of times.
_LOOPS = frozenset(("scan", "while", "cond"))
#: Primitives whose result is their operand, elsewhere or in another form.
_UNCHANGED = frozenset(
    "sharding_constraint convert_element_type squeeze copy broadcast_in_dim reshape".split()
)
#: The user's line, the primitive, and which one of these it is.
Place = tuple[str, str, int]
#: Why a value may differ between R replicas and one: the user's words for it.
Tags = frozenset[str]
NO_TAGS: Tags = frozenset()
OWN_NUMBER = "the replica's own number"
OWN_DRAWS = "random numbers of each replica's own"


@dataclasses.dataclass(eq=False)
class Node:
    """A value of a step that was kept.

    Attributes:
      place: what computes it, and which of its results it is.
      inputs: what it is computed from.
      is_reduction: whether it is a collective over the replicas, or a merge.
      literals: the numbers of the code among its operands.
      varying: whether `value` is [R, ...].
      eqns: the equation that computes it, then those that call the functions around it.
      index: of a branch, the number of the one that is taken, of which each computes an input.
      variable: the one that was read, if it is what a variable holds at the start.
      is_cross: whether cross-replica code computes it, where nothing can be edited.
      asked_at: of a merge, the line that made the object whose argument says how it reduces.
      value: the value, once the step has run; None for a PRNG key.
    """

    place: tuple[Place, int]
    inputs: tuple[Node, ...]
    is_reduction: bool = False
    varying: bool = True
    literals: tuple[Any, ...] = ()
    eqns: tuple[JaxprEqn, ...] = ()
    index: Node | None = None
    variable: Any = None
    is_cross: bool = False
    asked_at: str | None = None
    value: Any = None

    @property
    def is_merge(self) -> bool:
        """Whether it is what a merge returned."""
        return self.is_reduction and self.name == MERGE_NAME

    @property
    def is_part(self) -> bool:
        """Whether each replica has a number of its own, as of a gradient."""
        dtype = getattr(self.value, "dtype", None)
        return self.varying and dtype is not None and jnp.issubdtype(dtype, jnp.inexact)

    @property
    def line(self) -> str:
        """The user's line."""
        return self.place[0][0]

    @functools.cached_property
    def gradient_line(self) -> str | None:
        """The user's line that asked for the gradient of which it is a part; None: of none."""
        return user_lines.gradient_line(*self.eqns)

    @functools.cached_property
    def is_backward(self) -> bool:
        """Whether it is computed in the backward pass of a gradient."""
        return any("transpose(" in str(eqn.source_info.name_stack) for eqn in self.eqns)

    @functools.cached_property
    def frames(self) -> list[user_lines.SourceFrame]:
        """The user's frames, outermost first; of a gradient those that ask for it."""
        return user_lines.user_frames(self.eqns, self.is_backward)

    @property
    def told(self) -> str:
        """The line to tell of as its maker: of a gradient, where that was asked for."""
        return (self.gradient_line if self.is_backward else None) or self.line

    @property
    def name(self) -> str:
        """The primitive."""
        return self.place[0][1]


#: A value of the trace, and its node.
Known = tuple[Any, Node]
#: Values that can be changed, to see whether a difference vanishes, and where in a list of numbers
#: it says how: the number of one of `EDITS`.
Edits = Mapping[tuple[Place, int], int]
EDITS = (
    *("as it is", "divided", "multiplied", "averaged", "summed", "the largest", "the smallest"),
    *("not summed", "not averaged"),
)
#: Primitives that add.
ADDS = frozenset(("add", "sub", "add_any"))


@dataclasses.dataclass(frozen=True)
class Options:
    """How a step is traced.

    Attributes:
      count: for how many replicas.
      mates: the draws of the one replica, see `Recording`; None: this is its trace.
      axes: of the draws, along which axis there is a number for each row.
      order: in which order the rows are, of which each draws its own; (): as they were given.
      keeps: whether all values are kept.
      constants: numbers in the code -> what stands for them, in these lines.
      edits: values that can be changed, and where in `modes` it says how.
      modes: a number for each edit, which `TracedStep.run` takes others for; see `replay.EDITS`.
      answers: what callbacks returned in the first run; None: this is it.
    """

    count: int = 1
    mates: Mapping[Place, tuple[int, ...]] | None = None
    axes: Mapping[Place, int] = dataclasses.field(default_factory=dict)
    order: Sequence[int] = ()
    keeps: bool = False
    constants: Mapping[float, float] = dataclasses.field(default_factory=dict)
    constant_lines: Collection[str] = ()
    edits: Edits = dataclasses.field(default_factory=dict)
    modes: jax.Array | None = None
    answers: Mapping[Place, Any] | None = dataclasses.field(default_factory=dict)


class Recording:
    """What one trace records.

    Args:
      options: how the step is traced.
    """

    def __init__(self, options: Options):
        self.options, self.keeps = options, options.keeps or bool(options.edits)
        self.answers: dict[Place, Any] = {}  # of callbacks, in the trace
        self.axes: dict[Place, int] = {}  # of draws, along which each replica takes its part
        self.draws: dict[Place, tuple[int, ...]] = {}
        self.nodes: list[Node] = []
        self.values: list[Any] = []  # of `nodes`, in the trace
        self.used_constants: dict[str, float] = {}
        self.trace = jax_compat.current_trace()
        self.num_reduced = 0  # by the user's cross-replica code
        self._counts: Counter[tuple[str, str]] = Counter()
        self._draw_places: dict[int, tuple[JaxprEqn, Place]] = {}
        self._node_of: dict[int, tuple[Any, Node]] = {}
        self._tags_of: dict[int, tuple[Any, Tags]] = {}

    def make_emitter(self, topology: Topology) -> JaxprEmitter:
        """Returns what emits a replica function in this trace."""
        return _RecordingEmitter(topology, self)

    # -- places -----------------------------------------------------------------

    def place(self, eqn: JaxprEqn, outer: Sequence[JaxprEqn] = ()) -> Place:
        """Returns the place of one evaluation of an equation, inside of those that call it."""
        return self._count((user_lines.source_line(eqn, *reversed(outer)), eqn.primitive.name))

    def place_of_draw(self, eqn: JaxprEqn) -> Place:
        """Returns the place of a draw, or callback: the same whether values are kept or not."""
        if id(eqn) not in self._draw_places:
            place = self._count((user_lines.source_line(eqn), f"{eqn.primitive.name} drawn"))
            self._draw_places[id(eqn)] = eqn, place  # keeps it alive, so its id stays its own
        return self._draw_places[id(eqn)][1]

    def _count(self, key: tuple[str, str]) -> Place:
        self._counts[key] += 1
        return (*key, self._counts[key] - 1)

    # -- values -----------------------------------------------------------------

    def keep(self, node: Node, value: PyTree) -> None:
        """Keeps a value of the trace."""
        if self.options.keeps:
            self.nodes.append(node)
            is_key = jax_compat.is_key_dtype(jnp.result_type(value))
            self.values.append(None if is_key else value)

    def node_of(self, value: GlobalValue) -> Node:
        """Returns the node of a global value; one without inputs for what was not kept."""
        known = self.node_at(value.array)
        return known or self._add(value.array, (), value.varying)

    def node_behind(self, array: PyTree) -> Node | None:
        """Returns the node of what cross-replica code computes, with those on the way to it."""
        for x, before in _behind(array, lambda x: self.node_at(x) is not None):
            self._add(x, tuple(n for n in map(self.node_at, before) if n is not None), False)
        return self.node_at(array)

    def _add(self, array: PyTree, inputs: tuple[Node, ...], varying: bool) -> Node:
        """Keeps a value that no replica computes: of an argument, or of cross-replica code."""
        eqn = jax_compat.equation_of(array)
        line, name, number = user_lines.UNKNOWN, "argument", 0
        if eqn is not None:
            line, name = user_lines.source_line(eqn), eqn.primitive.name
            number = jax_compat.output_number(array, eqn)
        place = self._count((line, name)), number
        node = Node(place, inputs, varying=varying, is_cross=True)
        if eqn is not None and eqn.primitive is variable_p:
            node.variable = eqn.params["variable"]()
        self.keep(node, array)
        self.record(array, node, self.tags_of(array))
        return node

    def on_reduced(
        self, op: str, values: Sequence[GlobalValue], outs: Sequence[Any], topology: Topology
    ) -> None:
        """Keeps what the user's cross-replica code has reduced: that of a merge of ours is none."""
        if not self.keeps or jax_compat.current_trace() is not self.trace:
            return
        frames = itertools.takewhile(lambda f: not _is_merging(f), user_lines.calling_frames())
        line = user_lines.find_line(f for f in frames if not f.file.startswith(INSTALLED))
        if line is None:
            return
        self.num_reduced += 1
        for value, out in zip(values, outs, strict=True):
            tags, given = self.tags_of(value.array), self.node_of(value)
            place = self._count((line, f"the {op.lower()} over the replicas")), 0
            node = Node(place, (given,), is_reduction=True, varying=False, is_cross=True)
            self.keep(node, out)
            self.record(out, node, tags)

    def node_at(self, array: PyTree) -> Node | None:
        """Returns the node of a global value, looking through constraints; None: not kept."""
        while id(array) not in self._node_of:
            eqn = jax_compat.equation_of(array)
            if eqn is None or eqn.primitive.name not in _UNCHANGED or len(eqn.in_tracers) != 1:
                return None
            (array,) = eqn.in_tracers
        return self._node_of[id(array)][1]

    def record(self, array: PyTree, node: Node | None, tags: Tags) -> None:
        """Remembers what is known of a global value."""
        if node is not None:
            self._node_of[id(array)] = array, node
        self._tags_of[id(array)] = array, tags

    def tags_of(self, array: PyTree) -> Tags:
        """Returns the tags of a global value: its own, or those of what it is computed from."""
        for x, before in _behind(array, lambda x: id(x) in self._tags_of):
            self._tags_of[id(x)] = x, NO_TAGS.union(*(self._tags_of[id(y)][1] for y in before))
        return self._tags_of[id(array)][1]

    # -- draws ------------------------------------------------------------------

    def grown_axis(self, place: Place, own: Sequence[int], count: int) -> int | None:
        """Returns the axis along which the one replica draws R times as much; None: none."""
        axis = grown_axis(own, (self.options.mates or {}).get(place, ()), count)
        if axis is not None:
            self.axes[place] = axis
        return axis

    def in_order(self, place: Place, drawn: PyTree, ndim: int) -> Any:
        """Returns what the one replica drew, for rows that stand in another order."""
        axis, order = self.options.axes.get(place), self.options.order
        if axis is None or drawn.shape[ndim + axis] != len(order):
            return drawn
        return jnp.take(drawn, jnp.array(order), ndim + axis)


def grown_axis(own: Sequence[int], whole: Sequence[int], count: int) -> int | None:
    """Returns the axis along which values of one shape, joined, have another one; None: none."""
    if len(own) != len(whole):
        return None
    axes = [i for i, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
    return axes[0] if len(axes) == 1 and whole[axes[0]] == count * own[axes[0]] else None


def _behind(
    array: PyTree, is_known: Callable[[PyTree], bool]
) -> Iterator[tuple[PyTree, Sequence[PyTree]]]:
    """Yields what is not known yet of a value and those behind it, each after its operands.

    With its operands; it has to be known when the next one is asked for.
    """
    pending = [array]
    while pending:
        last = pending[-1]
        eqn = jax_compat.equation_of(last)
        before = [] if eqn is None else list(eqn.in_tracers)
        missing = [] if is_known(last) else [x for x in before if not is_known(x)]
        if missing:
            pending += missing
            continue
        pending.pop()
        if not is_known(last):
            yield last, before


class _RecordingEmitter(JaxprEmitter):
    """Emits a replica function so that its draws agree, and its values are kept."""

    def __init__(self, topology: Topology, recording: Recording):
        super().__init__(topology)
        self._recording = recording
        self.expected = current_reason()  # of the whole run

    def needed(self, eqns: list[JaxprEqn], outs: Sequence[Any]) -> list[JaxprEqn]:
        """Returns all where values are kept: a loss has a line though only its gradient counts."""
        needed = super().needed(eqns, outs)
        known = set(map(id, needed))
        drops_draws = any(_draws(eqn) for eqn in eqns if id(eqn) not in known)
        return eqns if self._recording.keeps and not drops_draws else needed

    def map_segment(
        self, part: Jaxpr, ins: Sequence[GlobalValue], flags: Sequence[bool]
    ) -> list[Any]:
        """Returns the global results of code without merges."""
        recording, arrays = self._recording, [x.array for x in ins]
        varying = [x.varying for x in ins]
        evaluator = _Evaluator(self, recording)
        follows = recording.keeps or _answers(part)
        if not follows or jax_compat.current_trace() is not recording.trace:
            run = lambda *local: evaluator.evaluate(part, (), local)
            return map_replicas(self.topology, run, arrays, varying, flags)
        given = list(map(recording.node_of, ins))
        nodes: list[Node] = []

        def run_keeping(*local: jax.Array) -> list[Any]:
            kept = _Kept()
            outs = evaluator.follow(part, list(zip(local, given, strict=True)), kept)
            nodes[:] = kept.nodes if recording.options.keeps else []
            results[:] = [node for _, node in outs]
            answered[:] = kept.answers
            told = [value for _, values in kept.answers for value in values]
            return [*(v for v, _ in outs), *told, *kept.values[: len(nodes)]]

        results: list[Node] = []
        answered: list[tuple[Place, Any]] = []
        values = map_replicas(self.topology, run_keeping, arrays, varying, True)
        more = iter(values[len(flags) :])
        for place, told in answered:
            recording.answers[place] = [next(more) for _ in told]
        for node, value in zip(nodes, more, strict=True):
            recording.keep(node, value)
        outs = [x if f else x[0] for x, f in zip(values, flags, strict=False)]
        tags = Dependence(self, recording).outputs(part, list(map(recording.tags_of, arrays)))
        for out, node, known in zip(outs, results, tags, strict=True):
            recording.record(out, node, known)
        return outs

    def emit_merging(self, eqn: JaxprEqn, ins: list[GlobalValue]) -> list[GlobalValue]:
        """Evaluates one equation that is or contains a merge."""
        recording, is_merge = self._recording, "merge" in eqn.params
        before = recording.num_reduced
        outs = super().emit_merging(eqn, ins)
        if not recording.keeps or jax_compat.current_trace() is not recording.trace:
            return outs
        if is_merge and recording.num_reduced > before:  # the nodes are those of its own lines
            return outs
        tags = NO_TAGS.union(*(recording.tags_of(x.array) for x in ins))
        place, given = recording.place(eqn), tuple(map(recording.node_of, ins))
        if eqn.primitive.name in CALLS:
            return outs  # what is in it was kept
        for i, out in enumerate(outs):
            number, count = recording.options.edits.get((place, i)), self.topology.num_replicas
            if number is not None:
                x = out.array
                of_mode = (x, x / count, x * count, *[x] * (len(EDITS) - 3))
                out = out._replace(array=_chosen(recording.options.modes, number, of_mode, x))
                outs[i] = out
            asked_at = getattr(eqn.params.get("merge"), "asked_at", None)
            node = Node((place, i), given, is_merge, out.varying, eqns=(eqn,), asked_at=asked_at)
            recording.keep(node, out.array)
            recording.record(out.array, node, tags)
        return outs


def _is_merging(frame: user_lines.SourceFrame) -> bool:
    return frame.function == _RecordingEmitter.emit_merging.__qualname__


class _Kept:
    """What one segment keeps."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Any] = []
        self.answers: list[tuple[Place, Any]] = []

    def add(self, node: Node, value: PyTree) -> None:
        """Keeps a value; of a PRNG key nothing."""
        self.nodes.append(node)
        is_key = jax_compat.is_key_dtype(jnp.result_type(value))
        self.values.append(jnp.zeros(()) if is_key else value)


def _codes_of(eqn: JaxprEqn, ins: list[Any]) -> list[tuple[Jaxpr, list[Any], list[Any]]]:
    """Returns the code in a loop or branch with its constants, and what its first turn gets.

    Of a branch each.
    """
    if eqn.primitive.name == "cond":
        return [(*jax_compat.open_jaxpr(branch), ins[1:]) for branch in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        code, consts = jax_compat.open_jaxpr(eqn.params["body_jaxpr"])
        _, of_body, carry = jax_compat.split_while_inputs(eqn, ins)
        return [(code, consts, [*of_body, *carry])]
    code, consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    shared, carry, xs = jax_compat.split_scan_inputs(eqn, ins)
    at = -1 if eqn.params["reverse"] else 0
    return [(code, consts, [*shared, *carry, *((x[at], node) for x, node in xs)])]


def _draws(eqn: JaxprEqn) -> bool:
    """Returns whether an equation draws, or calls the host."""
    if eqn.primitive.name in DRAWS | CALLBACKS:
        return True
    return any(_draws(inner) for code in jax_compat.sub_jaxprs(eqn) for inner in code.eqns)


def _answers(jaxpr: Jaxpr) -> bool:
    """Returns whether code calls the host for a value, outside of loops and branches."""
    return any(
        (eqn.primitive.name in CALLBACKS and eqn.outvars)
        or (eqn.primitive.name in CALLS and any(map(_answers, jax_compat.sub_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


class _Evaluator(OneDevice):
    """Evaluates a segment for one replica."""

    def __init__(self, emitter: JaxprEmitter, recording: Recording):
        super().__init__(emitter.analysis, emitter.topology.num_replicas)
        self._plain = OneDevice(emitter.analysis, emitter.topology.num_replicas)
        self._recording, self._options = recording, recording.options
        self._edits_inside: dict[int, dict[int, int]] = {}  # by id of an equation in a loop
        self._is_inside = False
        self._maps_devices = emitter.topology.maps_devices

    def _is_special(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive.name in DRAWS | jax_compat.CONSTRAINTS:
            return True
        if self._options.constants or self._is_inside:
            return True
        if eqn.primitive.name in CALLBACKS and self._options.answers is not None:
            return True
        if not self._maps_devices:
            return super()._is_special(eqn)
        return any(self._is_special(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)

    def _equation(self, eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        outs = self._evaluated(eqn, ins)
        own = self._edits_inside.get(id(eqn), {}) if self._is_inside else {}
        given = ins if self._analysis.over_replicas(eqn) else outs
        edit = lambda i, out: self._as_edited(own[i], out, given[i]) if i in own else out
        return [edit(i, out) for i, out in enumerate(outs)]

    def _evaluated(self, eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in DRAWS:
            return [self._draw(eqn, ins[0])]
        if eqn.primitive.name in jax_compat.CONSTRAINTS:
            return ins  # they name devices that are not the one of a check
        if eqn.primitive.name in CALLBACKS and self._options.answers is not None:
            return self._answer(eqn, ins, self._options.answers)
        if self._options.constants or self._is_inside:
            ins = self._exchanged(eqn, ins)
            is_one = next(jax_compat.sub_jaxprs(eqn), None) is None and not super()._is_special(eqn)
            # A derivative around `run` needs the rule of a function: it is for the code as it is.
            has_rule = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
            if is_one or (has_rule and not self._plain._is_special(eqn) and not _draws(eqn)):
                return jax_compat.bind_equation(eqn, ins)
        return super()._equation(eqn, ins)

    def _exchanged(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        """Returns operands with other numbers in the place of those in the code."""
        line, new = user_lines.source_line(eqn), list[Any]()
        if line not in self._options.constant_lines or _is_of_a_mean(eqn):
            return ins
        for atom, value in zip(eqn.invars, ins, strict=True):
            if isinstance(atom, Literal) and jnp.ndim(value) == 0:
                other, aval = self._options.constants.get(float(value)), jax_compat.aval_of(value)
                if other is not None and aval.dtype != bool:
                    self._recording.used_constants[line] = float(value)
                    value = jnp.asarray(other, aval.dtype)
            new.append(value)
        return new

    def _draw(self, eqn: JaxprEqn, keys: PyTree) -> Any:
        recording, own = self._recording, tuple(eqn.params["shape"])
        place = recording.place_of_draw(eqn)
        if self._options.mates is None:
            recording.draws[place] = own
            mine = jax_compat.bind_equation(eqn, [keys])[0]
            return recording.in_order(place, mine, jnp.ndim(keys))
        axis = recording.grown_axis(place, own, self.num_replicas)
        if axis is None:
            return jax_compat.bind_equation(eqn, [keys])[0]
        rows = lax.all_gather(jax.random.key_data(keys), self.axis_name)
        first = jax.random.wrap_key_data(rows[0], impl=jax.random.key_impl(keys))
        params = {**eqn.params, "shape": self._options.mates[place]}
        whole = jax_compat.bind_equation(eqn, [first], params)[0]
        # With one key for all replicas all take the same part.
        replica = jnp.where((rows == rows[:1]).all(), 0, lax.axis_index(self.axis_name))
        start = replica * own[axis]
        return lax.dynamic_slice_in_dim(whole, start, own[axis], jnp.ndim(keys) + axis)

    def _answer(self, eqn: JaxprEqn, ins: list[Any], answers: Mapping[Place, Any]) -> Sequence[Any]:
        """Returns what a callback returned in the first run; it is not called again."""
        if not eqn.outvars:
            return []
        given = answers.get(self._recording.place_of_draw(eqn))
        if given is None:
            if eqn.primitive.name == "pure_callback":  # in a loop, or a branch
                return super()._equation(eqn, ins)
            raise UnsupportedError(
                message(
                    "dj.check needs an io_callback that returns values to be outside of loops",
                    got=f"one in a loop or a branch, at {user_lines.source_line(eqn)}",
                    why="it is called once, and its results are used again in other runs",
                    fix="jax.pure_callback, if it has no effect; or rules_only=True",
                )
            )
        return [self._own_answer(rows, v.aval) for rows, v in zip(given, eqn.outvars, strict=True)]

    def _own_answer(self, rows: PyTree, aval: PyTree) -> Any:
        """Returns this replica's answer, or the one replica's: the rows of all, joined."""
        if self.num_replicas == len(rows) > 1:
            return self.own_row(rows)
        axis = grown_axis(rows.shape[1:], aval.shape, len(rows))
        return jnp.asarray(rows[0]) if axis is None else jnp.concatenate(list(rows), axis)

    # -- keeping ----------------------------------------------------------------

    def follow(
        self,
        jaxpr: Jaxpr,
        given: Sequence[Known],
        kept: _Kept,
        outer: tuple[JaxprEqn, ...] = (),
        consts: Sequence[Any] = (),
    ) -> list[Known]:
        """Evaluates code and keeps its values; returns its outputs with their nodes."""
        env = dict(zip(jaxpr.invars, given, strict=True))
        env.update((v, (c, _CONSTANT)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: PyTree) -> Known:
            return (atom.val, _CONSTANT) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            if eqn.primitive.name in CALLS - {"compute_on"}:
                code, own = jax_compat.called_jaxpr(eqn)
                outs = self.follow(code, ins, kept, (*outer, eqn), own)
            elif eqn.primitive.name in _LOOPS and self._options.answers is not None:
                outs = self._follow_loop(eqn, ins, kept, outer)
            else:
                outs = self._keep(eqn, ins, kept, outer)
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _follow_loop(
        self,
        eqn: JaxprEqn,
        ins: list[Known],
        kept: _Kept,
        outer: tuple[JaxprEqn, ...],
    ) -> list[Known]:
        """Evaluates a loop or branch; keeps the values of its first turn, or of all branches.

        In the first turn the law breaks first. It is evaluated once more, by itself: values cannot
        leave a loop. Which branch was taken is known once the step has run.
        """
        made = [
            self.follow(code, given, kept, (*outer, eqn), consts)
            for code, consts, given in _codes_of(eqn, ins)
        ]
        was_inside, self._is_inside = self._is_inside, bool(self._options.edits)
        outs = self._equation(eqn, [x for x, _ in ins])
        self._is_inside = was_inside
        place, found = self._recording.place(eqn, outer), []
        index = ins[0][1] if eqn.primitive.name == "cond" else None
        for i, out in enumerate(outs):
            inputs = tuple(own[i][1] for own in made if own[i][1] is not _CONSTANT)
            node = Node((place, i), inputs, index=index)
            kept.add(node, out)
            found.append((out, node))
        return found

    def _keep(
        self,
        eqn: JaxprEqn,
        ins: list[Known],
        kept: _Kept,
        outer: Sequence[JaxprEqn],
    ) -> list[Known]:
        recording = self._recording
        place = recording.place(eqn, outer)
        outs = self._equation(eqn, [x for x, _ in ins])
        inputs = tuple(n for _, n in ins if n is not _CONSTANT)
        literals = tuple(
            v.val for v in eqn.invars if isinstance(v, Literal) and jnp.ndim(v.val) == 0
        )
        is_reduction = self._analysis.over_replicas(eqn) and eqn.primitive.name != "axis_index"
        found = []
        for i, out in enumerate(outs):
            number = self._options.edits.get((place, i))
            if number is not None:
                out = self._as_edited(number, out, ins[i][0] if is_reduction else out)
                self._edits_inside.setdefault(id(eqn), {})[i] = number
            around = (eqn, *reversed(outer))
            node = Node((place, i), inputs, is_reduction, literals=literals, eqns=around)
            kept.add(node, out)
            found.append((out, node))
        if eqn.primitive.name in CALLBACKS and outs and self._options.answers is None:
            kept.answers.append((recording.place_of_draw(eqn), [out for out, _ in found]))
        return found

    def _as_edited(self, number: int, out: PyTree, own: PyTree) -> Any:
        """Returns a result of an equation as its edit says; `own` is what a reduction takes."""
        count, total = self.num_replicas, lax.psum(out, self.axis_name)
        extremes = out, out
        if not jnp.issubdtype(jnp.result_type(out), jnp.complexfloating):
            as_number = out.astype(jnp.int32) if out.dtype == bool else out
            extremes = (f(as_number, self.axis_name) for f in (lax.pmax, lax.pmin))
        own = own if jnp.shape(own) == jnp.shape(out) else out  # else it was gathered
        of_mode = (out, out / count, out * count, total / count, total, *extremes, own, own * count)
        return _chosen(self._options.modes, number, of_mode, out)


def _chosen(modes: PyTree, number: int, of_mode: Sequence[Any], like: PyTree) -> Any:
    """Returns the value for the mode of an edit: one of `EDITS`, by number."""
    dtype = jnp.result_type(like)
    return lax.select_n(modes[number], *(jnp.asarray(x, dtype) for x in of_mode))


def _is_of_a_mean(eqn: JaxprEqn) -> bool:
    """Returns whether JAX divides by a size: a number in the code of `jnp.mean` and its like."""
    names = {frame.function.rpartition(".")[2].strip("_") for frame in user_lines.frames_of(eqn)}
    return not names.isdisjoint(("mean", "var", "std", "average", "nanmean"))


_CONSTANT = Node((("", "", 0), 0), ())


class Dependence(Flow[Tags]):
    """Follows why a value may differ between R replicas and one."""

    def __init__(self, emitter: _RecordingEmitter, recording: Recording):
        super().__init__()
        self._emitter, self._recording = emitter, recording

    def of_constant(self, value: object) -> Tags:
        """Returns nothing: a constant is the same for any number of replicas."""
        return NO_TAGS

    def join(self, a: Tags, b: Tags) -> Tags:
        """Returns what either depends on."""
        return a | b

    def of_equation(self, eqn: JaxprEqn, ins: list[Tags]) -> Sequence[Tags] | None:
        """Returns what the results depend on."""
        name, scopes = eqn.primitive.name, str(eqn.source_info.name_stack)
        tags = NO_TAGS.union(*ins)
        if name == "axis_index" and self._emitter.analysis.over_replicas(eqn):
            tags = NO_TAGS if OWN_INDEX in scopes else frozenset((OWN_NUMBER,))
        if name in DRAWS:
            place = self._recording.place_of_draw(eqn)
            count = self._emitter.topology.num_replicas
            is_same = self._recording.grown_axis(place, eqn.params["shape"], count) is not None
            tags = frozenset((OWN_DRAWS,)) if tags and not is_same else NO_TAGS
        reason = reason_in(scopes) or self._emitter.expected
        if reason is not None:
            tags |= {f"dj.expect({reason!r})"}
        elif next(jax_compat.sub_jaxprs(eqn), None) is not None:
            return None
        return [tags] * len(eqn.outvars)

    def of_predicate(self, eqn: JaxprEqn, predicate: Tags, outs: list[Tags]) -> list[Tags]:
        """Returns what values depend on that a predicate decides on."""
        return [tags | predicate for tags in outs]

    def of_unknown(self, eqn: JaxprEqn, ins: list[Tags]) -> Sequence[Tags]:
        """Returns what any operand depends on."""
        return [NO_TAGS.union(*ins)] * len(eqn.outvars)
