"""Ways into each context of tf.distribute: `enter(name, strategy, variable, act)` acts there."""

import threading

import tensorflow as tf


def none(strategy, v, act):
    act()


def scope(strategy, v, act):
    with strategy.scope():
        act()


def scope_twice(strategy, v, act):
    with strategy.scope(), strategy.scope():
        act()


def replica(strategy, v, act):
    strategy.run(act)


def merge(strategy, v, act):
    strategy.run(lambda: tf.distribute.get_replica_context().merge_call(lambda strategy: act()))


def run_in_merge(strategy, v, act):
    merge = lambda strategy: strategy.run(act)
    strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge))


def update(strategy, v, act):
    strategy.extended.update(v, lambda v: act(), group=False)


def update_non_slot(strategy, v, act):
    devices = strategy.extended.non_slot_devices([v])
    strategy.extended.update_non_slot(devices, act, group=False)


def thread_in_scope(strategy, v, act):
    with strategy.scope():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()


def after_run(strategy, v, act):
    strategy.run(lambda: 1.0)
    act()


def after_error(strategy, v, act):
    def fails():
        raise KeyError("replica")

    try:
        strategy.run(fails)
    except KeyError:
        act()


WAYS = (none, scope, scope_twice, replica, merge, run_in_merge, update, update_non_slot)
WAYS += (thread_in_scope, after_run, after_error)
CONTEXTS = {way.__name__: way for way in WAYS}


def enter(name, strategy, v, act):
    CONTEXTS[name](strategy, v, act)
