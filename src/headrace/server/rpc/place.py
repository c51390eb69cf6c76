"""The address of a gRPC server before it is there: taken, and shared by several processes."""

from __future__ import annotations

import socket

from headrace.server.run import bind

__all__ = ["reserve"]


def reserve(host: str, port: int) -> socket.socket:
    """A socket that has the address and takes no connections: gRPC binds by itself, beside it.

    Raises:
        OSError: the address can't be had; one line with the remedy.
    """
    with bind(host, port) as probe:  # alone: with SO_REUSEPORT another server of the same user would be no obstacle
        address = probe.getsockname()
        family = probe.family
    place = socket.socket(family, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    place.bind(address)
    return place
