"""Writes what of `controlplane.yaml` follows from our code: who may call what, and which errors to retry.

`python -m deploy.envoy.generate` does so in place, with `access.toml`; `--check` tells whether it is done.
With `--access FILE` the whole configuration is printed, made for the callers of that access file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvplane.controlplane.access import AccessFileError, AccessList, Identity, load_access
from kvplane.controlplane.errors import REASON_KEY, refusals
from kvplane.controlplane.roles import OPEN, TABLE, Role

FOLDER = Path(__file__).parent
TARGET = FOLDER / "controlplane.yaml"
ACCESS = FOLDER / "access.toml"
BEGINS, ENDS = "# made from ", "# end of "

ELSEWHERE = frozenset({"TOO_MANY_STREAMS"})
"""Reasons that hold for one replica, though their status is not UNAVAILABLE."""


def retried() -> list[str]:
    """Return the reasons after which another replica may answer: same call, elsewhere or a moment later."""
    known = refusals()
    unavailable = {reason for reason, (code, _) in known.items() if code is grpc.StatusCode.UNAVAILABLE}
    return sorted(unavailable | ELSEWHERE)


def policies(access: AccessList) -> dict[str, object]:
    """Return Envoy's RBAC policies: what each role may call, for those who have it; and what anybody may.

    Raises AccessFileError for a caller whom Envoy cannot know.
    """
    found: dict[str, object] = {}
    for role in Role:
        names = sorted(name for one in access.identities if one.role is role for name in _names(one))
        if names:
            found[role.value] = {
                "permissions": _paths(method for method, roles in TABLE.items() if role in roles),
                "principals": [{"authenticated": {"principal_name": {"exact": name}}} for name in names],
            }
    return {**found, "anybody": {"permissions": _paths(sorted(OPEN)), "principals": [{"any": True}]}}


def _names(identity: Identity) -> Iterator[str]:
    if not identity.certificates:
        raise AccessFileError(
            f"{identity.name} has tokens only, which Envoy does not know: give it certificates as well"
        )
    for name in identity.certificates:
        if "://" not in name:
            raise AccessFileError(
                f"{identity.name}: {name} is no URI: give it a certificate with one, such as"
                f" spiffe://DOMAIN/{identity.name}"
            )
        yield name


def _paths(methods: Iterator[str] | list[str]) -> list[object]:
    return [{"url_path": {"path": {"exact": method}}} for method in methods]


def _policy_lines(access: AccessList) -> Iterator[str]:
    for name, policy in policies(access).items():
        yield f"{name}:"
        assert isinstance(policy, dict)
        for key, entries in policy.items():
            yield f"  {key}:"
            yield from (f"    - {_flow(entry)}" for entry in entries)


def _retry_lines() -> Iterator[str]:
    for reason in retried():
        yield f"- {_flow({'name': REASON_KEY, 'string_match': {'exact': reason}})}"


def _flow(value: object) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def made(text: str, access: AccessList) -> str:
    """Return the configuration with its made lines made anew. Raises AccessFileError."""
    lines = {
        "the access file": list(_policy_lines(access)),
        "controlplane/errors.py": list(_retry_lines()),
    }
    result, left = list[str](), False
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith(ENDS):
            left = False
        if left:
            continue
        result.append(line)
        if bare.startswith(BEGINS):
            (key,) = (key for key in lines if bare.startswith(BEGINS + key))
            indent = line[: len(line) - len(line.lstrip())]
            result += [indent + one for one in lines[key]]
            left = True
    return "\n".join(result) + "\n"


def main() -> int:
    """Write, check or print; 1 where the check fails, 2 for an access file that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--access", type=Path, help="print a configuration for this access file")
    options = parser.parse_args()
    try:
        content = made(TARGET.read_text(), load_access(str(options.access or ACCESS)))
    except AccessFileError as error:
        print(error, file=sys.stderr)
        return 2
    if options.access:
        sys.stdout.write(content)
    elif not options.check:
        TARGET.write_text(content)
    elif content != TARGET.read_text():
        print(
            "deploy/envoy/controlplane.yaml is not what the code makes of it: make generate", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
