"""Addresses of a job's processes: how they resolve, and what listens where."""

from __future__ import annotations

import socket

from distjax.errors import ClusterError, message

#: Hosts that mean all interfaces of a machine.
_EVERYWHERE = ("0.0.0.0", "::", "")


def split_address(address: object, name: str) -> tuple[str, int]:
    """Returns (host, port) of "host:port" or "[::1]:port", or raises ClusterError."""
    if isinstance(address, str):
        host, colon, port = address.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdecimal() and len(port) < 6
        if colon and is_number and 0 < int(port) < 65536 and _is_host(host):
            return host, int(port)
    raise ClusterError(
        message(
            f"{name} of initialize needs to be an address 'host:port'",
            got=repr(address),
            why="process 0 listens there, and the others connect to it",
            fix="dj.initialize('10.0.0.1:1234', ...), with a port that is free",
        )
    )


def _is_host(host: str) -> bool:
    """Returns whether `host` can be looked up: Python raises no OSError if it cannot."""
    try:
        host.encode("idna")
    except UnicodeError:  # an empty label, or a long one
        return False
    return not host.count("]") and "\0" not in host


def join_address(host: str, port: int) -> str:
    """Returns "host:port", with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_host(host: str, port: int) -> str:
    """Returns the IP address of `host`, preferring IPv4.

    Raises:
      OSError: the name has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])


def local_address_towards(host: str, port: int) -> str:
    """Returns the IP address of the local interface that reaches `host`.

    Connecting a UDP socket sends nothing; it only consults the routing table.
    """
    address = resolve_host(host, port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, port))
        return str(asked.getsockname()[0])


def collectives_host(coordinator_address: str, bind_address: str | None) -> str:
    """Returns the IP address at which this process's collectives listen.

    It is that of the interface that reaches the coordinator, so loopback for a coordinator on
    loopback. A coordinator bound to a specific address uses that one.
    """
    if bind_address is not None:
        host, port = split_address(bind_address, "coordinator_bind_address")
        if host not in _EVERYWHERE:
            return resolve_host(host, port)
    return local_address_towards(*split_address(coordinator_address, "coordinator_address"))
