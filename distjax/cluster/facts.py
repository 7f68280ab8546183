"""What processes compare, as text: programs, and values on the host."""

from __future__ import annotations

import dataclasses
import re
import zlib

import jax
import numpy as np

from distjax import jax_compat
from distjax.typing import PyTree

#: A callback's index within its process says nothing about the program.
_NUMBERS = re.compile(r"\{index = \d+ : ui64\}")
#: The address in a default repr, which is specific to this process.
_ADDRESSES = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True)
class ComparedFact:
    """One fact that processes compare.

    Attributes:
      name: in the user's words, such as "argument args[0] of step".
      text: its value on this process, without addresses or paths; one line or many.
    """

    name: str
    text: str


def describe_program(lowered: jax.stages.Lowered) -> str:
    """Returns a lowered program's text, including shardings, donation and constants."""
    return _NUMBERS.sub("{}", lowered.as_text())


def describe_structure(treedef: jax.tree_util.PyTreeDef) -> str:
    """Returns a treedef's text; objects and functions in it are identified by name."""
    return _ADDRESSES.sub("", str(treedef))


def describe_on_host(value: PyTree) -> str:
    """Returns shape, dtype and checksum of a value that must be equal everywhere.

    One line. For a value that spans processes, shape and dtype only: each process holds a part.
    """
    if not hasattr(value, "dtype"):
        is_number = isinstance(value, (int, float, complex, str))
        return repr(value) if is_number else type(value).__name__
    shown = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return shown
    is_key = jax_compat.is_key_dtype(value.dtype)
    host = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
    first = host.reshape(-1)[:1].tolist()
    return f"{shown} of checksum {zlib.crc32(host.tobytes()):08x}, first {first}"
