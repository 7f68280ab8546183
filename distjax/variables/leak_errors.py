"""The texts of leak errors, which name the JAX construct around the read or write."""

from __future__ import annotations

import sys

import jax

from distjax.errors import message
from distjax.variables.stored_variable import StoredVariable

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


def leak_text(variable: StoredVariable, action: str, place: str) -> str:
    """Returns the text for using a variable in a trace that distjax does not own.

    Args:
      variable: the variable.
      action: "read" or "write".
      place: where it happens, used if the call stack shows no JAX construct.
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
        elif module == "distjax.replica.lax":
            found = None
        elif module not in ("contextlib", "functools"):
            if found or module == "distjax.program.program":
                return found
        frame = frame.f_back
    return found
