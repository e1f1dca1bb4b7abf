"""Envoy's configurations are what the code makes of them, and retry what the code says may be retried."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy.envoy import generate
from deploy.rig.envoy import Envoy, envoy_command, placed
from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports
from kvplane.controlplane.access import AccessFileError, load_access
from kvplane.controlplane.errors import (
    ContentionError,
    QuotaExceededError,
    ShuttingDownError,
    TooManyStreamsError,
)
from kvplane.controlplane.guard import guarded
from kvplane.controlplane.roles import TABLE, Role
from kvplane.v1 import status_pb2, status_pb2_grpc
from tests.mesh.conftest import Inner, inner_authority, secrets, until
from tests.security.authority import Authority


def _rules() -> dict[str, Any]:
    (listener,) = yaml.safe_load(generate.TARGET.read_text())["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (rules,) = (one for one in manager["http_filters"] if one["name"] == "envoy.filters.http.rbac")
    found: dict[str, Any] = rules["typed_config"]["rules"]
    return found


def test_the_committed_configuration_is_what_is_made() -> None:
    assert generate.made(generate.TARGET.read_text(), load_access(str(generate.ACCESS))) == (
        generate.TARGET.read_text()
    )


def test_its_rules_are_the_table_of_roles() -> None:
    rules = _rules()
    assert rules["action"] == "ALLOW"
    assert set(rules["policies"]) == {*Role, "anybody"}
    for role in Role:
        policy = rules["policies"][role]
        paths = {permission["url_path"]["path"]["exact"] for permission in policy["permissions"]}
        assert paths == {method for method, roles in TABLE.items() if role in roles}


def test_a_configuration_for_ones_own_callers(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text('[[identity]]\nname = "r"\nrole = "router"\ncertificates = ["spiffe://a.b/r"]\n')
    command = [sys.executable, "-m", "deploy.envoy.generate", "--access", str(access)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "spiffe://a.b/r" in done.stdout
    assert "kv.internal/" not in done.stdout
    yaml.safe_load(done.stdout)
    access.write_text('[[identity]]\nname = "r"\nrole = "router"\ncertificates = ["r.a.b"]\n')
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "r: r.a.b is no URI: give it a certificate with one, such as spiffe://DOMAIN/r\n"


def test_who_has_only_a_token_is_refused(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(f'[[identity]]\nname = "r"\nrole = "router"\ntoken_sha256 = ["{"0" * 64}"]\n')
    with pytest.raises(AccessFileError, match="r has tokens only"):
        generate.policies(load_access(str(access)))


def test_https_for_clients_as_the_page_has_it(tmp_path: Path) -> None:
    """Envoy itself takes the routers' configuration with the page's lines in it; it follows the file."""
    page = (generate.FOLDER.parent / "MESH.md").read_text()
    (snippet,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    authority = Authority(tmp_path)
    tls = tmp_path / "tls"
    tls.mkdir()
    own = generate.FOLDER / "tls" / "certificate.yaml"
    (tls / own.name).write_text(own.read_text().replace("/etc/envoy/tls", str(tls)))
    _give(authority, tls)
    port, admin = free_ports(2)
    configuration = placed(
        yaml.safe_load((generate.FOLDER / "router.yaml").read_text()),
        admin=(LOCALHOST, admin),
        listeners={"clients": (LOCALHOST, port)},
        endpoints={"routers": []},
    )
    (listener,) = configuration["static_resources"]["listeners"]
    listener["filter_chains"][0] |= yaml.safe_load(snippet.replace("/etc/envoy/tls", str(tls)))
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(configuration))
    with RigProcess(
        "Envoy",
        envoy_command(path),
        environment=dict(os.environ),
        log_file=tmp_path / "envoy.log",
        ready_url=f"http://{LOCALHOST}:{admin}/ready",
    ) as envoy:
        envoy.wait_ready(20.0)
        first = _shown(authority, port)
        _give(authority, tls)
        asyncio.run(until(lambda: _shown(authority, port) != first, 10.0))


def _give(authority: Authority, folder: Path) -> None:
    """Put a new certificate into a folder as cert-manager names its files, by renaming."""
    pair = authority.server()
    for source, name in ((pair.key, "tls.key"), (pair.cert, "tls.crt")):
        Path(source).rename(folder / name)


def _shown(authority: Authority, port: int) -> bytes:
    context = ssl.create_default_context(cafile=authority.ca)
    with (
        socket.create_connection((LOCALHOST, port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def test_what_is_not_placed_is_named() -> None:
    configuration = yaml.safe_load(generate.TARGET.read_text())
    with pytest.raises(RigError, match="clusters"):
        placed(configuration, admin=("h", 1), listeners={"callers": ("h", 2)}, endpoints={"other": []})


class Replica(status_pb2_grpc.StatusServiceServicer):
    """Answers, or refuses."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.calls = 0

    async def GetStatus(  # noqa: N802
        self, request: status_pb2.GetStatusRequest, context: object
    ) -> status_pb2.GetStatusResponse:
        self.calls += 1
        if self.refusal is not None:
            raise self.refusal
        return status_pb2.GetStatusResponse()


async def _serve(replica: Replica, authority: Inner) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    servicer: Any = guarded(replica, "kvplane.v1.StatusService")
    status_pb2_grpc.add_StatusServiceServicer_to_server(servicer, server)
    healthy = health.aio.HealthServicer()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)

    def read() -> grpc.ServerCredentials:
        pair = (Path(authority.own.key).read_bytes(), Path(authority.own.cert).read_bytes())
        return grpc.ssl_server_credentials([pair], Path(authority.ca).read_bytes(), require_client_auth=True)

    port = server.add_secure_port(f"{LOCALHOST}:0", await asyncio.to_thread(read))
    await server.start()
    return server, port


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("retries"))
    made.server("plane", "plane.internal")
    made.client("ops", ["spiffe://kv.internal/ops"])
    return made


async def test_envoy_tries_another_replica_after_our_reasons_and_no_others(authority: Authority) -> None:
    good, bad = Replica(), Replica()
    inner = await asyncio.to_thread(inner_authority, authority.folder)
    servers = [await _serve(replica, inner) for replica in (good, bad)]
    tls = await asyncio.to_thread(secrets, authority, inner)
    envoy = await asyncio.to_thread(
        Envoy,
        "controlplane",
        authority.folder,
        endpoints={"controlplane": [(LOCALHOST, port) for _, port in servers]},
        replaced={"/etc/envoy/tls": str(tls)},
    )
    try:
        await asyncio.to_thread(envoy.start)
        await asyncio.to_thread(envoy.wait_ready, 20.0)
        await until(lambda: envoy.healthy("controlplane") == 2)
        own = await asyncio.to_thread(_own, authority)
        options = [("grpc.ssl_target_name_override", "plane.internal")]
        async with grpc.aio.secure_channel(envoy.address, own, options=options) as channel:
            stub: Any = status_pb2_grpc.StatusServiceStub(channel)

            async def codes(refusal: Exception) -> set[grpc.StatusCode]:
                bad.refusal, bad.calls = refusal, 0
                results = [await _code(stub) for _ in range(12)]
                assert bad.calls, "chance never took it in twelve calls"
                return set(results)

            ok = {grpc.StatusCode.OK}
            assert await codes(TooManyStreamsError("streams", 1)) == ok
            assert grpc.StatusCode.ABORTED in await codes(ContentionError())
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in await codes(QuotaExceededError(1.0))
            # This counts against the replica, which is left alone after five in a row.
            assert await codes(ShuttingDownError()) == ok
            while await asyncio.to_thread(envoy.healthy, "controlplane") == 2:
                assert await _code(stub) is grpc.StatusCode.OK
            calls = list[int]()
            for _ in range(3):  # Envoy's worker may not have heard of it at once.
                before = bad.calls
                assert {await _code(stub) for _ in range(12)} == ok
                calls.append(bad.calls - before)
            assert calls[-1] == 0, calls
    finally:
        await asyncio.to_thread(envoy.stop)
        for server, _ in servers:
            await server.stop(0)


def _own(authority: Authority) -> grpc.ChannelCredentials:
    folder = authority.folder
    pem = ((folder / "ops.key").read_bytes(), (folder / "ops.pem").read_bytes())
    return grpc.ssl_channel_credentials(Path(authority.ca).read_bytes(), *pem)


async def _code(stub: Any) -> grpc.StatusCode:
    try:
        await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=10.0)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_all_reasons_of_unavailable_are_retried_and_few_others() -> None:
    assert generate.retried() == ["SHUTTING_DOWN", "STORE_UNAVAILABLE", "TOO_MANY_STREAMS"]
