"""More statements for random programs: JAX's own loops, derivatives, rules, collectives, solvers.

Statements beside those of `programs`, on the same two registers, none of which writes a variable:

  ("swap",)                             the registers change places
  ("apply", register, operation, expr)  a function of arrays: see OPERATIONS
  ("draw", register, kind, expr)        random bits of a key: "equal", "own" or "split"
  ("collective", register, kind, number, expr)   see COLLECTIVES
  ("call_back", register, kind, expr)   "pure" (and said to be so in register 1), "count" (another
                                        number at each call) or "io"
  ("solve", register, kind, collective, expr)    see SOLVERS
  ("ref", register, expr)               through a mutable reference
  ("within", kind, body)                a body inside a transformation: see WITHIN
  ("while", kind, body)                 jax.lax.while_loop that ends by a "count" or a register
  ("branch", kind, bodies)              jax.lax.switch by the "argument" or by a register

Values are squashed, not clipped: what differs between replicas still does.
"""

import functools
import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import distjax as dj
from tests.differential.outcomes import Case
from tests.differential.programs import LIMIT, Machine

AXIS = "replica"
#: Of callbacks: no two calls return the same.
NUMBERS = itertools.count(1)


def squashed(x):
    """Returns `x` [2] brought into the limits, strictly monotonic and 1-Lipschitz."""
    return x / (1 + jnp.abs(x) / LIMIT)


def put(registers, index, value):
    """Returns the registers with a new value in one of them."""
    value = squashed(value.astype(jnp.float32))
    return (value, registers[1]) if index == 0 else (registers[0], value)


class TransformedMachine(Machine):
    """Runs programs of these statements and those of `programs` under one strategy."""

    def run(self, body, flag, registers):
        """Returns the registers after the body, and after each statement before."""

        def fn(flag, registers):
            seen = [registers]
            for statement in body:
                seen.append(self.body([statement], flag, seen[-1]))
            return seen

        self.seen = self.strategy.run(fn, args=(flag, registers))
        return self.seen[-1]

    def step(self, flag, first, second):
        """Returns what the registers were after each statement of each run."""
        registers, seen = (first, second), []
        for _, body in self.program:
            registers = self.run(body, flag, registers)
            seen += self.seen
        return seen

    def _swap(self, flag, registers):
        return registers[::-1]

    def _apply(self, flag, registers, index, operation, expr):
        value = squashed(self.value(registers, expr))
        return put(registers, index, OPERATIONS[operation](value, registers[index]))

    def _draw(self, flag, registers, index, kind, expr):
        value = self.value(registers, expr)
        key = jax.random.key(jnp.sum(value * 100).astype(int))
        if kind == "own":
            key = dj.get_replica_context().fold_in(key)
        if kind == "split":
            key = jax.random.split(key, 3)[1]
        return put(registers, index, jax.random.normal(key, (2,)))

    def _collective(self, flag, registers, index, kind, number, expr):
        return put(registers, index, self.collective(kind, number)(self.value(registers, expr)))

    def collective(self, kind, number=1):
        """Returns a function of an array [2] that names the replica axis."""
        count = self.strategy.num_replicas_in_sync
        return functools.partial(COLLECTIVES[kind], count, number)

    def _call_back(self, flag, registers, index, kind, expr):
        value = self.value(registers, expr)
        shape = jax.ShapeDtypeStruct((2,), np.float32)
        if kind == "io":
            out = io_callback(_counted, shape, value)
        else:
            call = _counted if kind == "count" else _doubled
            is_declared = kind == "pure" and index == 1
            declared = dj.expect("twice its argument", differs=()) if is_declared else nullcontext()
            with declared:
                out = jax.pure_callback(call, shape, value, vmap_method="sequential")
        return put(registers, index, out)

    def _solve(self, flag, registers, index, kind, collective, expr):
        reduced = self.collective(collective)
        matvec = lambda v: 2 * v + 0.1 * reduced(v * jnp.abs(jnp.cos(registers[0])))
        return put(registers, index, SOLVERS[kind](matvec, self.value(registers, expr)))

    def _ref(self, flag, registers, index, expr):
        ref = jax.new_ref(self.value(registers, expr))
        ref[0] = 2 * ref[1]
        return put(registers, index, ref[...])

    def _within(self, flag, registers, kind, body):
        inner = lambda registers: self.body(body, flag, registers)
        found = WITHIN[kind](inner, registers)
        return put(put(registers, 0, found[0]), 1, found[1])

    def _while(self, flag, registers, kind, body):
        def far(carry):
            near = kind != "count" and jnp.sum(jnp.sin(carry[1][kind])) > 0.3
            return (carry[0] < 3) & ~jnp.bool_(near)

        again = lambda carry: (carry[0] + 1, self.body(body, flag, carry[1]))
        steps, registers = lax.while_loop(far, again, (0, registers))
        return put(registers, 1, registers[1] + steps)  # as often as its predicate says

    def _branch(self, flag, registers, kind, bodies):
        branches = [
            lambda r, body=body, number=number: (number, self.body(body, flag, r))
            for number, body in enumerate(bodies)
        ]
        if kind != "argument":
            flag = jnp.int32(jnp.sum(jnp.abs(registers[kind])) * 2) % len(branches)
        number, registers = lax.switch(flag, branches, registers)
        return put(registers, 1, registers[1] + number)


#: What one register becomes of two values [2].
OPERATIONS = {
    "dot": lambda x, y: jnp.outer(x, y) @ x * 0.1,
    "where": lambda x, y: jnp.where(x > 0.3, x, y),
    "sort": lambda x, y: jnp.sort(x) - y,
    "sort_two": lambda x, y: lax.sort((x, y), num_keys=1)[1],
    "cumsum": lambda x, y: jnp.cumsum(x + y),
    "take": lambda x, y: x[jnp.argmax(y)] * y,
    "scatter": lambda x, y: x.at[jnp.int32(jnp.abs(y))].add(0.5, mode="drop"),
    "slice": lambda x, y: lax.dynamic_update_slice(y, x[:1], (jnp.int32(x[1] > 0),)),
    "fft": lambda x, y: jnp.real(jnp.fft.fft(x)) + y,
    "cholesky": lambda x, y: jnp.linalg.cholesky(jnp.outer(x, x) * 0.1 + 2 * jnp.eye(2))[1],
    "searched": lambda x, y: jnp.searchsorted(jnp.sort(y), x) + 0.5 * x,
    "top": lambda x, y: lax.top_k(x, 2)[0] + 0.1 * y,
    "even": lambda x, y: jnp.float32(jnp.int32(x) & 1) + 0.1 * y,
    "relu": lambda x, y: jax.nn.relu(x) + 0.1 * y,
    "barrier": lambda x, y: lax.optimization_barrier((x, y))[1] * 1.1,
    "placed": lambda x, y: jax.device_put((x, y))[1] * 0.9,
    "empty": lambda x, y: lax.empty((2,), jnp.float32).at[:].set(x) + y,
}


def _ring(count, number):
    return [(i, (i + number) % count) for i in range(count)]


def _groups(count, number):
    """Groups of a size: of one replica each where the count has no other divisor."""
    size = 2 if count % 2 == 0 and count > 2 else 1
    order = [(i + number) % count for i in range(count)]
    return [order[i : i + size] for i in range(0, count, size)]


def _scattered(count, number, x):
    rows = jnp.outer(jnp.arange(1.0, count + 1), x)
    return lax.psum_scatter(rows, AXIS, scatter_dimension=0)


def _exchanged(count, number, x):
    # JAX 0.10 cannot batch an exchange of values that are the same in the whole batch.
    rows = jnp.outer(jnp.arange(1.0, count + 1), x + 0 * lax.axis_index(AXIS))
    return lax.all_to_all(rows, AXIS, 0, 0, tiled=True)[number % count]


#: (R, a number, x [2]) -> [2].
COLLECTIVES = {
    "psum": lambda count, number, x: lax.psum(x, AXIS) / count,
    "psum_of_two": lambda count, number, x: lax.psum((x, 2 * x), AXIS)[1] / count,
    "pmean": lambda count, number, x: lax.pmean(x, AXIS),
    "pmax": lambda count, number, x: lax.pmax(x, AXIS),
    "pmin": lambda count, number, x: lax.pmin(x, AXIS),
    "gathered": lambda count, number, x: lax.all_gather(x, AXIS)[number % count],
    "gathered_mean": lambda count, number, x: lax.all_gather(x, AXIS, tiled=True).mean() + 0 * x,
    "own_row": lambda count, number, x: lax.all_gather(x, AXIS)[lax.axis_index(AXIS)],
    "index": lambda count, number, x: x + lax.axis_index(AXIS),
    "ppermute": lambda count, number, x: lax.ppermute(x, AXIS, _ring(count, number)),
    "scattered": _scattered,
    "exchanged": _exchanged,
    "partial": lambda count, number, x: lax.ppermute(x, AXIS, _ring(count, 1)[:number]),
    "group_sum": lambda count, number, x: lax.psum(
        x, AXIS, axis_index_groups=_groups(count, number)
    ),
    "group_max": lambda count, number, x: lax.pmax(
        x, AXIS, axis_index_groups=_groups(count, number)
    ),
    "group_gathered": lambda count, number, x: lax.all_gather(
        x, AXIS, axis_index_groups=_groups(count, number)
    )[0],
}
#: Those that JAX can differentiate.
SMOOTH = ("psum", "psum_of_two", "pmean", "gathered", "gathered_mean", "own_row", "index",
          "ppermute", "scattered", "exchanged", "partial")  # fmt: skip


def _counted(x):
    return np.full(2, next(NUMBERS) % 7, np.float32) + 0.1 * np.asarray(x)


def _doubled(x):
    return np.float32(2 * np.asarray(x) + 0.1)


def _iterated(matvec, b):
    return lax.fori_loop(0, 4, lambda i, v: v + 0.3 * (b - matvec(v)), jnp.zeros_like(b))


def _until_near(matvec, b):
    far = lambda c: (jnp.max(jnp.abs(matvec(c[1]) - b)) > 0.1) & (c[0] < 5)
    again = lambda c: (c[0] + 1, c[1] + 0.3 * (b - matvec(c[1])))
    return lax.while_loop(far, again, (0, jnp.zeros_like(b)))[1]


def _root(matvec, b):
    solve = lambda f, guess: lax.fori_loop(0, 3, lambda i, v: v - 0.3 * f(v), guess)
    return lax.custom_root(lambda v: matvec(v) - b, 0 * b, solve, lambda g, y: _iterated(g, y))


#: (matvec, b) -> the solution, as far as the steps go.
SOLVERS = {
    "cg": lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=2)[0],
    "bicgstab": lambda matvec, b: jax.scipy.sparse.linalg.bicgstab(matvec, b, maxiter=2)[0],
    "linear": lambda matvec, b: lax.custom_linear_solve(matvec, b, _iterated, symmetric=True),
    "near": lambda matvec, b: lax.custom_linear_solve(matvec, b, _until_near, symmetric=True),
    "root": _root,
    "derivative": lambda matvec, b: jax.grad(
        lambda b: jnp.sum(jnp.sin(lax.custom_linear_solve(matvec, b, _iterated, symmetric=True)))
    )(b),
}


def _loss(inner, registers):
    return sum(jnp.sum(jnp.sin(x)) for x in inner(registers))


def _with_jvp(inner):
    fn = jax.custom_jvp(inner)
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0][::-1]))
    return fn


def _with_vjp(inner):
    fn = jax.custom_vjp(inner)
    fn.defvjp(lambda r: (inner(r), r[1]), lambda kept, g: ((g[1] + kept, g[0]),))
    return fn


def _custom_vmap(inner, registers):
    def by_rule(size, batched, registers):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched[0])
        return jax.vmap(inner, in_axes=(axes,))(registers), (True, True)

    fn = jax.custom_batching.custom_vmap(inner)
    fn.def_vmap(by_rule)
    return fn(registers)


def _mapped(inner, registers):
    rows = jax.vmap(lambda s: inner((registers[0] * s, registers[1])))(jnp.float32([0.5, 1.5]))
    return rows[0][0], rows[1].sum(0)


def _scanned(inner, registers):
    last, seen = lax.scan(lambda r, x: (inner((r[0] + x, r[1])), r[1]), registers, X)
    return last[0], seen[-1]


def _delayed(inner, registers):
    """What comes out second was in both registers before, and in another carry for a step."""
    step = lambda c, _: ((inner(c[0][::-1]), c[0][1]), None)
    last, delayed = lax.scan(step, (registers, jnp.float32([0.3, -0.2])), length=3)[0]
    return last[0], delayed


X = np.float32([0.5, -1.0, 0.25])

#: (function of the registers, registers) -> registers. Those of DERIVATIVES differentiate it.
WITHIN = {
    "jit": lambda inner, registers: jax.jit(inner)(registers),
    "remat": lambda inner, registers: jax.checkpoint(inner)(registers),
    "scan": _scanned,
    "delayed_scan": _delayed,
    "reverse_scan": lambda inner, registers: lax.scan(
        lambda r, _: (inner(r), None), registers, None, length=2, reverse=True, unroll=2
    )[0],
    "vmap": _mapped,
    "custom_jvp": lambda inner, registers: _with_jvp(inner)(registers),
    "custom_vjp": lambda inner, registers: _with_vjp(inner)(registers),
    "custom_vmap": _custom_vmap,
    "grad": lambda inner, registers: jax.grad(functools.partial(_loss, inner))(registers),
    "vjp": lambda inner, registers: jax.vjp(inner, registers)[1](registers[::-1])[0],
    "jvp": lambda inner, registers: jax.jvp(inner, (registers,), (registers[::-1],))[1],
    "grad_of_remat": lambda inner, registers: jax.grad(
        functools.partial(_loss, jax.checkpoint(inner))
    )(registers),
    "grad_of_scan": lambda inner, registers: jax.grad(
        functools.partial(_loss, functools.partial(_scanned, inner))
    )(registers),
    "jvp_by_rule": lambda inner, registers: jax.jvp(
        _with_jvp(inner), (registers,), (registers[::-1],)
    )[1],
    "grad_by_rule": lambda inner, registers: jax.grad(functools.partial(_loss, _with_vjp(inner)))(
        registers
    ),
}
DERIVATIVES = ("grad", "vjp", "jvp", "grad_of_remat", "grad_of_scan", "jvp_by_rule", "grad_by_rule")
#: What JAX does not differentiate.
REFUSED = {
    "reverse": ("custom_vmap",),
    "forward": ("custom_vmap", "custom_vjp", "grad_by_rule"),
}


def maker(program, flag):
    """Returns what makes the Case of a program, afresh for each strategy."""

    def make(strategy):
        machine = TransformedMachine(strategy, program, flag)
        first = strategy.distribute_values_from_function(
            lambda ctx: np.float32([0.7 + 1.3 * ctx.replica_id_in_sync_group, 0.4])
        )
        return Case(machine.step, (jnp.int32(flag), first, jnp.float32([-0.9, 2.1])))

    return make
