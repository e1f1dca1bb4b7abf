"""Checks of the connector's life and metrics on vLLM's own classes. Runs in vLLM's environment.

The engine core is vLLM's class without its start: what the connector watches is real, what it runs is not.
"""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.outputs import KVConnectorOutput

from kvplane.client.model import RequestId
from kvplane.connector import compat, needs
from kvplane.connector.internals import Need, VersionError, check
from kvplane.connector.plugin import KVPlaneConnector
from kvplane.connector.stats import KVPlaneStats
from tests.vllm import scheduler_checks as base
from tests.vllm.runner import run


class Core(EngineCoreProc):  # type: ignore[misc]  # vLLM is not there when this is checked
    """An engine core that has made its scheduler, and that one its connector; nothing else."""

    def __init__(self, role: str = "kv_consumer") -> None:
        self.calls: list[str] = []
        self.asked_back: list[str] = []
        self.shutdown_state = EngineShutdownState.RUNNING
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda method, *_: self.calls.append(str(method)),
            add_lora=lambda request: True,
        )
        connector = base.scheduler(role)
        self.scheduler = SimpleNamespace(
            connector=connector,
            pause_state=PauseState.UNPAUSED,
            reset_prefix_cache=lambda *_: self.calls.append("reset_prefix_cache"),
        )

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector, with one turn retained."""
        return self.scheduler.connector


def core_with_a_turn() -> Core:
    core = Core()
    assert core.connector._watch.found

    def withdraw(request_id: str) -> bool:
        core.asked_back.append(request_id)
        return True

    core.connector._session.withdraw = withdraw
    made = base.finish(base.request(dict(base.DIRECT), 100, 30))
    assert core.connector.request_finished(made, base.blocks_of(made)) == (True, None)
    return core


def withdrawn(core: Core) -> bool:
    """Whether the turn has been asked back, at once or at the next step."""
    base.meta(core.connector)
    return core.asked_back == ["r"]


def resets(core: Core) -> dict[str, int]:
    return dict(core.connector._sight.meter.resets)


def check_a_pause_gives_everything_back() -> None:
    core = core_with_a_turn()
    assert not withdrawn(core)
    core.scheduler.pause_state = PauseState.PAUSED_NEW
    assert withdrawn(core)
    made = base.finish(base.request(dict(base.DIRECT), 100, 30, "late"))
    assert core.connector.request_finished(made, base.blocks_of(made)) == (False, None)
    assert core.connector._keeper.counts["not_retained:engine_paused"] == 1
    core.scheduler.pause_state = PauseState.UNPAUSED
    again = base.finish(base.request(dict(base.DIRECT), 100, 30, "again"))
    assert core.connector.request_finished(again, base.blocks_of(again)) == (True, None)


def check_an_end_gives_everything_back() -> None:
    core = core_with_a_turn()
    core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
    due = base.meta(core.connector).reqs_to_send
    assert due["r"] <= time.perf_counter()  # no time to end in: waits for nobody


def check_new_weights_make_everything_go() -> None:
    for method in ("reload_weights", "update_weights", "finish_weight_update", "load_model"):
        core = core_with_a_turn()
        incarnations: list[str] = []
        core.connector._session.start_incarnation = lambda seen=incarnations: seen.append("new")
        core.collective_rpc(method)
        assert core.calls == [method]
        assert incarnations == ["new"], method
        assert withdrawn(core), method
        assert resets(core) == {method: 1}


def check_calls_that_change_nothing_cost_nothing() -> None:
    core = core_with_a_turn()
    for method in ("compute_weight_checksums", "get_weights", "synchronize_device", "execute_dummy_batch"):
        core.collective_rpc(method)
    core.add_lora(SimpleNamespace(load_inplace=False))
    assert not withdrawn(core)
    assert resets(core) == {}


def check_an_adapter_loaded_in_place_makes_everything_go() -> None:
    core = core_with_a_turn()
    assert core.add_lora(SimpleNamespace(load_inplace=True)) is True
    assert withdrawn(core)


def check_a_reset_of_the_prefix_cache_alone_makes_everything_go() -> None:
    core = core_with_a_turn()
    core.reset_prefix_cache(False, False)
    assert core.calls == ["reset_prefix_cache"]
    assert withdrawn(core)


def check_a_turn_that_ran_through_new_weights_is_not_retained() -> None:
    core = Core()
    made = base.request(dict(base.DIRECT), 100, 30)
    core.connector.on_new_request(made)
    core.collective_rpc("update_weights")
    base.finish(made)
    assert core.connector.request_finished(made, base.blocks_of(made)) == (False, None)


def check_weights_of_another_version_have_other_fingerprints() -> None:
    if not hasattr(EngineCoreProc, "set_weight_version"):
        return  # vLLM before 0.32
    chains = []
    for version in (None, "step-1", "step-2", "step-2"):
        core = Core()
        core._weight_version = "default"
        if version is not None:
            core.set_weight_version(version)
            assert core.get_weight_version() == version
        made = base.finish(base.request(dict(base.DIRECT), 100, 30))
        assert core.connector.request_finished(made, base.blocks_of(made)) == (True, None)
        chains.append(core.connector._session.announced[0].fingerprint.chain)
    assert chains[2] == chains[3]
    assert len(set(chains)) == 3


def check_a_fault_in_a_hook_is_not_the_engines() -> None:
    core = core_with_a_turn()

    def broken() -> bool:
        raise RuntimeError("broken")

    core.connector._keeper.reset = broken
    core.collective_rpc("update_weights")
    assert core.calls == ["update_weights"]
    assert core.connector._faults == {"change": 1}


def check_without_an_engine_core_the_connector_works() -> None:
    s = base.scheduler()
    assert not s._watch.found
    base.meta(s)


def check_signatures_stay_vllms() -> None:
    import inspect

    core = Core()
    for name in ("collective_rpc", "reset_prefix_cache", "add_lora"):
        assert inspect.signature(getattr(core, name)) == inspect.signature(
            getattr(EngineCoreProc, name).__get__(core)
        )


def check_nothing_runs_before_the_pool_is_bound() -> None:
    """A process that is going to fork must have no threads: workers are forked before that."""
    before = threading.active_count()
    from kvplane.connector.scheduler import KVPlaneConnectorScheduler

    KVPlaneConnectorScheduler(base.config("kv_consumer"), "e", base.layout())
    assert threading.active_count() == before


def facade(s: Any) -> Any:
    made = object.__new__(KVPlaneConnector)
    made._kvplane = s
    return made


def check_metrics_travel_with_vllms_and_beside_nixls() -> None:
    s = base.scheduler()
    made = base.finish(base.request(dict(base.DIRECT), 100, 30))
    s.request_finished(made, base.blocks_of(made))
    stats = facade(s).get_kv_connector_stats()
    assert not stats.is_empty()
    assert facade(s).get_kv_connector_stats() is None  # not again so soon
    worker = KVPlaneStats()
    worker.data["num_failed_transfers"].append(1)
    both = KVPlaneStats.of_worker(worker).aggregate(stats)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(both.data))
    transfer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="x"))
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    for _ in range(2):  # a second engine in this process takes the first one's place
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith("vllm:"):
                REGISTRY.unregister(collector)
        prom = KVPlaneConnector.build_prom_metrics(transfer, types, ["engine"], {0: ["0"]})
    prom.observe(sent, 0)
    prom.observe({**KVPlaneStats().data}, 0)
    text = generate_latest(REGISTRY).decode()
    assert 'kvplane_connector_retained_turns_total{engine="0"} 1.0' in text, text
    assert 'kvplane_connector_retained_blocks{engine="0"} 5.0' in text
    assert 'vllm:nixl_num_failed_transfers_total{engine="0"} 1.0' in text
    logged = KVPlaneConnector.build_kv_connector_stats(stats.data)
    assert logged.is_empty()  # or vLLM's log would have a line of zeros every ten seconds


def check_the_internals_are_there_and_a_missing_one_is_named() -> None:
    needs.check_internals()
    missing = Need(compat.SchedulerBase, "test", attributes=("_no_such_thing",))
    try:
        check([*needs.NEEDS, missing], version=compat.vllm_version, known=compat.RUN_WITH)
    except VersionError as error:
        said = str(error)
    else:
        said = ""
    assert f"vLLM {compat.vllm_version} lacks {compat.SchedulerBase.__name__}._no_such_thing" in said, said


def check_the_version_is_one_that_is_said_to_work() -> None:
    assert compat.vllm_version in compat.RUN_WITH, "run the tests with it, then add it"


def check_a_request_id_is_what_the_session_takes() -> None:
    core = core_with_a_turn()
    core.connector.update_connector_output(KVConnectorOutput(finished_sending={RequestId("r")}))
    assert core.connector._session.freed_requests == ["r"]


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
