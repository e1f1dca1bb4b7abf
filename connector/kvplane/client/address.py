"""Addresses of control planes."""

from __future__ import annotations

_TARGET_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:")


def checked_address(value: str) -> str:
    """Return "host:port", several of them with commas between, or a gRPC target, as it was given.

    Raises ValueError with what is wrong.
    """
    if value.startswith(_TARGET_SCHEMES):
        return value
    for part in value.split(","):
        if "://" in part:
            raise ValueError(f"{part!r} is a URL; give host:port")
        host, colon, port = part.strip().rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{part!r} is not host:port")
    return value
