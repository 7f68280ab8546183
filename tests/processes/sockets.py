"""Which sockets of a process listen, and where; read from /proc."""

import ipaddress
import os
import re
import socket
import struct

LISTEN = "0A"


def addresses_that_listen(pid="self"):
    """Returns the IP addresses at which a process listens, of TCP over IPv4 and IPv6."""
    links = [os.path.join(f"/proc/{pid}/fd", fd) for fd in os.listdir(f"/proc/{pid}/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    inodes = {found[1] for t in targets if (found := re.fullmatch(r"socket:\[(\d+)\]", t))}
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    found.add(as_address(fields[1].partition(":")[0]))
    return found


def as_address(text):
    """Returns an address of /proc/net: words of 32 bits, each in the machine's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def outside_address():
    """Returns an address of this machine that is not loopback, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("198.51.100.1", 9))  # of a documentation network: nothing is sent
        except OSError:
            return None
        address = asked.getsockname()[0]
    return None if ipaddress.ip_address(address).is_loopback else address
