"""How commands for people reach their control plane: the one place that opens connections for them.

A command takes `target: Target` and is decorated with `asks_plane`, which gives it the options instead.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvplane.cli.errors import StartError

if TYPE_CHECKING:
    from kvplane.client.client import ControlPlaneClient
    from kvplane.client.credentials import Credentials
    from kvplane.client.errors import ControlPlaneError

T = TypeVar("T")

DEFAULT_PLANE = "127.0.0.1:50051"
_SHOWN = 300
_STATUS_S = 3.0
"""A control plane tells how it does within two seconds, whatever its store does."""
_DNS = re.compile(r"dns:(?:///)?([^/:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Target:
    """A control plane, or several replicas of one."""

    address: str
    """As --plane takes it."""
    timeout_s: float
    credentials: Credentials | None = None
    """What it is shown, and whom to trust; None: plaintext."""

    def client(self, address: str = "") -> ControlPlaneClient:
        """Return a client of it, or of one of its replicas; the caller closes it."""
        from kvplane.client.client import ControlPlaneClient

        return ControlPlaneClient(
            address or self.address, timeout_s=self.timeout_s, credentials=self.credentials
        )

    async def replicas(self) -> list[str]:
        """Return the addresses of the replicas, one by one: those given, or all that a DNS name stands for.

        By TLS the name is in the certificates, and what answers under it is asked as one.
        """
        name = _DNS.fullmatch(self.address)
        if name is None or (self.credentials is not None and self.credentials.tls):
            return [part.strip() for part in self.address.split(",")]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                name[1], int(name[2]), type=socket.SOCK_STREAM
            )
        except OSError:
            return [self.address]  # gRPC says what is wrong with it
        hosts = dict.fromkeys(str(address[0]) for *_, address in found)
        return [f"[{host}]:{name[2]}" if ":" in host else f"{host}:{name[2]}" for host in hosts]


def _file(option: str, what: str) -> Any:
    return typer.Option(
        f"--{option}", envvar=f"KVPLANE_{option.upper().replace('-', '_')}", help=f"File with {what}."
    )


def _target(
    plane: Annotated[
        str,
        typer.Option(
            "--plane",
            envvar="KVPLANE_PLANE",
            help="Control plane: HOST:PORT, IP:PORT,IP:PORT,... or dns:///NAME:PORT.",
        ),
    ] = DEFAULT_PLANE,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1, max=600.0)] = 5.0,
    plane_ca: Annotated[str, _file("plane-ca", "authorities of its certificate")] = "",
    plane_cert: Annotated[str, _file("plane-cert", "the certificate to show it")] = "",
    plane_key: Annotated[str, _file("plane-key", "that certificate's private key")] = "",
    plane_token_file: Annotated[str, _file("plane-token-file", "the token to show it")] = "",
    plane_server_name: Annotated[
        str,
        typer.Option(envvar="KVPLANE_PLANE_SERVER_NAME", help="Name in its certificate, if not in --plane."),
    ] = "",
    plane_tls: Annotated[
        bool,
        typer.Option(
            "--plane-tls", envvar="KVPLANE_PLANE_TLS", help="Use TLS, with the system's authorities."
        ),
    ] = False,
) -> Target:
    """Return what the options name. Raises StartError."""
    from kvplane.client.address import checked_address

    try:
        checked_address(plane)
    except ValueError as error:
        raise StartError(f"--plane: {error}") from None
    credentials = None
    if plane_tls or plane_ca or plane_cert or plane_key or plane_server_name or plane_token_file:
        credentials = _credentials(
            plane, (plane_tls, plane_ca, plane_cert, plane_key, plane_server_name, plane_token_file)
        )
    return Target(plane, timeout, credentials)


def _credentials(plane: str, settings: tuple[bool, str, str, str, str, str]) -> Credentials:
    """Return what options say. Raises StartError."""
    from kvplane.client.credentials import Credentials, SecuritySettings, check_reach, setting_of
    from kvplane.client.files import FileError

    try:
        security = SecuritySettings(*settings)
        check_reach(plane, security)
    except ValueError as error:
        name, _, what = str(error).partition(":")
        raise StartError(f"--plane-{name.replace('_', '-')}:{what.replace('_', '-')}") from None
    try:
        return Credentials(security)
    except FileError as error:
        option = setting_of(security, error).replace("_", "-")
        raise StartError(f"--plane-{option} {error}") from None


def asks_plane(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the options by which it finds its control plane, in place of its parameter `target`."""
    shared = list(inspect.signature(_target, eval_str=True).parameters.values())
    names = {parameter.name for parameter in shared}
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "target"]

    @functools.wraps(command)
    def with_options(**given: Any) -> T:
        target = _target(**{name: given.pop(name) for name in names})
        return command(target=target, **given)

    parameters = [*own, *shared]
    shape: Any = with_options
    shape.__signature__ = signature.replace(
        parameters=[parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    shape.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del shape.__wrapped__
    return with_options


def ask(target: Target, work: Callable[[ControlPlaneClient], Awaitable[T]]) -> T:
    """Do something with a control plane. What goes wrong with it is one line: StartError."""

    async def asking() -> T:
        async with target.client() as client:
            return await work(client)

    return run(target, asking)


def run(target: Target, work: Callable[[], Awaitable[T]]) -> T:
    """Do something that may call the control plane of a target. Raises StartError."""
    from kvplane.client.errors import ControlPlaneError

    async def running() -> T:
        try:
            return await work()
        except ControlPlaneError as error:
            raise StartError(await explained(target, error)) from None

    return asyncio.run(running())


async def explained(target: Target, error: ControlPlaneError) -> str:
    """Return in one line what went wrong with a call, and what to do.

    Where nothing came in time, the control plane is asked how it does: it may wait for its store.
    """
    import grpc

    from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError

    cause = error.__cause__
    code = cause.code() if isinstance(cause, grpc.RpcError) and hasattr(cause, "code") else None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.reason:
        try:
            async with replace(target, timeout_s=max(target.timeout_s, _STATUS_S)).client() as client:
                status = await client.get_status()
        except ControlPlaneError:
            return problem(target, error)
        why = f"its store: {status.store.trouble}" if status.store.trouble else f"{error}"
        error = ControlPlaneUnavailableError(why, reason="STORE_UNAVAILABLE")
    return problem(target, error)


def problem(target: Target, error: ControlPlaneError) -> str:
    """Return in one line what went wrong with a call, and what to do."""
    import grpc

    from kvplane.client.errors import ControlPlaneUnavailableError

    said = " ".join(str(error).split())[:_SHOWN]
    where = f"--plane {target.address}"
    cause = error.__cause__
    code = cause.code() if isinstance(cause, grpc.RpcError) and hasattr(cause, "code") else None
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{where}: what answers there is no control plane, or one older than this command: upgrade it"
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return (
            f"{where}: refused: {said}; show it a certificate (--plane-cert, --plane-key) or a token"
            " (--plane-token-file) of a role that may: viewer to look, admin to change"
        )
    if not isinstance(error, ControlPlaneUnavailableError):
        return f"{where}: {said}"
    if error.reason:
        return f"{where}: the control plane answers, but cannot say: {said}; kvplane doctor tells more"
    return (
        f"{where}: no control plane answers there ({said}): start one with kvplane serve, or name another"
        f" with --plane HOST:PORT or KVPLANE_PLANE; {_by_tls(target)}"
    )


def _by_tls(target: Target) -> str:
    """Return what may be amiss where something listens, and does not take the connection."""
    if target.credentials is None or not target.credentials.tls:
        return "if it has TLS, give --plane-ca, and --plane-cert with --plane-key where it wants them"
    return (
        "if it is there, its certificate has to be of --plane-ca and have the name in --plane"
        " (or --plane-server-name), and with --grpc-client-ca it wants --plane-cert and --plane-key"
    )
