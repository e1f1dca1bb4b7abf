"""What differs between the vLLM versions kvplane supports (0.21 to 0.32). Nothing else branches on it."""

from __future__ import annotations

import logging
import time
from typing import Any

try:
    from vllm import __version__ as vllm_version
except ImportError as error:
    raise ImportError("kvplane.connector.plugin is loaded by vLLM; vllm is not installed here") from error

from kvplane.connector.internals import VersionError

RUN_WITH = ("0.21.0", "0.28.0", "0.32.0")
"""Versions of vLLM that kvplane's tests were run with; deploy/CONNECTOR.md says which tests."""

try:  # since NIXL was split into pull and push
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector as ConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler as SchedulerBase,
    )
except ImportError:
    try:  # 0.21
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector as ConnectorBase
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
            NixlConnectorScheduler as SchedulerBase,
        )
    except ImportError as error:
        raise VersionError(
            f"vLLM {vllm_version} lacks NIXL's pull connector, which kvplane needs to retain and read KV;"
            f" run with these versions of vLLM: {', '.join(RUN_WITH)}"
        ) from error

try:  # since workers decline reads of KV that is about to go
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    DECLINES_LATE_READS = hasattr(NixlPullConnectorWorker, "_is_turn2_read_expired")
except ImportError:
    DECLINES_LATE_READS = False
"""Whether a worker looks once more, right before a read, whether the KV is still there."""

__all__ = [
    "DECLINES_LATE_READS",
    "RUN_WITH",
    "ConnectorBase",
    "SchedulerBase",
    "call_if_there",
    "decline_late_reads",
    "layer_specs",
    "order_leases",
    "quiet_releases",
    "read_by",
    "rebase_reads",
    "settled_tokens",
    "transfer_groups",
    "transferred",
    "vllm_version",
]


def read_by(deadline: float) -> float:
    """Return a remote_blocks_expiry_time that says: by this engine's own clock, begin no later than then.

    It is for this engine's worker alone, see `decline_late_reads`. A holder's clock is never below zero.
    """
    return -deadline


def rebase_reads(metadata: Any) -> None:
    """Move what `read_by` said from the scheduler's clock to this worker's: it may run on another machine.

    As vLLM does with its own deadlines. Where a version does not send the scheduler's time, nothing is.
    """
    scheduler_clock = getattr(metadata, "scheduler_clock", 0.0)
    if not scheduler_clock:
        return
    now = time.perf_counter()
    for meta in metadata.reqs_to_recv.values():
        deadline = getattr(meta.remote, "blocks_expiry_time", None)
        if deadline is not None and deadline < 0:
            meta.remote.blocks_expiry_time = -max(1e-6, now + (-deadline - scheduler_clock))


def decline_late_reads(worker: Any) -> None:
    """Have a worker decline a read that begins later than `read_by` said.

    vLLM's own check goes by the holder's deadline as it was when the turn ended; renewals move that.
    """
    if worker is None or not DECLINES_LATE_READS:
        return
    is_expired = worker._is_turn2_read_expired

    def is_late(meta: Any) -> bool:
        deadline = getattr(meta.remote, "blocks_expiry_time", None)
        if deadline is None or deadline >= 0:
            return bool(is_expired(meta))
        return bool(meta.local_physical_block_ids) and time.perf_counter() >= -deadline

    worker._is_turn2_read_expired = is_late


def renew_failed_peers(worker: Any) -> None:
    """Have a worker shake hands anew with an engine that a read from failed.

    One that was started again under its old id is another NIXL agent, and every read by the old one fails.
    vLLM drops an agent only if another id comes to its address, or NIXL itself has forgotten it (0.32, in
    whose way and at whose intervals it is dropped here, once no read uses it; older ones have none).
    """
    clean_up = getattr(worker, "_cleanup_remote_engines", None)
    if clean_up is None or not hasattr(worker, "_mark_remote_engine_invalid"):
        return

    def renew_and_clean_up() -> None:
        failed = worker._failed_remote_engines - worker._invalid_remote_engines
        for engine_id in failed & worker._remote_agents.keys():
            worker._mark_remote_engine_invalid(engine_id, time.perf_counter())
        clean_up()

    worker._cleanup_remote_engines = renew_and_clean_up


def settled_tokens(request: Any) -> int:
    """Return how many of a request's tokens have their KV complete.

    Its `num_computed_tokens` runs ahead: under async scheduling it counts steps that are still on the GPU.
    """
    in_flight = getattr(request, "num_in_flight_tokens", None)
    if in_flight is None:  # before 0.32
        in_flight = request.num_output_placeholders
    settled: int = min(request.num_computed_tokens - max(0, in_flight), len(request.all_token_ids))
    return max(0, settled)


def transfer_groups(kv_cache_config: Any) -> list[Any]:
    """Return the KV cache groups that take part in a transfer."""
    return list(getattr(kv_cache_config, "transfer_groups", kv_cache_config.kv_cache_groups))


def transferred(kv_cache_config: Any, block_ids: Any) -> list[Any]:
    """Return the block ids of the groups that take part in a transfer, out of those of all groups."""
    select = getattr(kv_cache_config, "select_transfer_block_ids", None)
    return list(select(block_ids) if select is not None else block_ids)


def layer_specs(spec: Any) -> list[Any]:
    """Return the KV cache specs that a group's spec stands for: its layers', or itself."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def call_if_there(target: Any, method: str, *args: Any) -> Any:
    """Call a hook of a base class that older versions do not have; None if it is not there."""
    function = getattr(target, method, None)
    return function(*args) if function is not None else None


def order_leases(worker: Any) -> None:
    """Let an early release take effect on workers that look at their leases in order of entry (0.21)."""
    leases = getattr(worker, "_reqs_to_send", None)
    if leases and not hasattr(worker, "_reap_expired_send_leases"):
        worker._reqs_to_send = dict(sorted(leases.items(), key=lambda lease: lease[1]))


def quiet_releases(worker: Any) -> None:
    """Keep a decode engine's worker from warning of each early release as of a lease that ran out.

    On a decode engine every release is the control plane's doing; no vLLM so far has a call for one.
    """
    for kind in type(worker).__mro__:
        if kind.__module__.startswith("vllm.") and ".nixl" in kind.__module__:
            logger = logging.getLogger(kind.__module__)
            if not any(isinstance(known, _NotOfReleases) for known in logger.filters):
                logger.addFilter(_NotOfReleases())


class _NotOfReleases(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Releasing expired KV blocks")
