"""Handwritten digits, split and batched: those of scikit-learn, or of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import distjax as dj

NUM_TRAIN = 1437
PADDING_LABEL = -1  # no network predicts it


class Split(NamedTuple):
    """Images `[n, height, width, 1]` in 0 to 1 and their labels `[n]`."""

    images: np.ndarray
    labels: np.ndarray


def load(path: Path | None = None) -> tuple[Split, Split]:
    """Digits to train on and digits to test on.

    Args:
        path: An `.npz` file with `x_train` and `x_test`, `[n, height, width]` in 0 to 255, and
            their labels `y_train` and `y_test`: the form in which MNIST is distributed. None: the
            1797 digits `[8, 8]` of scikit-learn, always split into the same 1437 and 360.
    """
    if path is not None:
        with np.load(path) as file:
            return tuple(
                Split(
                    (file[f"x_{part}"] / 255).astype(np.float32)[..., None],
                    file[f"y_{part}"].astype(np.int32),
                )
                for part in ("train", "test")
            )
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def blank(size: int) -> Split:
    """A batch of `size` blank images and their labels: what a plan needs of the data."""
    return Split(np.zeros((size, 8, 8, 1), np.float32), np.zeros(size, np.int32))


def steps_per_epoch(split: Split, size: int) -> int:
    """The number of full batches of `size` examples in a split; exits if there is none."""
    if size > len(split.images):
        raise SystemExit(f"--global-batch {size} is more than all {len(split.images)} examples.")
    return len(split.images) // size


def train_batches(split: Split, size: int, seed: int) -> Iterator[Split]:
    """Full batches without end, shuffled anew for each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(split.images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield Split(split.images[rows], split.labels[rows])


def test_batches(split: Split, size: int) -> Iterator[Split]:
    """All examples once, in order; the last batch is padded with blank images of no class."""
    missing = -len(split.images) % size
    images = np.pad(split.images, [(0, missing), (0, 0), (0, 0), (0, 0)])
    labels = np.pad(split.labels, (0, missing), constant_values=PADDING_LABEL)
    for start in range(0, len(images), size):
        yield Split(images[start : start + size], labels[start : start + size])


def per_replica(strategy: dj.Strategy, batch: Split) -> tuple[Any, Any]:
    """A global batch of G examples as (images, labels) with G / R examples for each replica."""
    size = len(batch.images) // strategy.num_replicas_in_sync

    def rows(array: np.ndarray) -> Any:
        return strategy.distribute_values_from_function(
            lambda context: array[context.replica_id_in_sync_group * size :][:size]
        )

    return rows(batch.images), rows(batch.labels)
