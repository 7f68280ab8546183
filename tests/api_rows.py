"""What three versions of the tf.distribute API name: the rows of `docs/tf_distribute_api.md`.

A test holds a row by ``@pytest.mark.api_row("<name of the row>")``; `api_table.py` makes the table.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that the API documents name.

    Attributes:
      name: what they call it; markers name the row by it.
      versions: the TensorFlow versions whose document does.
      here: its public names in distjax.
      older: its names in `distjax.compat`.
      later: why no test holds it yet; empty for everything that works.
    """

    name: str
    versions: tuple[str, ...]
    here: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    later: str = ""


def row(name, versions, here="", older="", later=""):
    return Row(name, tuple(versions.split()), tuple(here.split()), tuple(older.split()), later)


SECTIONS = {
    "Contexts": (
        row("default single-replica context", "1.12 1.13 1.15", "get_strategy get_replica_context"),
        row("cross-replica context", "1.12 1.13 1.15", "in_cross_replica_context"),
        row("replica context", "1.12 1.13 1.15", "get_replica_context"),
        row("update context", "1.15", "StrategyExtended.update"),
        row("a strategy's methods in and out of its scope", "1.12 1.13 1.15", "Strategy.scope"),
        row("eager and graph execution", "1.13", "jit"),
    ),
    "Values": (
        row(
            "per-replica value (T)",
            "1.12 1.13 1.15",
            "PerReplica",
            "v1_12.PerDevice v1_13.PerReplica",
        ),
        row("mirrored value (M)", "1.12 1.13 1.15", "locality Locality"),
        row("value with the locality of a variable (V(v))", "1.12 1.13 1.15", "locality Locality"),
        row(
            "value on the non-slot devices (N)",
            "1.12 1.13 1.15",
            "StrategyExtended.non_slot_devices",
        ),
        row("unwrapping of arguments", "1.12 1.13 1.15", "Strategy.run"),
        row("merging: the same object from every replica", "1.12 1.13 1.15", "Strategy.run"),
        row("merging: values that differ", "1.12 1.13 1.15", "Strategy.run PerReplica"),
        row(
            "merging: the members of a mirrored variable", "1.12 1.13 1.15", "Strategy.run Variable"
        ),
    ),
    "Variables": (
        row("mirrored variable", "1.12 1.13 1.15", "Variable", "v1_12.Variable v1_13.Variable"),
        row(
            "sync-on-read variable (replica-local)",
            "1.13 1.15",
            "VariableSynchronization.ON_READ",
            "v1_15.VariableSynchronization",
        ),
        row("sync-on-read variable: reads and writes in a replica", "1.15", "Variable.assign"),
        row("sync-on-read variable: read across replicas", "1.13 1.15", "Variable.value"),
        row("sync-on-read variable: no assign_add across replicas", "1.15", "Variable.assign_add"),
        row("aggregation of assign in a replica", "1.15", "VariableAggregation Variable.assign"),
        row("no write in a replica without aggregation", "1.15", "VariableAggregation.NONE"),
        row("reads and writes in cross-replica context", "1.15", "Variable.value Variable.assign"),
        row("variable created in a replica function", "1.12 1.13", "Variable"),
        row("slot variable", "1.15", "optim.Optimizer"),
        row("non-slot variable", "1.12 1.13 1.15", "optim.Optimizer"),
        row(
            "partitioned variable (in the future)",
            "1.12 1.13",
            "ShardedStrategy ParameterServerStrategy",
        ),
        row("parameter server, synchronous", "1.12 1.13 1.15", "CentralStorageStrategy"),
        row(
            "parameter server, asynchronous",
            "1.12 1.13",
            "ParameterServerStrategy",
            "v1_12.ParameterServerStrategy v1_13.ParameterServerStrategy",
        ),
    ),
    "Kinds of training": (
        row("data parallelism", "1.12 1.13", "Strategy.run Strategy.distribute_dataset"),
        row("synchronous training", "1.12 1.13", "StrategyExtended.reduce_to"),
        row("asynchronous training", "1.12 1.13", "Coordinator"),
        row("model parallelism (in the future)", "1.12 1.13 1.15", "MirroredStrategy"),
        row("several devices of one host", "1.12 1.13", "MirroredStrategy"),
        row("several hosts", "1.13", "MultiWorkerMirroredStrategy TPUStrategy initialize"),
        row("code with no knowledge of strategies", "1.12 1.13", "get_strategy"),
        row("ordinary model code under a strategy", "1.12 1.13", "Strategy.scope", "v1_12 v1_13"),
        row("an algorithm written with the strategy's methods", "1.12 1.13", "StrategyExtended"),
        row("a strategy of one's own", "1.12 1.13", "Strategy StrategyExtended"),
        row("distribution-aware layers", "1.12 1.13 1.15", "layers"),
        row("the four steps of an update", "1.12 1.13 1.15", "ReplicaContext.merge_call"),
        row("Optimizer.apply_gradients in a replica context", "1.12 1.13 1.15", "optim.Optimizer"),
        row(
            "Optimizer._distributed_apply in cross-replica context",
            "1.12 1.13",
            "optim.Optimizer.distributed_apply",
        ),
    ),
    "Free functions and enumerations": (
        row("get_replica_context", "1.13 1.15", "get_replica_context", "v1_13.get_replica_context"),
        row("get_tower_context", "1.12", "get_replica_context", "v1_12.get_tower_context"),
        row("in_cross_replica_context", "1.15", "in_cross_replica_context"),
        row("ReduceOp", "1.13 1.15", "ReduceOp.SUM ReduceOp.MEAN", "v1_13.ReduceOp v1_15.ReduceOp"),
        row("VariableAggregation as a reduction", "1.13 1.15", "VariableAggregation.SUM"),
        row('"sum" and "mean" as a reduction', "1.12 1.13", "ReduceOp"),
        row("VariableSynchronization", "1.15", "VariableSynchronization"),
        row("VariableAggregation", "1.13 1.15", "VariableAggregation", "v1_12.VariableAggregation"),
        row("tf.group of unwrapped results", "1.12", "", "v1_12.DistributionStrategy.group"),
    ),
    "Strategy": (
        row("scope", "1.12 1.13 1.15", "Strategy.scope", "v1_12.DistributionStrategy.scope"),
        row("extended", "1.13 1.15", "Strategy.extended", "v1_13.Strategy.extended"),
        row("experimental_run_v2", "1.15", "Strategy.run", "v1_15.Strategy.experimental_run_v2"),
        row("reduce (op, value, axis)", "1.15", "Strategy.reduce"),
        row(
            "experimental_local_results",
            "1.15",
            "Strategy.local_results",
            "v1_15.Strategy.experimental_local_results",
        ),
        row(
            "unwrap",
            "1.12 1.13",
            "Strategy.local_results",
            "v1_12.DistributionStrategy.unwrap v1_13.Strategy.unwrap",
        ),
        row(
            "experimental_distribute_dataset",
            "1.15",
            "Strategy.distribute_dataset",
            "v1_15.Strategy.experimental_distribute_dataset",
        ),
        row(
            "experimental_distribute_datasets_from_function",
            "1.15",
            "Strategy.distribute_datasets_from_function InputContext",
            "v1_15.Strategy.experimental_distribute_datasets_from_function",
        ),
        row("make_dataset_iterator", "1.13", "", "v1_13.Strategy.make_dataset_iterator"),
        row(
            "distribute_dataset (deprecated in 1.13)",
            "1.12 1.13",
            "Strategy.distribute_dataset",
            "v1_12.DistributionStrategy.distribute_dataset v1_13.Strategy.distribute_dataset",
        ),
        row("make_one_shot_iterator", "1.13", "", "v1_12.PerDeviceDataset.make_one_shot_iterator"),
        row(
            "initializable iterators (in the future)",
            "1.12",
            "",
            "v1_12.PerDeviceDataset.make_initializable_iterator",
        ),
        row("iterator.get_next", "1.12 1.13", "DistributedIterator.get_next"),
    ),
    "StrategyExtended (a part of DistributionStrategy in 1.12)": (
        row("StrategyExtended(container_strategy)", "1.15", "StrategyExtended.strategy"),
        row("batch_reduce_to", "1.13 1.15", "StrategyExtended.batch_reduce_to"),
        row("batch_reduce", "1.12", "", "v1_12.DistributionStrategy.batch_reduce"),
        row("broadcast_to", "1.13", "StrategyExtended.broadcast_to"),
        row("broadcast", "1.12", "", "v1_12.DistributionStrategy.broadcast"),
        row(
            "call_for_each_replica",
            "1.13",
            "StrategyExtended.call_for_each_replica",
            "v1_13.Strategy.call_for_each_replica",
        ),
        row("call_for_each_tower", "1.12", "", "v1_12.DistributionStrategy.call_for_each_tower"),
        row("colocate_vars_with", "1.12 1.13 1.15", "StrategyExtended.colocate_vars_with"),
        row(
            "experimental_run_steps_on_iterator",
            "1.13",
            "StrategyExtended.run_steps_on_iterator",
            "v1_13.StrategyExtended.experimental_run_steps_on_iterator",
        ),
        row("fetch", "1.12", "", "v1_12.DistributionStrategy.fetch"),
        row("non_slot_devices", "1.12 1.13 1.15", "StrategyExtended.non_slot_devices"),
        row("read_var", "1.13", "StrategyExtended.read_var"),
        row("reduce_to", "1.13 1.15", "StrategyExtended.reduce_to"),
        row(
            "reduce (aggregation, value, destinations)",
            "1.12",
            "",
            "v1_12.DistributionStrategy.reduce",
        ),
        row(
            "destinations: a variable, a value, a device", "1.13 1.15", "StrategyExtended.reduce_to"
        ),
        row(
            "update",
            "1.12 1.13 1.15",
            "StrategyExtended.update",
            "v1_12.DistributionStrategy.update",
        ),
        row("update (group=False)", "1.13 1.15", "StrategyExtended.update"),
        row(
            "update_non_slot",
            "1.12 1.13 1.15",
            "StrategyExtended.update_non_slot",
            "v1_12.DistributionStrategy.update_non_slot",
        ),
        row("update_non_slot (group=False)", "1.13 1.15", "StrategyExtended.update_non_slot"),
        row("value_container", "1.13 1.15", "StrategyExtended.value_container"),
        row("variable_created_in_scope", "1.15", "StrategyExtended.variable_created_in_scope"),
        row("worker_devices", "1.13 1.15", "StrategyExtended.worker_devices"),
        row("parameter_devices", "1.13 1.15", "StrategyExtended.parameter_devices"),
        row(
            "experimental_require_static_shapes",
            "1.15",
            "StrategyExtended.require_static_shapes",
            "v1_15.StrategyExtended.experimental_require_static_shapes",
        ),
        row(
            "experimental_between_graph",
            "1.13",
            "StrategyExtended.between_graph",
            "v1_13.StrategyExtended.experimental_between_graph",
        ),
        row(
            "experimental_should_init",
            "1.13",
            "StrategyExtended.should_init",
            "v1_13.StrategyExtended.experimental_should_init",
        ),
        row("should_checkpoint", "1.13", "StrategyExtended.should_checkpoint"),
        row("should_save_summary", "1.13", "StrategyExtended.should_save_summary"),
    ),
    "ReplicaContext (TowerContext in 1.12)": (
        row(
            "merge_call",
            "1.12 1.13 1.15",
            "ReplicaContext.merge_call",
            "v1_12.TowerContext.merge_call",
        ),
        row("a second merge_call", "1.12 1.13", "ReplicaContext.merge_call"),
        row("all_reduce", "1.15", "ReplicaContext.all_reduce"),
        row("replica_id_in_sync_group", "1.13", "ReplicaContext.replica_id_in_sync_group"),
        row(
            "tower_id",
            "1.12",
            "ReplicaContext.replica_id_in_sync_group",
            "v1_12.TowerContext.tower_id",
        ),
    ),
    "MultiStepContext": (
        row("set_last_step_output", "1.13", "MultiStepContext.set_last_step_output"),
        row("set_non_tensor_output", "1.13", "MultiStepContext.set_non_tensor_output"),
        row("last_step_outputs", "1.13", "MultiStepContext.last_step_outputs"),
        row("non_tensor_outputs", "1.13", "MultiStepContext.non_tensor_outputs"),
        row("run_op", "1.13", "MultiStepContext.run_op"),
        row("initial_loop_values", "1.13", "StrategyExtended.run_steps_on_iterator"),
    ),
    "Locality rules": (
        row("scope: default -> cross-replica context", "1.12 1.13 1.15", "Strategy.scope"),
        row(
            "colocate_vars_with(v): variables of V(v)",
            "1.12 1.13 1.15",
            "StrategyExtended.colocate_vars_with",
        ),
        row(
            "colocate_vars_with(non_slot_devices): variables of N",
            "1.12 1.13 1.15",
            "StrategyExtended.colocate_vars_with",
        ),
        row("a new variable: V(v)", "1.12 1.13", "Variable"),
        row("an iterator over a dataset: T", "1.12 1.13 1.15", "Strategy.distribute_dataset"),
        row("broadcast(t): M", "1.12 1.13", "StrategyExtended.broadcast_to"),
        row("broadcast(t, v): V(v)", "1.12 1.13", "StrategyExtended.broadcast_to"),
        row(
            "call for each replica: T, M, variables in",
            "1.12 1.13 1.15",
            "StrategyExtended.call_for_each_replica",
        ),
        row("T is not used across replicas", "1.15", "PerReplica"),
        row("all_reduce: T -> M", "1.15", "ReplicaContext.all_reduce"),
        row("reduce(m, t): T -> M", "1.12 1.13", "StrategyExtended.reduce_to"),
        row("reduce(m, t, v): T -> V(v)", "1.12 1.13 1.15", "StrategyExtended.reduce_to"),
        row(
            "batch_reduce(m, [(t, v)]): as reduce",
            "1.12 1.13 1.15",
            "StrategyExtended.batch_reduce_to",
        ),
        row("update(v, fn): V(v) -> V(v)", "1.12 1.13 1.15", "StrategyExtended.update"),
        row(
            "update_non_slot(devices, fn): N -> N",
            "1.12 1.13 1.15",
            "StrategyExtended.update_non_slot",
        ),
        row("read_var(v): aggregated", "1.13", "StrategyExtended.read_var"),
        row("fetch(t): any locality -> host", "1.12", "", "v1_12.DistributionStrategy.fetch"),
        row("unwrap and value_container are inverse", "1.13 1.15", "Strategy.local_results"),
    ),
}

ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
