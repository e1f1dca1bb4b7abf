"""What commands for people read over HTTP: JSON, and metrics in Prometheus' text format."""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplane.cli.errors import StartError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_MOST_BYTES = 4 << 20
_CONNECT_S = 3.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


RouterCa = Annotated[
    str,
    typer.Option(
        "--http-ca",
        envvar="KVPLANE_HTTP_CA",
        help="File with the authorities of https certificates of routers and engines; by default"
        " the system's.",
    ),
]
ApiKeyFile = Annotated[
    str,
    typer.Option("--api-key-file", help="File with an operator's API key, for routers that have tenants."),
]


@dataclass(frozen=True, slots=True)
class Reach:
    """How routers, and engines, are reached by HTTP."""

    context: ssl.SSLContext | None = None
    """None: the system's authorities."""
    key: str = ""
    """Shown to routers only."""

    @property
    def headers(self) -> dict[str, str]:
        """What is shown to a router."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        """Return a session; the caller closes it."""
        import aiohttp

        return aiohttp.ClientSession(
            # Without a limit: waiting for others to hang up would count as not answering.
            connector=aiohttp.TCPConnector(limit=0, ssl=True if self.context is None else self.context),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _CONNECT_S)),
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def reach(http_ca: str, api_key_file: str) -> Reach:
    """Return what the options name. Raises StartError."""
    context, key = None, ""
    if http_ca:
        try:
            context = ssl.create_default_context(cafile=http_ca)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"--http-ca {http_ca}: {_why(error)}") from None
    if api_key_file:
        key = _key_in(api_key_file)
    return Reach(context, key)


def _why(error: OSError) -> str:
    known = not isinstance(error, ssl.SSLError) and error.strerror
    return str(known).lower() if known else "no certificates in PEM"


def _key_in(file: str) -> str:
    from kvplane.router.reloading import FileProblemError, read_file

    try:
        key = read_file(file, "--api-key-file").decode("ascii").strip()
    except FileProblemError as error:
        raise StartError(str(error)) from None
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable():
        raise StartError(f"--api-key-file {file}: has to hold one key, printable ASCII in one line")
    return key


def untrusted(error: Exception) -> str:
    """Return what is wrong with a server's certificate, and what to do."""
    why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error
    return f"its certificate is not to be trusted ({why}): --http-ca FILE names its authority"


class Answer:
    """An HTTP answer. `trouble` says why there is none."""

    def __init__(
        self,
        trouble: str = "",
        status: int = 0,
        text: str = "",
        body: Any = None,
        date: str = "",
        *,
        untrusted: bool = False,
    ) -> None:
        self.trouble = trouble
        self.untrusted = untrusted
        """Something answers, whose certificate is not to be trusted."""
        self.status = status
        self.text = text
        self.body = body
        self.date = date


async def fetch_text(
    session: aiohttp.ClientSession, url: str | URL, headers: Mapping[str, str] | None = None
) -> Answer:
    """Get a URL; what goes wrong is in the answer."""
    import aiohttp

    from kvplane.router.resources import told

    try:
        async with session.get(url, allow_redirects=False, headers=headers) as response:
            raw = await response.content.read(_MOST_BYTES)
            while len(raw) < _MOST_BYTES and (more := await response.content.read(_MOST_BYTES - len(raw))):
                raw += more
            date = response.headers.get("Date", "")
            return Answer("", response.status, raw.decode("utf-8", "replace"), None, date)
    except TimeoutError:
        return Answer("it does not answer in time")
    except aiohttp.ClientConnectorCertificateError as error:
        return Answer(untrusted(error.certificate_error), untrusted=True)
    except aiohttp.ClientResponseError:
        return Answer("what answers there does not speak HTTP as it should; gRPC's port does not")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(" ".join(told(error).split())[:300] or type(error).__name__)


async def fetch_json(
    session: aiohttp.ClientSession, url: str | URL, headers: Mapping[str, str] | None = None
) -> Answer:
    """Get a URL with its body as JSON says it; None if it is none."""
    answer = await fetch_text(session, url, headers)
    try:
        answer.body = json.loads(answer.text) if answer.text else None
    except (ValueError, RecursionError):
        answer.body = None
    return answer


def samples(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Give the labels and the value of each sample of a metric; what is no number is left out."""
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        found = _SAMPLE.match(line)
        if found is None or found[1] != name:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield dict(_LABEL.findall(found[2] or "")), value


def total(text: str, name: str) -> float:
    """Return the sum of all samples of a metric."""
    return sum(value for _, value in samples(text, name))


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Return a metric's sums by one of its labels."""
    found = dict[str, float]()
    for labels, value in samples(text, name):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found


def first_labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of a metric's first sample."""
    return next((labels for labels, _ in samples(text, name)), {})
