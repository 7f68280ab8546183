"""The full contract of `strategy.extended`, for the modules behind its methods.

Three classes implement it: `StrategyExtended`, `DefaultExtended` and, except for what is
compiled, that of the reference interpreter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import jax

from distjax.collectives.reductions import CommunicationOptions
from distjax.context.contracts import Destinations
from distjax.context.frames import Frame
from distjax.data.options import InputOptions
from distjax.program.function_cache import FunctionCache
from distjax.typing import (
    AxisLike,
    DatasetLike,
    KeywordArgs,
    PositionalArgs,
    PyTree,
    ReduceOpLike,
)
from distjax.variables.stored_variable import ExtendedForVariables, OwningStrategy
from distjax.variables.variable import Variable


class ExtendedContract(ExtendedForVariables, Protocol):
    """`strategy.extended`, whose methods `distjax.StrategyExtended` documents."""

    communication: CommunicationOptions
    compiles: bool  # whether its code may run in `dj.jit`; the reference interpreter's may not
    step_programs: FunctionCache
    variables: weakref.WeakSet[Variable]

    def bind(self, strategy: OwningStrategy) -> None:
        """Sets the strategy that owns this object."""
        ...

    # -- devices and properties ------------------------------------------------

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]: ...
    @property
    def require_static_shapes(self) -> bool: ...
    @property
    def between_graph(self) -> bool: ...
    @property
    def should_init(self) -> bool: ...
    @property
    def should_checkpoint(self) -> bool: ...
    @property
    def should_save_summary(self) -> bool: ...

    # -- replicas and what they hold ------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., PyTree], args: PositionalArgs = (), kwargs: KeywordArgs = None
    ) -> PyTree: ...
    def reduce(
        self, op: ReduceOpLike, value: PyTree, axis: AxisLike = None, mask: PyTree = None
    ) -> PyTree: ...
    def reduce_to(self, op: ReduceOpLike, value: PyTree, destinations: Destinations) -> PyTree: ...
    def batch_reduce_to(
        self, op: ReduceOpLike, value_destination_pairs: Sequence[tuple[PyTree, Destinations]]
    ) -> list[PyTree]: ...
    def gather(self, value: PyTree, axis: int) -> PyTree: ...
    def local_results(self, value: PyTree) -> tuple[PyTree, ...]: ...

    # -- input ----------------------------------------------------------------

    def distribute_values_from_function(self, fn: Callable[..., PyTree]) -> PyTree: ...
    def distribute_dataset(
        self, dataset: DatasetLike, options: InputOptions | None = None
    ) -> DatasetLike: ...
    def distribute_datasets_from_function(
        self, fn: Callable[..., DatasetLike], options: InputOptions | None = None
    ) -> DatasetLike: ...

    # -- variables ------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., PyTree],
        args: PositionalArgs = (),
        kwargs: KeywordArgs = None,
        group: bool = True,
    ) -> PyTree: ...
    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Callable[..., PyTree],
        args: PositionalArgs = (),
        kwargs: KeywordArgs = None,
        group: bool = True,
    ) -> PyTree: ...
    def update_frame(self) -> Frame: ...
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Destinations: ...
    def colocate_vars_with(
        self, colocate_with_variable: Destinations
    ) -> AbstractContextManager[None]: ...
    def read_var(self, v: Variable) -> jax.Array: ...
    def value_container(self, value: PyTree) -> PyTree: ...
    def variable_created_in_scope(self, v: Variable) -> bool: ...
