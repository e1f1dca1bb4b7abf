"""Envoy before real control planes, with certificates: one of each for all tests."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.rig.envoy import CONFIGURATIONS, Envoy
from deploy.rig.etcd import EtcdServer
from deploy.rig.plane import ControlPlane
from deploy.rig.process import LOCALHOST, free_ports
from kvplane.client.credentials import SecuritySettings
from tests.security.authority import Authority, Pair

CALLERS = ("router", "prefill", "decode", "dashboard", "ops", "stranger")


@dataclass
class Mesh:
    """Three control planes over etcd that let Envoy alone connect, and Envoy before them."""

    authority: Authority
    planes: list[ControlPlane]
    envoy: Envoy
    inner_ca: str

    def pair(self, name: str) -> Pair:
        folder = self.authority.folder
        return Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))

    def shown(self, name: str) -> SecuritySettings:
        own = self.pair(name)
        return SecuritySettings(
            ca=self.authority.ca, cert=own.cert, key=own.key, server_name="plane.internal"
        )

    def grpcurl(self, name: str) -> list[str]:
        """Return options of grpcurl for a caller."""
        own = self.pair(name)
        shown = ["-cacert", self.authority.ca, "-cert", own.cert, "-key", own.key]
        return [*shown, "-authority", "plane.internal"]


def secrets(authority: Authority, inner: Authority) -> Path:
    """Lay files out as Envoy's configuration has them, in a folder beside the certificates.

    `authority` has issued the callers' certificates and "plane", which Envoy shows them; `inner` the control
    planes' and "envoy", which it shows to those.
    """
    folder = authority.folder / "tls"
    folder.mkdir()
    for path in (CONFIGURATIONS / "tls").iterdir():
        (folder / path.name).write_text(path.read_text().replace("/etc/envoy/tls", str(folder)))
    for source, prefix, name in ((authority, "", "plane"), (inner, "upstream-", "envoy")):
        base = "upstream" if prefix else "tls"
        shutil.copy(source.folder / f"{name}.pem", folder / f"{base}.crt")
        shutil.copy(source.folder / f"{name}.key", folder / f"{base}.key")
        shutil.copy(source.ca, folder / f"{prefix}ca.crt")
    return folder


class Inner(Authority):
    """The authority between Envoy and control planes."""

    own: Pair
    """The control planes' certificate."""


def inner_authority(folder: Path) -> Inner:
    """Make one, with the certificates that are needed, in a folder of its own."""
    inside = folder / "inner"
    inside.mkdir()
    made = Inner(inside, "inner-ca")
    made.own = made.server("inside", "plane.internal")
    made.client("envoy", ["spiffe://kv.internal/envoy"])
    return made


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for something that others bring about; the question may block."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - other processes bring it about
            await asyncio.sleep(0.05)


@pytest.fixture(scope="package")
def mesh(tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    authority = Authority(folder)
    authority.server("plane", "plane.internal")
    inner = inner_authority(folder)
    for name in CALLERS:
        authority.client(name, [f"spiffe://kv.internal/{name}"])
    authority.client("expired", ["spiffe://kv.internal/ops"], expired=True)
    planes = list[ControlPlane]()
    with ExitStack() as stack:
        ports = free_ports(3)
        for number, port in enumerate(ports):
            plane = ControlPlane(
                port=port,
                log_file=folder / f"plane{number}.log",
                extra=[
                    *("--store", f"etcd://{etcd_server.endpoint}/mesh", "--log-format", "json"),
                    *("--grpc-tls-cert", inner.own.cert, "--grpc-tls-key", inner.own.key),
                    *("--grpc-client-ca", inner.ca, "--drain-timeout", "1"),
                ],
            )
            stack.enter_context(plane)
            planes.append(plane)
        tls = secrets(authority, inner)
        envoy = Envoy(
            "controlplane",
            folder,
            endpoints={"controlplane": [(LOCALHOST, port) for port in ports]},
            replaced={"/etc/envoy/tls": str(tls)},
        )
        stack.enter_context(envoy)
        envoy.wait_ready(60.0)
        made = Mesh(authority, planes, envoy, inner.ca)
        ends = time.monotonic() + 60.0
        while envoy.healthy("controlplane") < len(planes):
            assert time.monotonic() < ends, "\n".join(one.log_tail(5) for one in (envoy, *planes))
            time.sleep(0.1)
        yield made
