"""Cross-replica code reads and writes variables at servers while closures push."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj


def push_before(server, method, push):
    """Has `push` called before each read or write of cross-replica code at a server."""
    operate = getattr(server, method)

    def pushed_before(*args):
        if method != "read" or len(args) == 1:  # a worker's read has more
            push()
        return operate(*args)

    setattr(server, method, pushed_before)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("method", ["read", "write"])
def test_shards_at_a_server_are_read_and_written_together(method, servers):
    strategy = dj.ParameterServerStrategy(2, servers, partitioner=dj.parts.FixedShards(8))
    with strategy.scope():
        v = dj.Variable(jnp.zeros((8, 3)), name="v")
    add = lambda: v.assign_add(jnp.ones((8, 3)))
    strategy.run(add)
    for server in strategy.extended.servers:
        push_before(server, method, lambda: strategy.run(add))
    value = v.value if method == "read" else v.assign(np.zeros((8, 3)))
    for i in range(servers):  # shards are at the servers in turn
        assert len(set(np.ravel(value[i::servers]).tolist())) == 1
