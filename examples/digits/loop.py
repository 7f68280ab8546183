"""The training loop: epochs, progress bar, test after each epoch. It knows nothing of replicas."""

import argparse
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from tqdm import tqdm

import data
import distjax as dj
from report import History


def fit(
    options: argparse.Namespace,
    strategy: dj.Strategy,
    splits: tuple[data.Split, data.Split],
    train: Callable[[Any, Any], Any],
    test: Callable[[list[tuple[Any, Any]]], float],
) -> History:
    """Trains and tests; returns the history of the run.

    Args:
        options: The command line.
        strategy: The strategy that cuts global batches into batches per replica.
        splits: Examples to train on and to test on.
        train: Takes per-replica images and labels, does one step, returns the loss over all.
        test: Takes a list of per-replica batches, returns the accuracy over all of them.
    """
    train_split, test_split = splits
    size = options.global_batch
    test_set = [data.per_replica(strategy, batch) for batch in data.test_batches(test_split, size)]
    steps_per_epoch = data.steps_per_epoch(train_split, size)
    all_steps = options.epochs * steps_per_epoch
    num_steps = min(options.steps or all_steps, all_steps)
    batches = islice(data.train_batches(train_split, size, options.seed), num_steps)

    losses, accuracies = [], []
    start = time.perf_counter()
    # disable=None: no bar where standard error is not a terminal.
    with tqdm(batches, total=num_steps, desc=options.strategy, unit="step", disable=None) as bar:
        for step, batch in enumerate(bar, start=1):
            losses.append(train(*data.per_replica(strategy, batch)))
            if step % steps_per_epoch == 0 or step == num_steps:
                losses = [x.get() if isinstance(x, dj.RemoteValue) else x for x in losses]
                accuracies.append((step, test(test_set)))
                bar.set_postfix(
                    loss=f"{float(losses[-1]):.4f}", test_accuracy=f"{accuracies[-1][1]:.2%}"
                )
    return History(
        losses=[float(loss) for loss in losses],
        accuracies=accuracies,
        seconds=time.perf_counter() - start,
        devices=losses[-1].devices(),
    )
