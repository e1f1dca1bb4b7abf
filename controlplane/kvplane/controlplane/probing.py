"""grpc.health.v1, for everyone: nothing that is asked makes it fail."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # it comes without types
    """As gRPC's own, which leaves `List` to fail with a traceback in the log."""

    async def List(self, request: Any, context: Any) -> None:  # noqa: N802
        """Say that it is not there."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask for one service by Check or Watch")
