"""Numbers that the recorder and the replay compute alike: no random generator, no files."""

import numpy as np


def numbers(shape, dtype="float32", seed=0):
    """Returns an array of small numbers of both signs; floats are exact quarters."""
    index = np.arange(int(np.prod(shape)), dtype=np.int64)
    raw = (7 * index + 3 * seed + index * index) % 11 - 5
    if dtype == "uint8" or dtype == "bool":
        raw = abs(raw) % (2 if dtype == "bool" else 11)
    elif not dtype.startswith("int"):
        raw = raw / 4
    return raw.reshape(shape).astype(dtype)


def smooth(shape, seed=0):
    """Returns float32 weights or data in (-1, 1), rounded so that every libm gives the same."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return np.round(np.sin(1.3 * index + 0.7 * seed + 0.1), 4).reshape(shape).astype(np.float32)


def labeled(count):
    """Returns logits [count, 3] and labels [count]; some agree."""
    index = np.arange(count)
    return numbers([count, 3]), (index * index // 2 % 3).astype(np.int32)
