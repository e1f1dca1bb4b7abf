"""Addresses of control planes."""

from __future__ import annotations

import ipaddress
import re

_DNS = re.compile(r"dns:(//[^/]*/)?/?[^/:]+:[0-9]{1,5}|dns:(//[^/]*/)?/?\[[0-9a-fA-F:]+\]:[0-9]{1,5}")
_BRACKETED = re.compile(r"\[[0-9a-fA-F:.]+(%[0-9A-Za-z_.-]+)?\]")
_TARGET_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:")


def checked_address(value: str) -> str:
    """Return "host:port", "ip:port,ip:port,...", or a gRPC target, as it was given.

    Raises ValueError with what is wrong.
    """
    if any(character.isspace() for character in value.strip()) and "," not in value:
        raise ValueError(f"{value!r} has spaces in it; put commas between addresses")
    if value.startswith("dns:") and not _DNS.fullmatch(value):
        raise ValueError(f"{value!r} is no gRPC target; write dns:///NAME:PORT")
    if value.startswith(_TARGET_SCHEMES):
        return value
    parts = value.split(",")
    for part in parts:
        if "://" in part:
            raise ValueError(f"{part!r} is a URL; give host:port")
        host, colon, port = part.strip().rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{part!r} is not host:port")
        if ":" in host and not _BRACKETED.fullmatch(host):
            raise ValueError(f"{part!r} needs brackets around an IPv6 address, as in [fd00::7]:50051")
        if len(parts) > 1 and not _is_ip(host):
            raise ValueError(
                f"{part!r}: a list takes IP addresses; for names, give one that resolves to all"
                " replicas, as dns:///NAME:PORT"
            )
    return value


def grpc_target(address: str) -> str:
    """Return the gRPC target of a checked address."""
    parts = [part.strip() for part in address.split(",")]
    if address.startswith(_TARGET_SCHEMES) or len(parts) == 1:
        return address
    if not any(part.startswith("[") for part in parts):
        return f"ipv4:{','.join(parts)}"
    # A target is of one family: in one of IPv6, IPv4 addresses are written as those that stand for them.
    return f"ipv6:{','.join(part if part.startswith('[') else _mapped(part) for part in parts)}"


def _mapped(part: str) -> str:
    host, _, port = part.rpartition(":")
    return f"[::ffff:{host}]:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
