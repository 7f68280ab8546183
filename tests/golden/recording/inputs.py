"""How input reaches the replicas: splits of batches, values from functions, partitioners."""

import itertools

import tensorflow as tf

from tests.golden.recording import tensorflow_side as side

partitioners = tf.distribute.experimental.partitioners


def cases():
    strategies = ("default", "one_device", "mirrored1", "mirrored2", "mirrored3", "mirrored8")
    examples = [
        (24, 24),
        (48, 24),
        (10, 4),
        (9, 4),
        (11, 4),
        (7, 5),
        (6, 1),
        (5, 2),
        (12, 6),
        (8, 3),
    ]
    for strategy, (count, batch) in itertools.product(strategies, examples):
        for drop in (False, True) if count % batch else (False,):
            yield dict(
                what="split", strategy=strategy, num_examples=count, batch_size=batch, drop=drop
            )
        yield dict(what="from_function", strategy=strategy, num_examples=count, batch_size=batch)
    for strategy in (*strategies, "central2"):
        yield dict(what="unbatched", strategy=strategy, num_examples=6)
        for kind in ("scalar", "nest", "equal"):
            yield dict(what="values", strategy=strategy, kind=kind)
        yield dict(what="context", strategy=strategy)
    for shape, bits in itertools.product(([10], [3, 4], [1], [2, 8, 2], [100]), (32, 16)):
        for kind, sizes in (
            ("FixedShards", [1]),
            ("FixedShards", [4]),
            ("FixedShards", [200]),
            ("MinSize", [4, 3]),
            ("MinSize", [16, 8]),
            ("MaxSize", [8, None]),
            ("MaxSize", [64, 3]),
            ("MaxSize", [1, None]),
        ):
            yield dict(what="partitions", kind=kind, sizes=sizes, shape=shape, bits=bits)


def records():
    for case in cases():
        ask = globals()[f"ask_{case['what']}"]
        arguments = {key: value for key, value in case.items() if key != "what"}
        name = "/".join(str(value).replace(" ", "") for value in case.values())
        yield name, case, side.outcome_of(lambda ask=ask, a=arguments: ask(**a))


def elements_of(strategy, dataset):
    """Returns for each step what each replica gets."""
    local = strategy.experimental_local_results
    return [[side.plain(part) for part in local(element)] for element in dataset]


def ask_split(strategy, num_examples, batch_size, drop):
    strategy = side.make_strategy(strategy)
    data = tf.data.Dataset.range(num_examples, output_type=tf.int32)
    data = data.batch(batch_size, drop_remainder=drop)
    return elements_of(strategy, strategy.experimental_distribute_dataset(data))


def ask_from_function(strategy, num_examples, batch_size):
    strategy = side.make_strategy(strategy)
    data = tf.data.Dataset.range(num_examples, output_type=tf.int32).batch(batch_size)
    return elements_of(strategy, strategy.distribute_datasets_from_function(lambda context: data))


def ask_unbatched(strategy, num_examples):
    strategy = side.make_strategy(strategy)
    data = tf.data.Dataset.range(num_examples, output_type=tf.int32)
    return elements_of(strategy, strategy.distribute_datasets_from_function(lambda context: data))


def ask_values(strategy, kind):
    strategy = side.make_strategy(strategy)

    def value(context):
        number = tf.constant(10.0 + context.replica_id_in_sync_group)
        return {
            "scalar": number,
            "nest": {"a": number, "b": [number * 2]},
            "equal": tf.constant(1.5),
        }[kind]

    made = strategy.experimental_distribute_values_from_function(value)
    return [side.plain(x) for x in strategy.experimental_local_results(made)]


def ask_context(strategy):
    """Returns what functions that make values and datasets are told."""
    strategy = side.make_strategy(strategy)
    values, inputs = [], []

    def value(context):
        values.append([context.replica_id_in_sync_group, context.num_replicas_in_sync])
        return tf.constant(0.0)

    def dataset(context):
        inputs.append(
            [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        )
        inputs.append(side.outcome_of(lambda: context.get_per_replica_batch_size(24)))
        inputs.append(side.outcome_of(lambda: context.get_per_replica_batch_size(25)))
        return tf.data.Dataset.range(24)

    strategy.experimental_distribute_values_from_function(value)
    strategy.distribute_datasets_from_function(dataset)
    return {"values": values, "inputs": inputs}


def ask_partitions(kind, sizes, shape, bits):
    partitioner = getattr(partitioners, f"{kind}Partitioner")(*sizes)
    dtype = {32: tf.float32, 16: tf.float16}[bits]
    return list(partitioner(tf.TensorShape(shape), dtype))
