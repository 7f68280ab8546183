"""What processes compare, as text: a program, a value of the host."""

from __future__ import annotations

import dataclasses
import re
import zlib

import jax
import numpy as np

from distjax import jax_compat
from distjax.typing import PyTree

#: A callback's number among those of its process says nothing of the program.
_NUMBERS = re.compile(r"\{index = \d+ : ui64\}")
#: Python's text of what has none of its own: its place in this process.
_ADDRESSES = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing that processes compare.

    Attributes:
      name: in the user's words, such as "argument args[0] of step".
      text: what it is on this process; no addresses, no paths. One line or many.
    """

    name: str
    text: str


def describe_program(lowered: jax.stages.Lowered) -> str:
    """Returns the text of a lowered program: shardings, donation and constants are part of it."""
    return _NUMBERS.sub("{}", lowered.as_text())


def describe_structure(treedef: jax.tree_util.PyTreeDef) -> str:
    """Returns the text of a structure; objects and functions in it are known by their names."""
    return _ADDRESSES.sub("", str(treedef))


def describe_on_host(value: PyTree) -> str:
    """Returns shape, dtype and checksum of what every process is to have; one line.

    Of values that lie on devices of several processes: shape and dtype, as each holds a part.
    """
    if not hasattr(value, "dtype"):
        is_number = isinstance(value, (bool, int, float, complex, str))
        return repr(value) if is_number else type(value).__name__
    shown = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return shown
    is_key = jax_compat.is_key_dtype(value.dtype)
    host = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
    first = host.reshape(-1)[:1].tolist()
    return f"{shown} of checksum {zlib.crc32(host.tobytes()):08x}, first {first}"
