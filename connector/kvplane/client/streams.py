"""Streaming calls of the client: read here, written here, and let go of when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvplane.client.errors import from_rpc_error


async def streamed(call: Any, requests: AsyncIterator[Any] | None = None) -> AsyncIterator[Any]:
    """Give what a call brings, and send it what `requests` give. Raises a ControlPlaneError.

    grpc.aio, if it is given the requests itself, goes on waiting for the next one after the call has ended,
    until the collector takes task and generator from under each other, with noise. So they are written here,
    and given up when the call ends or its reader leaves.
    """
    writer = None if requests is None else asyncio.create_task(_write(call, requests), name="stream-write")
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        fault = None if writer is None or not writer.done() or writer.cancelled() else writer.exception()
        if fault is None:
            raise
        raise fault from None  # which has cancelled the call
    finally:
        call.cancel()
        if writer is not None:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)


async def _write(call: Any, requests: AsyncIterator[Any]) -> None:
    """Write requests until there are no more; whoever reads the call learns why they are not taken."""
    try:
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except Exception:
        call.cancel()
        raise
    finally:
        close = getattr(requests, "aclose", None)
        if close is not None:
            await close()
