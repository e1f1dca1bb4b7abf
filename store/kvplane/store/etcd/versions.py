"""Versions of etcd that lose data."""

from __future__ import annotations

import re

_SOUND = {(3, 4): 22, (3, 5): 6}
"""First patch of each minor version that etcd's maintainers recommend for production.

3.5.0 to 3.5.2 save their consistent index apart from the data: a member that is killed under load comes back
without transactions it had confirmed (etcd-io/etcd issue 13766). 3.4.21 and 3.5.5 have another inconsistency.
"""


def caution(version: str) -> str | None:
    """Return what to say of a version as etcd reports it, None if nothing is known against it."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return None
    major, minor, patch = map(int, numbers.groups())
    first = _SOUND.get((major, minor))
    if first is None or patch >= first:
        return None
    sound = f"{major}.{minor}.{first}"
    return f"etcd {version} can lose confirmed data when a member is killed: use {sound} or later"
