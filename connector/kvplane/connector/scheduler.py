"""vLLM's NIXL pull scheduler with kvplane on both sides of it.

On a decode engine it retains and announces finished turns; on a prefill engine it verifies what it is told
before it pulls. Decisions are made in `keeper`, `pull` and `prefill`; here they meet vLLM. Every method runs
on the scheduler's thread and returns at once.
"""

from __future__ import annotations

import time
from typing import Any

from kvplane.client.logs import get_logger, trace
from kvplane.client.model import EngineRole
from kvplane.client.sync import EngineSessionThread
from kvplane.connector import compat
from kvplane.connector.asking import Asker
from kvplane.connector.chains import ChainCache
from kvplane.connector.config import read_config
from kvplane.connector.engine import (
    base_context,
    bytes_per_block,
    cache_layout,
    conversation_key,
    describe_engine,
    request_context,
    request_items,
    request_tokens,
)
from kvplane.connector.envelope import MEMBER, SETTINGS, Envelope, Outcome, read_envelope
from kvplane.connector.inquiry import Question
from kvplane.connector.instruments import Instruments
from kvplane.connector.keeper import FinishedTurn, Keeper
from kvplane.connector.leases import Terms
from kvplane.connector.lifecycle import LifeCycle
from kvplane.connector.metrics import Meter, Snapshot
from kvplane.connector.pull import PullPlan, offers_blocks, plan_pull
from kvplane.connector.reader import Reader
from kvplane.connector.retention import Retention
from kvplane.connector.watch import EngineWatch

_log = get_logger("kvplane.connector")
_clock = time.perf_counter  # vLLM's clock for deadlines of blocks


class KVPlaneConnectorScheduler(compat.SchedulerBase):  # type: ignore[misc]  # vLLM is not there when checked
    """The scheduler side of KVPlaneConnector."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._kvplane = read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._layout = cache_layout(vllm_config, kv_cache_config)
        self._context = base_context(vllm_config, kv_cache_config, engine_id)
        self._chains = ChainCache()
        self._reader = Reader(_clock)
        self._ledger = self._reader.ledger
        self._model = ""
        self._watch = EngineWatch.of_caller()
        self._life = LifeCycle(
            self._watch.state,
            monotonic=_clock,
            shutdown_timeout_s=getattr(vllm_config, "shutdown_timeout", 0) or 0,
        )
        meter = Meter(self._layout.block_size, bytes_per_block(vllm_config, kv_cache_config))
        self._faults = meter.faults
        self._sight = Instruments(
            self._kvplane,
            engine_id=engine_id,
            rank=getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0,
            meter=meter,
            monotonic=_clock,
        )
        self._live: set[str] = set()  # requests waiting or running
        self._admitted: set[str] = set()  # those of them that were given blocks
        self._stale: set[str] = set()  # those of them that began before the cache was reset
        self._waiting: Any = None  # asked about in this step, not given blocks yet
        self._waiting_local_tokens = 0
        self._pool: Any = None
        self._retains = False
        self._session: EngineSessionThread | None = None
        self._keeper: Keeper | None = None

    # Life

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """Take the pool whose blocks are budgeted, and begin the session with the control plane."""
        self._pool = pool
        self._begin(pool.num_gpu_blocks - 1)  # one block is vLLM's placeholder

    def _begin(self, total_blocks: int) -> Keeper:
        spec = describe_engine(self, self._kvplane, total_blocks, self._layout, self._context)
        self._retains = spec.role is not EngineRole.PREFILL and not self._layout.refusal
        at, security = self._kvplane.address, self._kvplane.security
        self._session = EngineSessionThread(at, spec, monotonic=_clock, security=security)
        retention = Retention(
            total_blocks,
            fraction=self._kvplane.retain_fraction,
            floor=self._kvplane.free_block_floor,
            monotonic=_clock,
        )
        self._keeper = Keeper(
            self._kvplane,
            self._session,
            retention,
            monotonic=_clock,
            block_tokens=self._layout.block_size,
            chains=self._chains,
        )
        self._model = spec.served_models[0]
        if spec.role is not EngineRole.DECODE and self._kvplane.ask_timeout_s > 0:
            self._reader.asker = Asker(
                self._session,
                engine_id=self.engine_id,
                layout=self._layout,
                chunk_tokens=self._kvplane.chunk_tokens,
                timeout_s=self._kvplane.ask_timeout_s,
                monotonic=_clock,
            )
        asker = self._reader.asker
        self._sight.start(
            self._keeper,
            self._session,
            self._ledger.outcomes,
            asker,
            reads=self._reader.counts,
        )
        self._watch.tell(self._on_change)
        self._session.start()
        _log.info(
            "connector_started",
            engine_id=self.engine_id,
            role=str(spec.role),
            model=spec.profile.model,
            retains=self._retains,
            no_reuse=self._layout.refusal,
            settings=self._context.settings,
            budget_blocks=retention.budget,
            total_blocks=total_blocks,
            engine_watched=self._watch.found,
        )
        return self._keeper

    def shutdown(self) -> None:
        """End the session, then what is vLLM's."""
        if self._session is not None:
            self._session.close()
        self._sight.close()
        super().shutdown()

    def reset_cache(self) -> bool:
        """Forget everything retained. False while blocks of it are held: free after the next steps.

        What runs now began on the old cache, perhaps on old weights: it is not retained either.
        """
        self._sight.meter.resets["asked_by_vllm"] += 1
        return self._forget()

    def _forget(self) -> bool:
        self._stale |= self._live
        return self._keeper is None or self._keeper.reset()

    def _on_change(self, cause: str) -> None:
        """Forget everything retained, before what vLLM does about `cause` and tells no connector."""
        try:
            self._sight.meter.resets[cause] += 1
            self._context = base_context(
                self.vllm_config, self.kv_cache_config, self.engine_id, self._watch.weight_version
            )
            self._forget()
        except Exception as error:
            self._fault("change", error)

    def stats(self) -> Snapshot | None:
        """Return what is new for vLLM's statistics, None if nothing is due."""
        return self._sight.stats(idle=not self._live)

    # Both sides

    def on_new_request(self, request: Any) -> None:
        """Note a request (vLLM 0.32 and later)."""
        _make_params_sound(request)
        compat.call_if_there(super(), "on_new_request", request)
        self._live.add(request.request_id)
        if _is_prefill(request):
            self._ledger.arrive(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM; what a prefill request may pull is verified before."""
        _make_params_sound(request)
        self._live.add(request.request_id)
        self._waiting, self._waiting_local_tokens = request, num_computed_tokens
        matched: tuple[int | None, bool]
        if _is_prefill(request):
            matched = self._match_for_prefill(request, num_computed_tokens)
        else:
            envelope = self._envelope(request)
            if envelope is not None and self._keeper is not None:
                self._keeper.arrive(request.request_id, envelope)
            matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM; also lets the worker know of every request that may be retained."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        request_id = request.request_id
        self._admitted.add(request_id)
        if self._waiting is request:
            if self._keeper is not None:
                self._keeper.admitted(self._wanted_blocks(request))
            self._waiting = None
        if _is_prefill(request):
            reading = self._reqs_need_recv.get(request_id)
            into = {block for group in reading[1] for block in group} if reading is not None else set()
            self._reader.allocated(request_id, num_external_tokens, into)
        elif self._envelope(request) is not None:
            # Without do_remote_prefill (a direct turn) vLLM's worker would never hear of the request, and
            # then ignore its deadline, its release and its read: its blocks would stay for good.
            self._reqs_in_batch.add(request_id)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM; a decode engine keeps the blocks of turns it can announce, and no others."""
        self._live.discard(request.request_id)
        self._admitted.discard(request.request_id)
        if self._keeper is not None:
            self._keeper.leave(request.request_id)
        ended = self._ended(request, block_ids)
        if self._keeper is not None:
            self._report_load(self._keeper)  # with what was just kept; there may be no step for a long time
        return ended

    def _ended(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks of a request that ends stay, and what is said of it."""
        delay: bool
        delay, params = super().request_finished(request, block_ids)
        stale = request.request_id in self._stale
        self._stale.discard(request.request_id)
        if _is_prefill(request):
            return delay, self._with_report(request, params)
        if delay and (stale or not self._keep(request, block_ids, params)):
            delay = False
            self._reqs_need_send.pop(request.request_id, None)
            self._reqs_not_processed.add(request.request_id)
        return delay, None

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM; notes which reads ended and which retained blocks are free again."""
        compat.call_if_there(super(), "update_connector_output", connector_output)
        done = connector_output.finished_recving or frozenset()
        failed = getattr(connector_output, "failed_recving", None) or frozenset()
        invalid = connector_output.invalid_block_ids or frozenset()
        if done or failed or invalid:
            self._reader.received(done, failed, invalid)
        if connector_output.finished_sending and self._keeper is not None:
            self._keeper.freed(connector_output.finished_sending)
            self._report_load(self._keeper)

    def step_done(self) -> None:
        """Note that the outcome of a step is dealt with; what it freed came in `update_connector_output`."""
        try:
            if self._keeper is not None:
                self._keeper.step_done()
        except Exception as error:
            self._fault("step_done", error)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free in the next steps, so that no running request need be preempted."""
        return self._keeper is not None and self._keeper.retention.frees_soon

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """See vLLM; also the step in which retained blocks are looked after."""
        try:
            self._look_after()
        except Exception as error:
            self._fault("step", error)
        return super().build_connector_meta(scheduler_output)

    # Decode side

    def _envelope(self, request: Any) -> Envelope | None:
        return read_envelope(request.kv_transfer_params) if self._retains else None

    def _keep(self, request: Any, block_ids: Any, params: dict[str, Any] | None) -> bool:
        if params is None or self._keeper is None:
            return False
        if self._life.refusal:
            self._keeper.counts[f"not_retained:{self._life.refusal}"] += 1
            return False
        turn: FinishedTurn | None = None
        terms: Terms | None = None
        try:
            turn = self._finished_turn(request, block_ids, params, self._keeper)
            terms = self._keeper.finish(turn) if turn is not None else None
        except Exception as error:
            self._fault("announce", error)
        if terms is not None:
            self._reqs_need_send[request.request_id] = terms.blocks
        if turn is not None:
            ttl_s = terms.idle - _clock() if terms is not None else 0.0
            self._sight.retained(turn, ttl_s=ttl_s, kept=terms is not None)
        return terms is not None

    def _finished_turn(
        self, request: Any, block_ids: Any, params: dict[str, Any], keeper: Keeper
    ) -> FinishedTurn | None:
        envelope = read_envelope(request.kv_transfer_params)
        if envelope is None or not self._retains:
            if envelope is not None and self._layout.refusal:
                keeper.counts[f"not_retained:{self._layout.refusal}"] += 1
            return None
        tokens = compat.settled_tokens(request)
        blocks = self._layout.kept(compat.transferred(self.kv_cache_config, block_ids), tokens)
        if blocks is None:
            keeper.counts["not_retained:blocks_gone"] += 1
            return None
        params.update(remote_block_ids=blocks, remote_num_tokens=tokens)
        params[SETTINGS] = self._context.settings
        if self._kvplane.remote_host:
            params["remote_host"] = self._kvplane.remote_host
        return FinishedTurn(
            request_id=request.request_id,
            envelope=envelope,
            context=request_context(self._context, request),
            tokens=request_tokens(request, request.all_token_ids, tokens, self.kv_cache_config),
            items=request_items(request),
            blocks=[block for group in block_ids for block in group if block],
            params=params,
            prompt_tokens=request.num_prompt_tokens,
            finish="length" if request.status.name == "FINISHED_LENGTH_CAPPED" else "stop",
        )

    def _look_after(self) -> None:
        keeper = self._keeper or self._begin(self.kv_cache_config.num_blocks - 1)
        free_blocks = self._pool.get_num_free_blocks() if self._pool is not None else None
        waiting, self._waiting = self._waiting, None
        wanted, spare = 0, None
        if waiting is not None:
            wanted, spare = self._wanted_blocks(waiting), self._envelope(waiting)
        given_up = self._life.step(keeper.retention, live=bool(self._live))
        # The worker takes them over in this step; what is due now it lets go of.
        self._reqs_need_send.update(keeper.step(free_blocks, wanted_blocks=wanted, spare=spare))
        self._reqs_need_send.update(dict.fromkeys(given_up, _clock()))
        self._report_load(keeper)

    def _wanted_blocks(self, request: Any) -> int:
        """Return about how many free blocks a request takes that was just asked about."""
        local_blocks = self._waiting_local_tokens // self._layout.block_size
        return max(0, self._layout.blocks_for(request.num_tokens) + 1 - local_blocks)

    def _report_load(self, keeper: Keeper) -> None:
        keeper.report_load(
            running=len(self._admitted),
            waiting=len(self._live - self._admitted),
            free_blocks=self._pool.get_num_free_blocks() if self._pool is not None else 0,
        )

    # Prefill side

    def _match_for_prefill(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        request_id, params = request.request_id, request.kv_transfer_params
        self._ledger.arrive(request_id)
        matched: tuple[int | None, bool] = 0, False
        if not self._settled(request, local_tokens):
            self._waiting = None  # not for blocks
            return None, False
        if self._ledger.may_pull(request_id):
            self._verify(request)
            self._read_in_time(request_id, params)
            if not (self.use_host_buffer and params.get("remote_block_ids")):
                matched = super().get_num_new_matched_tokens(request, local_tokens)
        self._ledger.asked(request_id, local_tokens, matched[0] or 0)
        return matched

    def _with_report(self, request: Any, params: dict[str, Any] | None) -> dict[str, Any] | None:
        if params is None:
            self._reader.forget(request.request_id)
            return None
        report = self._reader.report(request.request_id, request.num_prompt_tokens)
        self._sight.handed_over(report, request.request_id, block_size=self._layout.block_size)
        return {**params, MEMBER: report}

    def _settled(self, request: Any, local_tokens: int) -> bool:
        """Whether it is known what the request may pull; see Reader."""
        request_id, params = request.request_id, request.kv_transfer_params
        known = self._ledger.plan(request_id)
        try:
            settled = self._reader.settle(request_id, params, lambda: self._question(request, local_tokens))
            plan = self._ledger.plan(request_id)
            if plan is not None and plan is not known:
                offered = self._reader.offered_tokens(request_id)
                self._sight.meter.compared(offered, plan.tokens, plan.outcome)
            return settled
        except Exception as error:
            self._fault("ask", error)
            return True

    def _question(self, request: Any, local_tokens: int) -> Question | None:
        """Return what to ask about a request; None if its KV cannot be named, or not be kept either."""
        try:
            context = request_context(self._context, request)
            key = conversation_key(self._kvplane.tenant_id, self._model, request)
            if context is None or key is None or self._layout.refusal:
                return None
            unreadable = self.use_host_buffer or getattr(request, "skip_reading_prefix_cache", False)
            return Question(
                key,
                context,
                tokens=request.prompt_token_ids,
                items=request_items(request),
                local_tokens=local_tokens,
                least_tokens=0 if unreadable else max(1, getattr(self, "kv_recompute_threshold", 64)),
                avoided=self._reader.breaker.held(),
            )
        except Exception as error:
            self._fault("ask", error)
            return None

    def _verify(self, request: Any) -> None:
        """Cut what the request is to pull to what is equal; once, and again only to pull nothing after all.

        That is if it waited too long, or began before a reset: what it was to pull may be of old weights.
        """
        request_id, params = request.request_id, request.kv_transfer_params
        plan = self._ledger.plan(request_id)
        if not offers_blocks(params) if plan is None else plan.outcome is not None:
            return
        stale, too_late = request_id in self._stale, self._too_late(request_id)
        if stale or (plan is not None and too_late):
            plan = PullPlan(0, None, Outcome.COLD, "reset" if stale else "queued_too_long")
            self._reader.dropped(request_id)
        elif plan is None:
            plan = self._reader.admitted(
                request_id, self._plan(request, too_late), params.get("remote_engine_id")
            )
            self._sight.meter.compared(params.get("remote_num_tokens"), plan.tokens, plan.outcome)
        else:
            return
        self._ledger.planned(request_id, plan)
        params["remote_num_tokens"], params["remote_block_ids"] = plan.tokens, plan.block_ids

    def _plan(self, request: Any, too_late: bool) -> PullPlan:
        if self.use_host_buffer:  # vLLM reads nothing into a prefill engine that stages through the host
            return PullPlan(0, None, Outcome.COLD, "host_buffer")
        try:
            return plan_pull(
                request.kv_transfer_params,
                layout=self._layout,
                context=request_context(self._context, request),
                tokens=request_tokens(
                    request, request.prompt_token_ids or (), request.num_prompt_tokens, self.kv_cache_config
                ),
                items=request_items(request),
                too_late=too_late,
                hasher=self._chains,
            )
        except Exception as error:
            self._fault("verify", error)
            return PullPlan(0, None, Outcome.NO_FINGERPRINT, "fault")

    def _read_in_time(self, request_id: str, params: dict[str, Any]) -> None:
        """Have the worker decline a read that would begin after the claim behind it is over."""
        if compat.DECLINES_LATE_READS and offers_blocks(params):
            begin_by = _clock() - self._ledger.waited(request_id) + self._claim_timeout_s
            params["remote_blocks_expiry_time"] = compat.read_by(begin_by)

    def _too_late(self, request_id: str) -> bool:
        """Whether the claim behind a request may end before its read does: a third of it is the margin."""
        return self._ledger.waited(request_id) > self._claim_timeout_s * 2 / 3

    @property
    def _claim_timeout_s(self) -> float:
        registration = self._session.registration if self._session is not None else None
        return registration.claim_timeout_s if registration is not None else 30.0

    def _fault(self, where: str, error: Exception) -> None:
        """A fault of kvplane's costs reuse, never a request; logged once per place."""
        self._faults[where] += 1
        if self._faults[where] == 1:
            _log.error("connector_fault", where=where, error=type(error).__name__, trace=trace(error))


def _is_prefill(request: Any) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def _make_params_sound(request: Any) -> None:
    """Take off what vLLM would fall over, and the engine with it, or read without it being verified.

    That is params that are no object; `do_remote_prefill` on a prefill turn, which vLLM looks at first and
    takes for the whole prompt; and the same with ids that are no text.
    """
    params = request.kv_transfer_params
    if params is None:
        return
    if not isinstance(params, dict):
        request.kv_transfer_params = None
    elif params.get("do_remote_prefill"):
        ids = (params.get("remote_engine_id", ""), params.get("remote_request_id", ""))
        if params.get("do_remote_decode") or not all(isinstance(each, str | None) for each in ids):
            params["do_remote_prefill"] = False
