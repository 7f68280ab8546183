"""Ways into each context, alike in tf.distribute and distjax.

`enter(name, strategy, variable, act, get_context)` acts there; `get_context` is the library's
`get_replica_context`.
"""

import threading


def none(strategy, v, act, get_context):
    act()


def scope(strategy, v, act, get_context):
    with strategy.scope():
        act()


def scope_twice(strategy, v, act, get_context):
    with strategy.scope(), strategy.scope():
        act()


def replica(strategy, v, act, get_context):
    strategy.run(act)


def merge(strategy, v, act, get_context):
    strategy.run(lambda: get_context().merge_call(lambda strategy: act()))


def run_in_merge(strategy, v, act, get_context):
    merge = lambda strategy: strategy.run(act)
    strategy.run(lambda: get_context().merge_call(merge))


def update(strategy, v, act, get_context):
    strategy.extended.update(v, lambda v: act(), group=False)


def update_non_slot(strategy, v, act, get_context):
    devices = strategy.extended.non_slot_devices([v])
    strategy.extended.update_non_slot(devices, act, group=False)


def thread_in_scope(strategy, v, act, get_context):
    with strategy.scope():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()


def after_run(strategy, v, act, get_context):
    strategy.run(lambda: 1.0)
    act()


def after_error(strategy, v, act, get_context):
    def fails():
        raise KeyError("replica")

    try:
        strategy.run(fails)
    except KeyError:
        act()


WAYS = (none, scope, scope_twice, replica, merge, run_in_merge, update, update_non_slot)
WAYS += (thread_in_scope, after_run, after_error)
CONTEXTS = {way.__name__: way for way in WAYS}


def enter(name, strategy, v, act, get_context):
    CONTEXTS[name](strategy, v, act, get_context)
