"""One of several router processes, started by `workers.py` with its end of a socket as the only argument.

It reads one line of JSON there (what to run), answers `ready`, or why not, sends an empty line every few
seconds as a sign of life, and drains when the other end is gone: a parent that was killed leaves nobody
behind.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import structlog

from kvplane.cli import run
from kvplane.cli.config import Config
from kvplane.cli.logs import configure_logs
from kvplane.cli.workers import BEAT_S
from kvplane.router.siblings import Siblings


async def beat(writer: asyncio.StreamWriter) -> None:
    """Say again and again that this worker's event loop goes round."""
    while True:
        await asyncio.sleep(BEAT_S)
        writer.write(b"\n")


def main() -> int:
    """Run a worker; returns the status to exit with."""
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        with parent.makefile("rb") as lines:
            task = json.loads(lines.readline() or b"null")
        if task is None:
            return 2
        config = Config(**task["config"])
        configure_logs(config.log_level, config.log_format)
        structlog.contextvars.bind_contextvars(worker=task["number"])
        siblings = Siblings(Path(task["directory"]), task["number"], task["processes"])
        siblings.share_metrics()

        async def program(config: Config, stop: asyncio.Event) -> None:
            async with run.router(config, config.plane, siblings):
                reader, writer = await asyncio.open_unix_connection(sock=parent)
                writer.write(b"ready\n")
                beats = asyncio.create_task(beat(writer))
                waits = [asyncio.create_task(stop.wait()), asyncio.create_task(reader.read())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in (*waits, beats):
                    task.cancel()
                await asyncio.gather(*waits, beats, return_exceptions=True)
                writer.close()

        try:
            run.until_signalled(program, config)
        except run.StartError as error:
            parent.sendall(f"{error}\n".encode())
            return 1 if isinstance(error, run.NotNowError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
