"""The handwritten digits that come with scikit-learn, split and batched."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import distjax as dj

NUM_TRAIN = 1437
PADDING_LABEL = -1  # no network predicts it


class Split(NamedTuple):
    """Images `[n, 8, 8, 1]` in 0 to 1 and their labels `[n]`."""

    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Split, Split]:
    """1437 digits to train on, 360 to test on; the same ones every time."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def steps_per_epoch(batch_size: int) -> int:
    """How many full batches the training set gives."""
    return NUM_TRAIN // batch_size


def train_batches(split: Split, size: int, seed: int) -> Iterator[Split]:
    """Full batches without end, shuffled anew for each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(split.images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield Split(split.images[rows], split.labels[rows])


def test_batches(split: Split, size: int) -> Iterator[Split]:
    """All examples once, in order, the last batch filled up with blank images of no class."""
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
