"""The doctor finds what was planted, says how to mend it, and finds nothing in a healthy fleet."""

from __future__ import annotations

import email.utils
import time
from typing import Any

import pytest

from deploy.rig.etcd import EtcdServer
from kvplane.cli.doctor import engine_checks
from kvplane.cli.doctor.facts import Facts, Offset, PlaneFacts
from kvplane.cli.doctor.plane_checks import check_clocks, check_replicas, check_store
from kvplane.client import model as m
from kvplane.controlplane.model import Settings
from kvplane.store.base import KeyValue, StoreFacts
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore
from kvplane.store.url import open_store
from tests.cli.fleet import METRICS, EngineHttp, Fleet, comes_true, healthy, says
from tests.cli.people import run
from tests.fakes.attach import AttachPlane


async def test_in_a_healthy_fleet_nothing_is_found(f: Fleet) -> None:
    await healthy(f)
    url = await f.router()
    client = await f.client()
    await client.begin_turn(m.ConversationKey("default", "m", "c"), "r")
    done = await run("doctor", "--plane", f.addresses[0], "--router", url, "-o", "json")
    assert done.json["findings"] == []
    assert (done.code, done.json["healthy"]) == (0, True)
    assert done.json["looked_at"] == {
        "control_plane": 1,
        "engine": 2,
        "engine_server": 2,
        "side_channel": 2,
        "router": 1,
    }
    text = await run("doctor", "--plane", f.addresses[0], "--router", url)
    assert (text.code, text.lines[-1]) == (0, "nothing is wrong")


async def test_engines_of_both_roles_are_a_healthy_fleet_too(f: Fleet) -> None:
    await f.plane()
    await f.engine("one", "both")
    await f.engine("other", "both")
    assert await f.diagnosed() == {}


async def test_what_is_found_is_said_with_its_fix_and_by_the_exit_code(f: Fleet) -> None:
    await f.plane()
    done = await run("doctor", "--plane", f.addresses[0])
    assert done.code == 1
    assert "PROBLEM  no_engines: no engine is registered" in done.said
    assert "\n  seen: ListEngines is empty" in done.said
    assert "\n  fix:  start it with --kv-transfer-config" in done.said
    assert done.lines[-1] == "1 problem, 0 warnings"
    told = (await run("doctor", "--plane", f.addresses[0], "-o", "json")).json
    assert told["healthy"] is False
    (finding,) = told["findings"]
    assert set(finding) == {"severity", "code", "what", "evidence", "fix"}
    assert (finding["severity"], finding["code"]) == ("problem", "no_engines")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--router", "r:1"), "--router"),
        (("--engine", "ftp://x"), "--engine"),
        (("--plane", "x"), "--plane"),
        (("--plane-ca", "/nowhere"), "/nowhere: no such file"),
    ],
)
async def test_what_cannot_be_looked_at_is_refused(arguments: tuple[str, str], said: str) -> None:
    done = await run("doctor", *arguments)
    assert done.code == 2
    assert said in done.error


# The control plane


async def test_a_control_plane_that_cannot_be_reached(f: Fleet) -> None:
    f.addresses.append("127.0.0.1:1")
    found = await f.diagnosed()
    says(found, "plane_unreachable", "kvplane serve", "127.0.0.1:1")
    says(found, "plane_unreachable", "where it has TLS, give --plane-ca", "nothing is reused")
    assert "no_engines" not in found


async def test_one_of_several_control_planes_that_cannot_be_reached(f: Fleet) -> None:
    await healthy(f)
    f.addresses.append("127.0.0.1:1")
    says(await f.diagnosed(), "plane_unreachable", "kvplane serve", "the others go on without it")


async def test_one_that_does_not_serve(f: Fleet) -> None:
    clock = SystemClock()
    store = FaultInjectingStore(MemoryStore(clock))
    await f.plane(store, clock)
    store.set_unavailable(True)
    await f.servers[0]._check_health()
    says(await f.diagnosed(), "plane_not_serving", "kvplane store check")
    store.set_unavailable(False)


async def test_one_that_is_older(f: Fleet) -> None:
    async with AttachPlane() as old:
        f.addresses.append(old.address)
        says(await f.diagnosed(), "plane_too_old", "upgrade it", old.address)


async def test_replicas_that_do_not_share_their_store(f: Fleet) -> None:
    await healthy(f)
    await f.plane()
    says(await f.diagnosed(), "replicas_share_nothing", "--store etcd://", *f.addresses)


async def test_an_etcd_that_loses_data(f: Fleet, etcd_server: EtcdServer) -> None:
    clock = SystemClock()
    await f.plane(open_store(f"etcd://{etcd_server.endpoint}/doctor", clock), clock)
    found = await f.diagnosed()
    says(found, "store_unsound", "3.5.6", "etcd 3.5.1")
    assert "no_engines" in found


class Lagging(SystemClock):
    """A clock of which a store's reads take some."""

    behind_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.behind_s


class PoorStore(MemoryStore):
    """A store that takes its time, and is nearly full."""

    def __init__(self, clock: Lagging) -> None:
        super().__init__(clock)
        self.clock = clock

    async def get(self, key: bytes) -> KeyValue | None:
        self.clock.behind_s += 0.4
        return await super().get(key)

    async def facts(self) -> StoreFacts:
        return StoreFacts("etcd 3.5.9", size_bytes=1_900 << 20)


async def test_a_store_that_is_slow_and_nearly_full(f: Fleet) -> None:
    clock = Lagging()
    await f.plane(PoorStore(clock), clock)
    found = await f.diagnosed()
    says(found, "store_slow", "fsync", "400 ms")
    says(found, "store_nearly_full", "--quota-backend-bytes", "1,900 of 2,048 MiB", "default quota")


def plane_facts(address: str, *, fleet_s: float = 0.0, clock_s: float = 0.0, **store: Any) -> PlaneFacts:
    settings = m.PlaneSettings(480, 10, 30, 10, 10, 2, 1_000_000)
    members = {"shared": True, "latency_s": 0.001, "staleness_s": 0.1, **store}
    status = m.PlaneStatus(address, "1", True, 60, 0, 0, settings, m.StoreStatus(**members))
    return PlaneFacts(address, status, fleet=Offset(fleet_s, 0.01), clock=Offset(clock_s, 0.01))


def test_replicas_of_different_times_or_far_behind() -> None:
    """What correct replicas do not come to; their time is agreed on, and old copies do not answer."""
    facts = Facts((plane_facts("a:1", fleet_s=0.5), plane_facts("b:1", fleet_s=-3, staleness_s=1.5)))
    assert [f.code for f in check_replicas(facts)] == ["replicas_disagree_on_time"]
    assert [f.code for f in check_store(facts)] == ["store_stale"]


def test_which_clock_is_wrong_is_told_by_the_others() -> None:
    facts = Facts(tuple(plane_facts(f"{n}:1", fleet_s=a, clock_s=a) for n, a in (("a", 60.0), ("b", 60.1))))
    (here,) = check_clocks(facts)
    assert "this machine" in here.what
    facts = Facts(tuple(plane_facts(f"{n}:1", fleet_s=a, clock_s=a) for n, a in (("a", 60.0), ("b", 0.1))))
    (there,) = check_clocks(facts)
    assert "a:1" in there.what


async def test_a_stepped_clock(f: Fleet) -> None:
    class Stepped(SystemClock):
        def machine_ms(self) -> int:
            return super().machine_ms() - 3_600_000

    await healthy(f, clock=Stepped())
    says(await f.diagnosed(), "clock_stepped", "chrony", "3600.0 s behind")


async def test_an_engine_whose_clock_is_off(f: Fleet) -> None:
    await healthy(f)
    date = email.utils.formatdate(time.time() + 120, usegmt=True)
    spec = await f.engine("e", "decode", http=EngineHttp(date=date))
    says(await f.diagnosed(), "clock_skew", "NTP", spec.endpoint, "ahead of")


async def test_several_versions_of_kvplane(f: Fleet) -> None:
    await healthy(f)
    await f.engine("old", "decode", settings={"kvplane_version": "0.0.9"})
    says(await f.diagnosed(), "versions_mixed", "control planes first", "0.0.9: old")


# Engines


async def test_no_engines_or_only_one_kind(f: Fleet) -> None:
    await f.plane()
    says(await f.diagnosed(), "no_engines", "KVPlaneConnector")
    await f.engine("p", "prefill")
    says(await f.diagnosed(), "no_decode_engine", "kv_consumer", "p")
    f.sessions["p"].cancel()
    client = await f.client()
    (engine,) = await client.list_engines()
    await client.deregister_engine(engine.spec.engine_id, engine.engine_epoch)
    await f.engine("d", "decode")
    says(await f.diagnosed(), "no_prefill_engine", "kv_producer", "d")


async def test_an_engine_that_registers_and_does_not_attach(
    f: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await healthy(f)
    await (await f.client()).register_engine(await f.spec("lone", "decode"))
    assert await f.diagnosed() == {}  # it may be about to
    monkeypatch.setattr(engine_checks, "UNATTACHED_S", 0.0)
    says(await f.diagnosed(), "engine_not_attached", "HTTP/2 streams", "lone", "announces nothing")


async def test_an_engine_that_is_heard_of_no_more(f: Fleet) -> None:
    await healthy(f)
    client = await f.client()
    f.sessions["d"].cancel()

    async def silent() -> bool:
        return any(e.contact is m.EngineContact.SILENT for e in await client.list_engines())

    await comes_true(silent)
    says(await f.diagnosed(), "engine_silent", "network", "d")


async def test_a_decode_engine_that_never_announces(f: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "SILENT_S", 0.0)
    await healthy(f)
    assert await f.diagnosed() == {}  # there was nothing to announce
    await (await f.client()).begin_turn(m.ConversationKey("t", "m", "c"), "r")
    says(await f.diagnosed(), "announces_nothing", "kvplane_retain_fraction", "d", "1 turns")


async def test_an_engine_without_the_connector(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", http=(http := EngineHttp("vllm:num_requests_running 1\n")))
    assert await f.diagnosed(http.url) == {}  # it registered: what its metrics say is another matter
    stock = EngineHttp("vllm:num_requests_running 1\n")
    await f.spec("nobody", "decode", http=stock)
    says(await f.diagnosed(stock.url), "engine_without_connector", "KVPlaneConnector", stock.url)


async def test_a_model_of_which_nothing_can_be_reused(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", settings={"refusal": "recurrent_model"})
    says(await f.diagnosed(), "nothing_reusable", "recurrent state", "recurrent_model")


async def test_a_role_that_is_not_what_vllm_was_told(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", settings={"kv_role": "kv_producer"})
    says(await f.diagnosed(), "role_mismatch", '"kv_consumer" to decode', "kv_role kv_producer, role decode")


async def test_prefill_and_decode_swapped_at_a_router(f: Fleet) -> None:
    await f.plane()
    p, d = await f.engine("p", "prefill"), await f.engine("d", "decode")
    await f.router(prefill_urls=(d.endpoint,), decode_urls=(p.endpoint,))
    found = await f.diagnosed()
    says(found, "roles_swapped", "--prefill", p.endpoint)
    assert "router_degraded" not in found


@pytest.mark.parametrize(
    ("profile", "code", "fix", "evidence"),
    [
        ({"block_size": 32}, "block_size_mismatch", "--block-size", "16 and 32"),
        ({"model": "n"}, "model_mismatch", "same model", "m and n"),
        ({"kv_dtype": "fp8"}, "kv_dtype_mismatch", "--kv-cache-dtype", "bfloat16 and fp8"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size_mismatch", "--tensor-parallel-size", "1 and 2"),
        (
            {"engine_version": "0.28.0"},
            "engine_version_mismatch",
            "same version of vLLM",
            "0.32.0 and 0.28.0",
        ),
        ({"model_revision": "x"}, "model_revision_mismatch", "--revision", "not stated and x"),
    ],
)
async def test_engines_that_are_not_alike(
    f: Fleet, profile: dict[str, Any], code: str, fix: str, evidence: str
) -> None:
    await f.plane()
    await f.engine("p", "prefill")
    await f.engine("d", "decode", profile=profile)
    found = await f.diagnosed()
    says(found, code, fix, evidence)
    assert set(found) == {code}


async def test_engines_that_are_alike_by_name_only(f: Fleet) -> None:
    await f.plane()
    await f.engine("p", "prefill")
    await f.engine("d", "decode", settings={"kv_digest": "e" * 32})
    says(await f.diagnosed(), "kv_settings_mismatch", "quantisation", "dddddddd and eeeeeeee")


async def test_engines_for_different_models_need_not_be_alike(f: Fleet) -> None:
    await healthy(f)
    other = {"profile": {"model": "n", "block_size": 32}, "served_models": ("n",)}
    await f.engine("p2", "prefill", **other)
    await f.engine("d2", "decode", **other)
    assert await f.diagnosed() == {}


async def test_no_prefix_cache_where_the_direct_path_needs_it(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", settings={"prefix_caching": False})
    await f.engine("q", "prefill", settings={"prefix_caching": False})
    found = await f.diagnosed()
    says(found, "prefix_caching_off", "--no-enable-prefix-caching", "e")
    assert "q " not in found["prefix_caching_off"].what


async def test_no_prefix_cache_by_vllms_own_metrics(f: Fleet) -> None:
    await healthy(f)
    http = EngineHttp(METRICS.replace('"True"', '"False"'))
    await f.engine("e", "decode", http=http, settings={"prefix_caching": None})
    says(await f.diagnosed(), "prefix_caching_off", "--no-enable-prefix-caching", "cache_config_info")


async def test_failed_reads_that_fail_requests(f: Fleet) -> None:
    await f.plane()
    await f.engine("p", "prefill", settings={"kv_load_failure_policy": "fail"})
    await f.engine("d", "decode", settings={"kv_load_failure_policy": "fail"})
    found = await f.diagnosed()
    says(found, "load_failure_policy_fail", '"kv_load_failure_policy": "recompute"', "d, p")
    assert set(found) == {"load_failure_policy_fail"}


@pytest.mark.parametrize(
    ("settings", "code", "fix"),
    [
        ({"kv_blocks_ttl_s": 12.0}, "ttl_too_short", "decoder_kv_blocks_ttl"),
        ({"max_ttl_s": 20.0}, "ttl_below_claim_life", "--claim-timeout"),
        ({"max_ttl_s": 900.0, "kv_blocks_ttl_s": 900.0}, "ttl_above_plane", "--location-ttl"),
    ],
)
async def test_lives_that_do_not_go_together(f: Fleet, settings: dict[str, Any], code: str, fix: str) -> None:
    await f.plane()
    await f.engine("p", "prefill")
    await f.engine("d", "decode", settings=settings)
    found = await f.diagnosed()
    says(found, code, fix, "d")
    assert set(found) == {code}


async def test_a_control_plane_that_lets_nothing_live(f: Fleet) -> None:
    await healthy(f, settings=Settings(max_location_ttl_s=14.0, claim_timeout_s=2.0))
    says(await f.diagnosed(), "ttl_too_short", "--min-remaining", "--location-ttl 14")


async def test_a_side_channel_that_only_its_own_machine_reaches(f: Fleet) -> None:
    await healthy(f)
    assert await f.diagnosed() == {}  # all on one machine
    await f.engine("far", "decode", settings={"side_channel_host": "engine-7.invalid"})
    found = await f.diagnosed()
    says(found, "side_channel_loopback", "VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    says(found, "side_channel_unreachable", "VLLM_NIXL_SIDE_CHANNEL_PORT", "engine-7.invalid")
    says(found, "endpoint_loopback", "kvplane_endpoint")


async def test_a_side_channel_that_nobody_listens_at(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", settings={"side_channel_port": 1})
    says(await f.diagnosed(), "side_channel_unreachable", "open that port", "127.0.0.1:1")


async def test_places_that_two_engines_name(f: Fleet) -> None:
    await healthy(f)
    d = await f.spec("x", "decode")
    assert d.settings is not None
    port = {"side_channel_port": d.settings.side_channel_port}
    await f.engine("e1", "decode", settings=port, endpoint=d.endpoint)
    await f.engine("e2", "decode", settings=port, endpoint=d.endpoint)
    found = await f.diagnosed()
    says(found, "side_channel_shared", "VLLM_NIXL_SIDE_CHANNEL_PORT", "e1 and e2")
    says(found, "endpoint_shared", "kvplane_endpoint", d.endpoint)


async def test_an_engine_that_does_not_answer(f: Fleet) -> None:
    await healthy(f)
    await f.engine("e", "decode", endpoint="http://127.0.0.1:1")
    says(await f.diagnosed(), "engine_unreachable", "kvplane_endpoint", "http://127.0.0.1:1")


# Routers and files
