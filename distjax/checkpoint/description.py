"""What stands beside the arrays of a checkpoint: names, kinds, objects, the run."""

from __future__ import annotations

import base64
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from distjax import jax_compat
from distjax.checkpoint.collecting import Collected
from distjax.checkpoint.entries import Spec
from distjax.context import frames

#: Raised when an older reader could misread what a newer writer writes.
FORMAT = 1


def describe(step: int, collected: Collected, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what JSON keeps of a checkpoint.

    Args:
      step: its number.
      collected: the tree.
      values: what they hold, by name.
    """
    strategies = collected.strategies or [frames.current().strategy]
    return {
        "format": FORMAT,
        "step": step,
        "distjax": importlib.metadata.version("distjax"),
        "jax": jax.__version__,
        "strategies": [
            {"strategy": repr(s), "num_replicas": s.num_replicas_in_sync} for s in strategies
        ],
        "entries": {e.key: _described(e.spec, values[e.key]) for e in collected.entries},
    }


def _described(spec: Spec | None, value: Any) -> dict[str, Any]:
    if spec is None:
        return {"object": _to_json(value)}
    described: dict[str, Any] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if spec.num_replicas is not None:
        described["num_replicas"] = spec.num_replicas
    if jax_compat.is_key_dtype(getattr(value, "dtype", None)):
        described["key_impl"] = str(jax.random.key_impl(value))
    return described


def specs_in(description: Mapping[str, Any]) -> dict[str, Spec | None]:
    """Returns what each entry is like; None for an object."""
    return {
        key: None if "object" in e else Spec(tuple(e["shape"]), e["dtype"], e.get("num_replicas"))
        for key, e in description["entries"].items()
    }


def object_in(description: Mapping[str, Any], key: str) -> Any:
    """Returns an entry that JSON holds."""
    return _from_json(description["entries"][key]["object"])


def _to_json(value: Any) -> Any:
    """Returns a tree of what JSON knows; bytes and numpy numbers too."""
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_to_json(v) for v in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {_from_json(k): _from_json(v) for k, v in inner}
    if kind == "bytes":
        return base64.b64decode(inner)
    items = [_from_json(v) for v in inner]
    return tuple(items) if kind == "tuple" else items
