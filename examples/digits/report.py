"""The output of a run: a learning curve, a table and, on request, the losses."""

import argparse
import json
from dataclasses import dataclass

import jax
from matplotlib.figure import Figure

import distjax as dj


@dataclass(frozen=True)
class History:
    """The history of one training run.

    Attributes:
        losses: Mean loss over the global batch, one for each step.
        accuracies: Pairs of (step, accuracy on the test set), one for each epoch.
        seconds: Wall time of training and testing, compilation included.
        devices: The devices that computed the losses.
    """

    losses: list[float]
    accuracies: list[tuple[int, float]]
    seconds: float
    devices: set[jax.Device]


def write(options: argparse.Namespace, strategy: dj.Strategy, history: History) -> None:
    """Saves the learning curve (and the losses, if asked for), then prints the table.

    In a job of several processes, only the first one does this.
    """
    if not strategy.extended.should_save_summary:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    curve = options.out / f"{options.script}_{options.strategy}.png"
    title = f"Handwritten digits, {options.strategy}, R = {strategy.num_replicas_in_sync}"
    learning_curve(title, history).savefig(curve, dpi=120)
    if options.dump_losses is not None:
        options.dump_losses.write_text(json.dumps(history.losses))
    print(f"learning curve: {curve}")
    print(table(options.strategy, strategy, history))


def learning_curve(title: str, history: History) -> Figure:
    """Training loss of each step, above the test accuracy after each epoch."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(history.losses) + 1)
    upper.semilogy(steps, history.losses, color="tab:blue", linewidth=1, label="training loss")
    upper.set(title=title, ylabel="mean cross entropy")

    steps, accuracies = zip(*history.accuracies, strict=True)
    percent = [100 * accuracy for accuracy in accuracies]
    label = f"test accuracy, {percent[-1]:.2f}% at the end"
    lower.plot(steps, percent, color="tab:orange", marker="o", markersize=4, label=label)
    lower.set(xlabel="step", ylabel="percent right")

    upper.legend(loc="upper right")
    lower.legend(loc="lower right")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def table(name: str, strategy: dj.Strategy, history: History) -> str:
    """One run as a table with a header line and a line of values."""
    columns = {
        "strategy": name,
        "replicas": str(strategy.num_replicas_in_sync),
        "devices": f"{len(history.devices)} {next(iter(history.devices)).platform}",
        "steps": str(len(history.losses)),
        "train loss": f"{history.losses[-1]:.6f}",
        "test accuracy": f"{history.accuracies[-1][1]:.2%}",
        "seconds": f"{history.seconds:.1f}",
    }
    widths = [max(len(head), len(value)) for head, value in columns.items()]
    lines = (columns.keys(), ("-" * width for width in widths), columns.values())
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
