"""What the three seeds name: the rows of the README's table, written down by hand.

Seed 002 is the tower API (TensorFlow 1.12), 001 the early replica API (1.13), 000 the late
replica API (1.15). A test holds a row by ``@pytest.mark.seed("<name of the row>")``.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that the seeds name.

    Attributes:
      name: what the seeds call it; markers name the row by it.
      seeds: the seeds that do, by their last digit.
      here: its public names in distjax.
      older: its names in `distjax.compat`.
      later: why no test holds it yet; empty for everything that works.
    """

    name: str
    seeds: str
    here: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    later: str = ""


def row(name, seeds, here="", older="", later=""):
    return Row(name, seeds, tuple(here.split()), tuple(older.split()), later)


SECTIONS = {
    "Contexts": (
        row("default single-replica context", "012", "get_strategy get_replica_context"),
        row("cross-replica context", "012", "in_cross_replica_context"),
        row("replica context", "012", "get_replica_context"),
        row("update context", "0", "StrategyExtended.update"),
        row("a strategy's methods in and out of its scope", "012", "Strategy.scope"),
        row("eager and graph execution", "1", "jit"),
    ),
    "Values": (
        row("per-replica value (T)", "012", "PerReplica", "v1_12.PerDevice v1_13.PerReplica"),
        row("mirrored value (M)", "012", "locality Locality"),
        row("value with the locality of a variable (V(v))", "012", "locality Locality"),
        row("value on the non-slot devices (N)", "012", "StrategyExtended.non_slot_devices"),
        row("unwrapping of arguments", "012", "Strategy.run"),
        row("merging: the same object from every replica", "012", "Strategy.run"),
        row("merging: values that differ", "012", "Strategy.run PerReplica"),
        row("merging: the members of a mirrored variable", "012", "Strategy.run Variable"),
    ),
    "Variables": (
        row("mirrored variable", "012", "Variable", "v1_12.Variable v1_13.Variable"),
        row(
            "sync-on-read variable (replica-local)",
            "01",
            "VariableSynchronization.ON_READ",
            "v1_15.VariableSynchronization",
        ),
        row("sync-on-read variable: reads and writes in a replica", "0", "Variable.assign"),
        row("sync-on-read variable: read across replicas", "01", "Variable.value"),
        row("sync-on-read variable: no assign_add across replicas", "0", "Variable.assign_add"),
        row("aggregation of assign in a replica", "0", "VariableAggregation Variable.assign"),
        row("no write in a replica without aggregation", "0", "VariableAggregation.NONE"),
        row("reads and writes in cross-replica context", "0", "Variable.value Variable.assign"),
        row("variable created in a replica function", "12", "Variable"),
        row("slot variable", "0", "optim.Optimizer"),
        row("non-slot variable", "012", "optim.Optimizer"),
        row("partitioned variable (in the future)", "12", "ShardedStrategy"),
        row("parameter server, synchronous", "012", "CentralStorageStrategy"),
        row(
            "parameter server, asynchronous",
            "12",
            later="later: replicas that update variables independently",
        ),
    ),
    "Kinds of training": (
        row("data parallelism", "12", "Strategy.run Strategy.distribute_dataset"),
        row("synchronous training", "12", "StrategyExtended.reduce_to"),
        row("asynchronous training", "12", later="later: with the asynchronous parameter server"),
        row("model parallelism (in the future)", "012", "MirroredStrategy"),
        row("several devices of one host", "12", "MirroredStrategy"),
        row("several hosts", "1", later="later: jobs of several processes"),
        row("code with no knowledge of strategies", "12", "get_strategy"),
        row("ordinary model code under a strategy", "12", "Strategy.scope", "v1_12 v1_13"),
        row("an algorithm written with the strategy's methods", "12", "StrategyExtended"),
        row("a strategy of one's own", "12", "Strategy StrategyExtended"),
        row("distribution-aware layers", "012", "layers"),
        row("the four steps of an update", "012", "ReplicaContext.merge_call"),
        row("Optimizer.apply_gradients in a replica context", "012", "optim.Optimizer"),
        row(
            "Optimizer._distributed_apply in cross-replica context",
            "12",
            "optim.Optimizer.distributed_apply",
        ),
    ),
    "Free functions and enumerations": (
        row("get_replica_context", "01", "get_replica_context", "v1_13.get_replica_context"),
        row("get_tower_context", "2", "get_replica_context", "v1_12.get_tower_context"),
        row("in_cross_replica_context", "0", "in_cross_replica_context"),
        row("ReduceOp", "01", "ReduceOp.SUM ReduceOp.MEAN", "v1_13.ReduceOp v1_15.ReduceOp"),
        row("VariableAggregation as a reduction", "01", "VariableAggregation.SUM"),
        row('"sum" and "mean" as a reduction', "12", "ReduceOp"),
        row("VariableSynchronization", "0", "VariableSynchronization"),
        row("VariableAggregation", "01", "VariableAggregation", "v1_12.VariableAggregation"),
        row("tf.group of unwrapped results", "2", "", "v1_12.DistributionStrategy.group"),
    ),
    "Strategy": (
        row("scope", "012", "Strategy.scope", "v1_12.DistributionStrategy.scope"),
        row("extended", "01", "Strategy.extended", "v1_13.Strategy.extended"),
        row("experimental_run_v2", "0", "Strategy.run", "v1_15.Strategy.experimental_run_v2"),
        row("reduce (op, value, axis)", "0", "Strategy.reduce"),
        row(
            "experimental_local_results",
            "0",
            "Strategy.local_results",
            "v1_15.Strategy.experimental_local_results",
        ),
        row(
            "unwrap",
            "12",
            "Strategy.local_results",
            "v1_12.DistributionStrategy.unwrap v1_13.Strategy.unwrap",
        ),
        row(
            "experimental_distribute_dataset",
            "0",
            "Strategy.distribute_dataset",
            "v1_15.Strategy.experimental_distribute_dataset",
        ),
        row(
            "experimental_distribute_datasets_from_function",
            "0",
            "Strategy.distribute_datasets_from_function InputContext",
            "v1_15.Strategy.experimental_distribute_datasets_from_function",
        ),
        row("make_dataset_iterator", "1", "", "v1_13.Strategy.make_dataset_iterator"),
        row(
            "distribute_dataset (deprecated in 001)",
            "12",
            "Strategy.distribute_dataset",
            "v1_12.DistributionStrategy.distribute_dataset v1_13.Strategy.distribute_dataset",
        ),
        row("make_one_shot_iterator", "1", "", "v1_12.PerDeviceDataset.make_one_shot_iterator"),
        row(
            "initializable iterators (in the future)",
            "2",
            "",
            "v1_12.PerDeviceDataset.make_initializable_iterator",
        ),
        row("iterator.get_next", "12", "DistributedIterator.get_next"),
    ),
    "StrategyExtended (a part of DistributionStrategy in 002)": (
        row("StrategyExtended(container_strategy)", "0", "StrategyExtended.strategy"),
        row("batch_reduce_to", "01", "StrategyExtended.batch_reduce_to"),
        row("batch_reduce", "2", "", "v1_12.DistributionStrategy.batch_reduce"),
        row("broadcast_to", "1", "StrategyExtended.broadcast_to"),
        row("broadcast", "2", "", "v1_12.DistributionStrategy.broadcast"),
        row(
            "call_for_each_replica",
            "1",
            "StrategyExtended.call_for_each_replica",
            "v1_13.Strategy.call_for_each_replica",
        ),
        row("call_for_each_tower", "2", "", "v1_12.DistributionStrategy.call_for_each_tower"),
        row("colocate_vars_with", "012", "StrategyExtended.colocate_vars_with"),
        row(
            "experimental_run_steps_on_iterator",
            "1",
            "StrategyExtended.run_steps_on_iterator",
            "v1_13.StrategyExtended.experimental_run_steps_on_iterator",
        ),
        row("fetch", "2", "", "v1_12.DistributionStrategy.fetch"),
        row("non_slot_devices", "012", "StrategyExtended.non_slot_devices"),
        row("read_var", "1", "StrategyExtended.read_var"),
        row("reduce_to", "01", "StrategyExtended.reduce_to"),
        row(
            "reduce (aggregation, value, destinations)",
            "2",
            "",
            "v1_12.DistributionStrategy.reduce",
        ),
        row("destinations: a variable, a value, a device", "01", "StrategyExtended.reduce_to"),
        row("update", "012", "StrategyExtended.update", "v1_12.DistributionStrategy.update"),
        row("update (group=False)", "01", "StrategyExtended.update"),
        row(
            "update_non_slot",
            "012",
            "StrategyExtended.update_non_slot",
            "v1_12.DistributionStrategy.update_non_slot",
        ),
        row("update_non_slot (group=False)", "01", "StrategyExtended.update_non_slot"),
        row("value_container", "01", "StrategyExtended.value_container"),
        row("variable_created_in_scope", "0", "StrategyExtended.variable_created_in_scope"),
        row("worker_devices", "01", "StrategyExtended.worker_devices"),
        row("parameter_devices", "01", "StrategyExtended.parameter_devices"),
        row(
            "experimental_require_static_shapes",
            "0",
            "StrategyExtended.require_static_shapes",
            "v1_15.StrategyExtended.experimental_require_static_shapes",
        ),
        row(
            "experimental_between_graph",
            "1",
            "StrategyExtended.between_graph",
            "v1_13.StrategyExtended.experimental_between_graph",
        ),
        row(
            "experimental_should_init",
            "1",
            "StrategyExtended.should_init",
            "v1_13.StrategyExtended.experimental_should_init",
        ),
        row("should_checkpoint", "1", "StrategyExtended.should_checkpoint"),
        row("should_save_summary", "1", "StrategyExtended.should_save_summary"),
    ),
    "ReplicaContext (TowerContext in 002)": (
        row("merge_call", "012", "ReplicaContext.merge_call", "v1_12.TowerContext.merge_call"),
        row("a second merge_call", "12", "ReplicaContext.merge_call"),
        row("all_reduce", "0", "ReplicaContext.all_reduce"),
        row("replica_id_in_sync_group", "1", "ReplicaContext.replica_id_in_sync_group"),
        row(
            "tower_id",
            "2",
            "ReplicaContext.replica_id_in_sync_group",
            "v1_12.TowerContext.tower_id",
        ),
    ),
    "MultiStepContext": (
        row("set_last_step_output", "1", "MultiStepContext.set_last_step_output"),
        row("set_non_tensor_output", "1", "MultiStepContext.set_non_tensor_output"),
        row("last_step_outputs", "1", "MultiStepContext.last_step_outputs"),
        row("non_tensor_outputs", "1", "MultiStepContext.non_tensor_outputs"),
        row("run_op", "1", "MultiStepContext.run_op"),
        row("initial_loop_values", "1", "StrategyExtended.run_steps_on_iterator"),
    ),
    "Locality rules": (
        row("scope: default -> cross-replica context", "012", "Strategy.scope"),
        row(
            "colocate_vars_with(v): variables of V(v)", "012", "StrategyExtended.colocate_vars_with"
        ),
        row(
            "colocate_vars_with(non_slot_devices): variables of N",
            "012",
            "StrategyExtended.colocate_vars_with",
        ),
        row("a new variable: V(v)", "12", "Variable"),
        row("an iterator over a dataset: T", "012", "Strategy.distribute_dataset"),
        row("broadcast(t): M", "12", "StrategyExtended.broadcast_to"),
        row("broadcast(t, v): V(v)", "12", "StrategyExtended.broadcast_to"),
        row(
            "call for each replica: T, M, variables in",
            "012",
            "StrategyExtended.call_for_each_replica",
        ),
        row("T is not used across replicas", "0", "PerReplica"),
        row("all_reduce: T -> M", "0", "ReplicaContext.all_reduce"),
        row("reduce(m, t): T -> M", "12", "StrategyExtended.reduce_to"),
        row("reduce(m, t, v): T -> V(v)", "012", "StrategyExtended.reduce_to"),
        row("batch_reduce(m, [(t, v)]): as reduce", "012", "StrategyExtended.batch_reduce_to"),
        row("update(v, fn): V(v) -> V(v)", "012", "StrategyExtended.update"),
        row("update_non_slot(devices, fn): N -> N", "012", "StrategyExtended.update_non_slot"),
        row("read_var(v): aggregated", "1", "StrategyExtended.read_var"),
        row("fetch(t): any locality -> host", "2", "", "v1_12.DistributionStrategy.fetch"),
        row("unwrap and value_container are inverse", "01", "Strategy.local_results"),
    ),
}

ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
