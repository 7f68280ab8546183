"""Lossless JSON encoding of states and numbers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from distjax.typing import PyTree

_PLAIN = (bool, int, float, str, type(None))


def encode(value: object) -> Any:
    """Returns `value` as JSON.

    Raises:
      TypeError: it contains something other than numbers, text, bytes, lists, tuples,
        dicts and numpy arrays.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return {type(value).__name__: [encode(x) for x in value]}
    if type(value) is dict:
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"numpy": [data, value.dtype.str, list(value.shape), isinstance(value, np.generic)]}
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def encode_array(array: np.ndarray) -> Any:
    """Returns an array as JSON; dtypes that numpy does not have become float32."""
    return encode(array if array.dtype.kind in "biufc" else array.astype(np.float32))


def decode(saved: PyTree) -> Any:
    """Returns the value passed to `encode`."""
    if not isinstance(saved, dict):
        return saved
    ((kind, content),) = saved.items()
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind == "numpy":
        data, dtype, shape, is_scalar = content
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return array[()] if is_scalar else array
    return (list if kind == "list" else tuple)(decode(x) for x in content)
