"""Random programs: small trees of statements, and the function that runs them.

A program is a tuple of cross-replica statements over two registers (float32 [2]
per replica) and eight variables, one per synchronization x aggregation pair:

  ("run", body)                        body in every replica, on the registers
  ("write", variable, method, number)  in cross-replica context
  ("read", variable)                   the same; the value is a result

A body is a tuple of replica statements:

  ("set", register, expr)
  ("reduce", register, op, expr)       all_reduce
  ("write", variable, method, expr)    in replica context
  ("merge", register, kind, expr)      merge_call; kinds: see `_merge`
  ("loop", kind, count, body)          dj.lax.fori_loop / scan, jax.lax.scan
  ("cond", threshold, body, body)      predicate: an argument, equal everywhere

Expressions: ("reg", i), ("const", c), ("rid",), ("read", variable), or
(operator, expr, expr). Values are clipped, so that nothing overflows and
rounding is not magnified.
"""

import operator

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import distjax as dj
from tests.differential.outcomes import Case

PAIRS = {
    f"{mode.name}_{aggregation.name}": (mode, aggregation)
    for mode in (dj.VariableSynchronization.ON_WRITE, dj.VariableSynchronization.ON_READ)
    for aggregation in dj.VariableAggregation
}
METHODS = ("assign", "assign_add", "assign_sub")
READABLE = [name for name in PAIRS if name != "ON_READ_NONE"]
IN_REPLICA = [name for name in PAIRS if name != "ON_WRITE_NONE"]
ACROSS = [
    (name, method)
    for name in READABLE
    for method in METHODS
    if name != "ON_READ_SUM" or method == "assign"
]
OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "max": jnp.maximum}
LIMIT = 8.0


def clipped(x):
    """Returns `x` [2] cut off at the limit: 1-Lipschitz, so rounding stays small."""
    return jnp.clip(x, -LIMIT, LIMIT)


def used_variables(tree):
    """Returns the names of the variables that a program touches, in a fixed order."""
    found = set()

    def visit(node):
        if isinstance(node, tuple):
            for child in node:
                visit(child)
        elif node in PAIRS:
            found.add(node)

    visit(tree)
    return [name for name in PAIRS if name in found]


# -- running ------------------------------------------------------------------


class Machine:
    """Runs programs under one strategy."""

    def __init__(self, strategy, program, flag):
        self.strategy, self.program, self.flag = strategy, program, flag
        self.variables = {}
        with strategy.scope():
            for i, name in enumerate(used_variables(program)):
                mode, aggregation = PAIRS[name]
                self.variables[name] = dj.Variable(
                    np.float32([1 + i, -i]),
                    name=name,
                    synchronization=mode,
                    aggregation=aggregation,
                )

    def step(self, flag, first, second):
        """Runs the whole program in cross-replica context."""
        registers, seen = (first, second), []
        for statement in self.program:
            if statement[0] == "run":
                registers = self.run(statement[1], flag, registers)
            elif statement[0] == "write":
                _, name, method, number = statement
                seen.append(getattr(self.variables[name], method)(np.full(2, number, np.float32)))
            else:
                seen.append(self.variables[statement[1]].value)
        return registers, seen

    def run(self, body, flag, registers):
        """Runs one body in every replica."""
        return self.strategy.run(
            lambda flag, registers: self.body(body, flag, registers), args=(flag, registers)
        )

    def body(self, body, flag, registers):
        """Runs statements as one replica; returns the registers after them."""
        for statement in body:
            registers = getattr(self, "_" + statement[0])(flag, tuple(registers), *statement[1:])
        return tuple(registers)

    def value(self, registers, expr):
        """Returns an expression [2] as this replica sees it."""
        kind = expr[0]
        if kind == "reg":
            return registers[expr[1]]
        if kind == "const":
            return jnp.full(2, expr[1], jnp.float32)
        if kind == "rid":
            rid = dj.get_replica_context().replica_id_in_sync_group
            return jnp.full(2, rid, jnp.float32)
        if kind == "read":
            return self.variables[expr[1]].value
        left, right = (self.value(registers, e) for e in expr[1:])
        return OPERATORS[kind](left, right)

    # Statements: each returns the registers after it.

    def _set(self, flag, registers, index, expr):
        return put(registers, index, self.value(registers, expr))

    def _reduce(self, flag, registers, index, op, expr):
        reduced = dj.get_replica_context().all_reduce(op, self.value(registers, expr))
        return put(registers, index, reduced)

    def _write(self, flag, registers, name, method, expr):
        getattr(self.variables[name], method)(clipped(self.value(registers, expr)))
        return registers

    def _merge(self, flag, registers, index, kind, expr):
        merge = getattr(self, "_merge_" + kind[0])
        args = (clipped(self.value(registers, expr)),)
        merged = dj.get_replica_context().merge_call(lambda s, x: merge(s, x, *kind[1:]), args)
        return put(registers, index, merged)

    def _loop(self, flag, registers, kind, count, body):
        step = lambda carry: self.body(body, flag, carry)
        if kind == "fori":
            return dj.lax.fori_loop(0, count, lambda i, carry: step(carry), registers)
        scan = dj.lax.scan if kind == "scan" else lax.scan
        return scan(lambda carry, x: (step(put(carry, 0, carry[0] + x)), x), registers, XS)[0]

    def _cond(self, flag, registers, threshold, then, otherwise):
        branches = [lambda r, body=body: self.body(body, flag, r) for body in (then, otherwise)]
        return dj.lax.cond(flag > threshold, *branches, registers)

    # What merge functions do: each returns a value [2], or one per replica.

    def _merge_each(self, strategy, x):
        return x

    def _merge_reduce(self, strategy, x, op):
        return strategy.reduce(op, x)

    def _merge_write(self, strategy, x, name, method):
        return getattr(self.variables[name], method)(strategy.reduce("mean", x))

    def _merge_update(self, strategy, x, name, method):
        change = lambda v, g: getattr(v, method)(0.5 * g + v.value)
        x = strategy.extended.reduce_to("mean", x, self.variables[name])
        return strategy.extended.update(self.variables[name], change, args=(x,))

    def _merge_read(self, strategy, x, name):
        return self.variables[name].value + strategy.reduce("sum", x)

    def _merge_run(self, strategy, x, body):
        return strategy.run(lambda x: self.body(body, 0, (x, 2 * x)), args=(x,))[1]


XS = np.float32([0.5, -1.0])


def put(registers, index, value):
    """Returns the registers with a new value in one of them."""
    return (clipped(value), registers[1]) if index == 0 else (registers[0], clipped(value))


def maker(program, flag):
    """Returns what makes the Case of a program, afresh for each strategy."""

    def make(strategy):
        machine = Machine(strategy, program, flag)
        first = strategy.distribute_values_from_function(
            lambda ctx: np.float32([1 + ctx.replica_id_in_sync_group, 0.5])
        )
        args = (jnp.int32(flag), first, jnp.float32([-1, 2]))
        return Case(machine.step, args, list(machine.variables.values()))

    return make


# -- drawing ------------------------------------------------------------------

_numbers = st.sampled_from([0.5, 1.0, -2.0, 3.0])
_registers = st.integers(0, 1)
_ops = st.sampled_from(["sum", "mean"])
_replica_writes = st.tuples(st.just("write"), st.sampled_from(IN_REPLICA), st.sampled_from(METHODS))


def _expressions():
    leaves = st.one_of(
        st.tuples(st.just("reg"), _registers),
        st.tuples(st.just("rid")),
        st.tuples(st.just("const"), _numbers),
        st.tuples(st.just("read"), st.sampled_from(list(PAIRS))),
    )
    pairs = st.tuples(st.sampled_from(list(OPERATORS)), leaves, leaves)
    return st.one_of(leaves, pairs)


_exprs = _expressions()


def _bodies(depth, writes=True):
    """Returns bodies; without `writes`, such as a bare jax.lax loop may hold."""
    statements = [
        st.tuples(st.just("set"), _registers, _exprs),
        st.tuples(st.just("reduce"), _registers, _ops, _exprs),
        st.tuples(st.just("merge"), _registers, _merges(depth, writes), _exprs),
    ]
    if writes:
        statements.append(st.builds(lambda w, e: (*w, e), _replica_writes, _exprs))
    if depth > 0:
        inner = _bodies(depth - 1, writes)
        kinds = st.sampled_from(["fori", "scan"])
        loops = st.tuples(st.just("loop"), kinds, st.just(2), inner)
        bare = st.tuples(st.just("loop"), st.just("jax_scan"), st.just(2), _bodies(0, False))
        conds = st.tuples(st.just("cond"), st.integers(0, 1), inner, inner)
        statements += [bare, *([loops, conds] if writes else [])]
    return st.lists(st.one_of(statements), min_size=1, max_size=3).map(tuple)


def _merges(depth, writes):
    pairs = st.sampled_from(ACROSS)
    kinds = [
        st.just(("each",)),
        st.tuples(st.just("reduce"), _ops),
        st.tuples(st.just("read"), st.sampled_from(READABLE)),
    ]
    if writes:
        kinds.append(pairs.map(lambda pair: ("write", *pair)))
        updates = st.tuples(st.sampled_from(list(PAIRS)), st.sampled_from(METHODS))
        kinds.append(updates.map(lambda pair: ("update", *pair)))
    if depth > 0:
        kinds.append(st.tuples(st.just("run"), _bodies(0, writes)))
    return st.one_of(kinds)


def programs():
    """Returns the strategy (of hypothesis) for programs of one to three statements."""
    runs = st.tuples(st.just("run"), _bodies(2))
    writes = st.builds(lambda pair, c: ("write", *pair, c), st.sampled_from(ACROSS), _numbers)
    reads = st.tuples(st.just("read"), st.sampled_from(READABLE))
    rest = st.lists(st.one_of(runs, writes, reads), max_size=2).map(tuple)
    return st.builds(lambda run, rest: (run, *rest), runs, rest)
