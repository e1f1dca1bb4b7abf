"""A few real requests through an installed kvplane: control plane, router, and two fake engines."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.release.environments import ROOT, ReleaseError, clean_environment, run
from deploy.rig.plane import is_serving
from deploy.rig.process import LOCALHOST, RigProcess, free_ports

MODEL = "fake"


class Program(RigProcess):
    """A program of an installed kvplane, or a fake engine that uses its client."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        ready_url: str,
        folder: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            name,
            [str(word) for word in command],
            environment=clean_environment() | dict(variables or {}),
            log_file=folder / f"{name.replace(' ', '-')}.log",
            ready_url=ready_url,
        )


class Serving(Program):
    """An installed `kvplane serve`; ready when its health service says so."""

    def __init__(self, programs: Path, folder: Path, name: str, port: int, *more: str) -> None:
        self.address = f"{LOCALHOST}:{port}"
        command = [str(programs / "kvplane"), "serve", "--grpc-port", str(port), *more]
        super().__init__(name, command, ready_url="", folder=folder)

    def is_ready(self) -> bool:
        """See RigProcess."""
        return is_serving(self.address)


def router(programs: Path, folder: Path, name: str, port: int, plane: str, *more: str) -> Program:
    """Return `kvplane route`; ready when all its engines answer."""
    command = [str(programs / "kvplane"), "route", "--port", str(port), "--plane", plane, *more]
    return Program(name, command, ready_url=f"http://{LOCALHOST}:{port}/ready", folder=folder)


def fake_engine(
    programs: Path, folder: Path, role: str, port: int, plane: str, *more: str, tree: Path = ROOT
) -> Program:
    """Return a fake engine of a source tree that runs on the installed client."""
    script = tree / "tests" / "fakes" / "engine.py"
    command = [
        str(programs / "python"),
        str(script),
        "--role",
        role,
        "--port",
        str(port),
        "--plane",
        plane,
        *more,
    ]
    url = f"http://{LOCALHOST}:{port}/health"
    return Program(f"{role} {port}", command, ready_url=url, folder=folder)


def chat(port: int, messages: Sequence[Mapping[str, str]], conversation: str) -> tuple[str, str]:
    """Send a chat request; return the reply and the path it went. Raises ReleaseError."""
    body = {"model": MODEL, "messages": messages, "conversation_id": conversation, "max_tokens": 8}
    request = urllib.request.Request(
        f"http://{LOCALHOST}:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
            return text, answer.headers["x-kvplane-path"]
    except (OSError, KeyError, ValueError) as error:
        raise ReleaseError(f"a request failed: {error}") from error


def end(port: int, conversation: str) -> None:
    """End a conversation: what engines keep of it is freed. Raises ReleaseError."""
    url = f"http://{LOCALHOST}:{port}/v1/conversations/{conversation}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=30):
            pass
    except OSError as error:
        raise ReleaseError(f"a conversation could not be ended: {error}") from error


def smoke(programs: Path, folder: Path, version: str) -> str:
    """Try an installed kvplane[router]: its command, and two turns of a conversation.

    Returns what came of it. Raises ReleaseError, and RigError when a program does not start.
    """
    said = run([programs / "kvplane", "--version"]).strip()
    if said != f"kvplane {version}":
        raise ReleaseError(f"kvplane --version says {said!r}, not {version}")
    for command in ((), ("serve",), ("route",), ("up",), ("store", "check"), ("doctor",)):
        if "Usage: kvplane" not in run([programs / "kvplane", *command, "--help"]):
            raise ReleaseError(f"kvplane {' '.join(command)} --help shows no usage")
    grpc, http, prefill, decode = free_ports(4)
    plane = f"{LOCALHOST}:{grpc}"
    urls = {"--prefill": prefill, "--decode": decode}
    engines = [word for flag, port in urls.items() for word in (flag, f"http://{LOCALHOST}:{port}")]
    with Serving(programs, folder, "control plane", grpc) as first:
        first.wait_ready(60)
        with (
            fake_engine(programs, folder, "prefill", prefill, plane) as p,
            fake_engine(programs, folder, "decode", decode, plane) as d,
            router(programs, folder, "router", http, plane, *engines) as front,
        ):
            for program in (p, d, front):
                program.wait_ready(60)
            history = [{"role": "user", "content": "one two three " * 40}]
            reply, cold = chat(http, history, "smoke")
            history += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then?"}]
            _, reused = chat(http, history, "smoke")
    if cold != "cold" or reused not in ("direct", "pull"):
        raise ReleaseError(f"two turns went {cold}, {reused}; expected: cold, then direct or pull")
    return f"two turns: {cold}, {reused}"


_CONNECTOR = """
import importlib, importlib.util, pkgutil, sys
import kvplane.client.client, kvplane.client.sync, kvplane.connector.config as config
for extra in ("typer", "aiohttp", "pydantic_settings", "prometheus_client", "grpc_health", "uvloop"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is installed"
config.read_config({"kvplane_address": "127.0.0.1:50051"}, {})
import kvplane.connector
alone, vllm = 0, 0
for found in pkgutil.walk_packages(kvplane.connector.__path__, "kvplane.connector."):
    try:
        importlib.import_module(found.name)
        alone += 1
    except ImportError as error:
        missing = (error.__cause__ or error).name.split(".")[0]
        assert missing in ("vllm", "torch", "prometheus_client"), (found.name, error)
        vllm += 1
assert alone > vllm > 0, (alone, vllm)
print(f"{alone} modules of the connector imported, {vllm} wait for vLLM")
"""


def without_extras(programs: Path) -> str:
    """Try a plain install, as engines have it: client and connector, and a command that says what is missing.

    Raises ReleaseError.
    """
    said = run([programs / "python", "-I", "-c", _CONNECTOR]).strip()
    try:
        run([programs / "kvplane", "serve"])
    except ReleaseError as error:
        if "exit code 2" in str(error) and "[router]" in str(error):
            return said
        raise
    raise ReleaseError("kvplane serve ran without the extras it needs")
