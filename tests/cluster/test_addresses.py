"""Addresses: what they mean on this machine, and where collectives listen."""

import pytest

from distjax._src.cluster import roll_call
from tests.processes.sockets import outside_address


@pytest.mark.parametrize(
    "text, host, port",
    [("a.b:1", "a.b", 1), ("[::1]:65535", "::1", 65535), (" 10.0.0.1:80 ", "10.0.0.1", 80)],
)
def test_parts_of_an_address(text, host, port):
    assert roll_call.split_address(text, "x") == (host, port)
    assert roll_call.join_address(host, port) == text.strip()


def test_localhost_is_of_ipv4_where_it_can_be():
    assert roll_call.resolve_host("localhost", 1) == "127.0.0.1"


@pytest.mark.parametrize(
    "coordinator, bind, host",
    [
        ("127.0.0.1:1", None, "127.0.0.1"),
        ("localhost:1", "0.0.0.0:1", "127.0.0.1"),
        ("localhost:1", "[::]:1", "127.0.0.1"),
        ("localhost:1", "127.0.0.2:1", "127.0.0.2"),
    ],
)
def test_where_collectives_listen(coordinator, bind, host):
    assert roll_call.collectives_host(coordinator, bind) == host


def test_collectives_of_a_network_listen_on_the_interface_that_reaches_it():
    outside = outside_address()
    if outside is None:
        pytest.skip("this machine has no address but loopback")
    assert roll_call.collectives_host("198.51.100.1:1", None) == outside
