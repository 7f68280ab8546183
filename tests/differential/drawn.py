"""Programs of the statements of `transformed`, each drawn by a seed."""

import random

from tests.differential import transformed

#: How often a statement is drawn, and whether a derivative may hold it.
WEIGHTS = {
    "set": (3, True),
    "swap": (1, True),
    "apply": (5, True),
    "draw": (1, True),
    "collective": (5, True),
    "reduce": (1, True),
    "within": (4, True),
    "branch": (1, True),
    "solve": (1, False),
    "while": (1, False),
    "call_back": (1, False),
    "ref": (1, False),
    "merge": (1, False),
}
#: What a body may hold whose transformation calls it without the axis.
LOCAL = ("set", "swap", "apply", "draw")
#: The register that a predicate looks at.
PREDICATES = (0, 1)
#: What stands at the top of a program only.
OUTERMOST = ("ref", "merge")


class Drawing:
    """Draws one program.

    Attributes:
      count: R.
      on_devices: whether each replica has a device.
      flag: the argument that predicates compare.
      program: the statements.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.count = self.choice((2, 3, 4))
        self.on_devices = self.choice((True, False))
        self.flag = self.choice((0, 1, 2))
        self.program = tuple(("run", self.body(2, size=5)) for _ in range(self.choice((1, 1, 2))))

    def choice(self, options):
        """Returns one of the options."""
        return self._random.choice(tuple(options))

    def body(self, depth, size=2, smooth="", local=False):
        """Returns statements; `local` ones name no axis.

        Those in a derivative are `smooth`: "reverse", or "forward" if one around them is.
        """
        return tuple(
            self.statement(depth, smooth, local) for _ in range(self._random.randint(1, size))
        )

    def statement(self, depth, smooth, local):
        """Returns one statement."""
        weights = {
            kind: weight
            for kind, (weight, has_derivative) in WEIGHTS.items()
            if (has_derivative or not smooth)
            and (not local or kind in LOCAL)
            and (depth == 2 or kind not in OUTERMOST)
            and (depth > 0 or kind not in ("within", "branch", "while"))
        }
        kind = self._random.choices(list(weights), list(weights.values()))[0]
        return (kind, *getattr(self, "_" + kind)(depth, smooth, local))

    def _register(self):
        return self._random.randrange(2)

    def _expr(self, local=False, pairs=True):
        kinds = ["reg", "reg", "reg", "const", *([] if local else ["rid"]), *(["pair"] * pairs * 2)]
        kind = self.choice(kinds)
        if kind == "pair":
            pair = (self._expr(local, False), self._expr(local, False))
            return (self.choice(("add", "sub", "mul", "max")), *pair)
        rest = {"reg": (self._register(),), "const": (self.choice((0.5, -2.0, 3.0)),), "rid": ()}
        return (kind, *rest[kind])

    def _set(self, depth, smooth, local):
        return self._register(), self._expr(local)

    def _swap(self, depth, smooth, local):
        return ()

    def _apply(self, depth, smooth, local):
        return self._register(), self.choice(transformed.OPERATIONS), self._expr(local)

    def _draw(self, depth, smooth, local):
        kinds = ("equal", "split") if local else ("equal", "split", "own")
        return self._register(), self.choice(kinds), self._expr(local)

    def _collective(self, depth, smooth, local):
        kinds = transformed.SMOOTH if smooth else transformed.COLLECTIVES
        return self._register(), self.choice(kinds), self._random.randrange(4), self._expr()

    def _reduce(self, depth, smooth, local):
        return self._register(), self.choice(("sum", "mean")), self._expr()

    def _within(self, depth, smooth, local):
        options = set(transformed.WITHIN) - set(transformed.REFUSED.get(smooth, ()))
        kind = self.choice([*sorted(options), "delayed_scan", "delayed_scan", "grad_of_scan"])
        derived = "forward" if smooth == "forward" or "jvp" in kind else "reverse"
        inside = derived if kind in transformed.DERIVATIVES else smooth
        return kind, self.body(depth - 1, smooth=inside, local=kind == "custom_vmap")

    def _branch(self, depth, smooth, local):
        bodies = tuple(self.body(depth - 1, 2, smooth) for _ in range(self.choice((2, 3))))
        return self.choice(("argument", *PREDICATES)), bodies

    def _solve(self, depth, smooth, local):
        collective = self.choice(("pmean", "psum", "gathered", "ppermute"))
        return self._register(), self.choice(transformed.SOLVERS), collective, self._expr()

    def _while(self, depth, smooth, local):
        return self.choice(("count", *PREDICATES)), self.body(depth - 1)

    def _call_back(self, depth, smooth, local):
        kinds = ("pure", "count", "count", *(["io"] if depth == 2 else []))  # no io in branches
        return self._register(), self.choice(kinds), self._expr()

    def _ref(self, depth, smooth, local):
        return self._register(), self._expr()

    def _merge(self, depth, smooth, local):
        kind = self.choice((("each",), ("reduce", "sum"), ("reduce", "mean")))
        return self._register(), kind, self._expr()
