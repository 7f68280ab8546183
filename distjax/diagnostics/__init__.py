"""Diagnostics: what a step does, where values live, how training progresses."""

from distjax.context.reporting import Finding
from distjax.diagnostics.explain_step import check, explain
from distjax.diagnostics.explanation import Explanation, ExplanationDiff
from distjax.diagnostics.summaries import SummaryWriter, is_first_process, progress
from distjax.diagnostics.visualizing import visualize

__all__ = [
    "Explanation",
    "ExplanationDiff",
    "Finding",
    "SummaryWriter",
    "check",
    "explain",
    "is_first_process",
    "progress",
    "visualize",
]
