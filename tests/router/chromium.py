"""A real Chromium, headless, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

_SAID = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
START_S = 30.0
WAIT_S = 20.0


def find() -> str | None:
    """Return the program, None if there is none."""
    named = os.environ.get("KVPLANE_CHROMIUM")
    candidates = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return named or next((found for found in candidates if found is not None), None)


class Page:
    """A tab. `said` has what its console said and what went wrong in it, `asked` each URL it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers = dict[int, asyncio.Future[Any]]()
        self.said = list[str]()
        self.asked = list[str]()

    async def read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (waiting := self._answers.pop(event.get("id", 0), None)) is not None:
                waiting.set_result(event)
            elif event.get("method") in (
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
            ):
                self.said.append(json.dumps(event["params"]))
            elif event.get("method") == "Network.requestWillBeSent":
                self.asked.append(event["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            event = await answer
        assert "error" not in event, event
        return event["result"]

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression gives something true, and return it."""
        async with asyncio.timeout(WAIT_S):
            while not (value := await self.value(expression)):  # noqa: ASYNC110  # the page tells nobody
                await asyncio.sleep(0.05)
        return value

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **text,
            )

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, *, dark: bool = False, width: int = 1280) -> bytes:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def page(program: str, profile: Path) -> AsyncIterator[Page]:
    """Run a Chromium with one tab; `profile` is a folder that it makes and writes to."""
    process = await asyncio.create_subprocess_exec(
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                tab = next(tab for tab in await response.json() if tab["type"] == "page")
            async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Page(socket)
                reading = asyncio.create_task(opened.read())
                try:
                    yield opened
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, f"Chromium ended with {process.returncode}"
            with suppress(OSError, IndexError, ValueError):
                return int((await asyncio.to_thread(file.read_text)).splitlines()[0])
            await asyncio.sleep(0.05)
