"""Checks of engines: are they there, in their roles, alike, and able to reach each other?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvplane.cli.doctor.facts import Facts, host_of, is_loopback
from kvplane.cli.doctor.findings import TRUST, Finding, problem, warning
from kvplane.client import model as m

UNATTACHED_S = 15.0
"""An engine that has just registered may not have attached yet."""
SILENT_S = 60.0
"""A reply may take so long; after it the first announcement is due."""
_CONNECTOR = (
    'start it with --kv-transfer-config {"kv_connector": "KVPlaneConnector", "kv_connector_module_path":'
    ' "kvplane.connector.plugin", ..., "kvplane_address": "HOST:PORT of the control plane"}'
)
_ROLES = {
    "kv_producer": m.EngineRole.PREFILL,
    "kv_consumer": m.EngineRole.DECODE,
    "kv_both": m.EngineRole.BOTH,
}
_MUST_EQUAL = {
    "model": ("model", "start both with the same model"),
    "model_revision": ("model revision", "start both with the same --revision"),
    "kv_dtype": ("KV dtype", "start both with the same --dtype and --kv-cache-dtype"),
    "block_size": ("block size", "start both with the same --block-size"),
    "tensor_parallel_size": ("tensor parallelism", "start both with the same --tensor-parallel-size"),
    "pipeline_parallel_size": ("pipeline parallelism", "start both with --pipeline-parallel-size 1"),
    "decode_context_parallel_size": (
        "decode context parallelism",
        "start both with the same --decode-context-parallel-size",
    ),
    "engine_version": ("vLLM version", "install the same version of vLLM on both"),
}


def check_presence(facts: Facts) -> Iterator[Finding]:
    """Are there engines of both kinds, and do they keep in touch?"""
    if facts.engines is None:
        return
    if not facts.engines:
        yield problem(
            "no_engines",
            "no engine is registered: nothing is announced, and nothing reused",
            "ListEngines is empty",
            f"{_CONNECTOR}; its log says control_plane_unreachable where it cannot get there",
        )
        return
    if not facts.decode():
        yield problem(
            "no_decode_engine",
            "no decode engine is registered: nothing is ever retained",
            f"only prefill: {_names(facts.prefill())}",
            f'start decode engines with "kv_role": "kv_consumer"; {_CONNECTOR}',
        )
    if not facts.prefill():
        yield problem(
            "no_prefill_engine",
            "no prefill engine is registered: KV that is held is never pulled",
            f"only decode: {_names(facts.decode())}",
            f'start prefill engines with "kv_role": "kv_producer"; {_CONNECTOR}',
        )
    for engine in facts.engines:
        if engine.contact is m.EngineContact.SILENT:
            yield problem(
                "engine_silent",
                f"{engine.spec.engine_id} was heard of, and then no more: what it holds is not handed out",
                f"its stream broke; last heard of {_ago(engine.last_seen_s)}",
                "see whether its process lives, and whether its network lets it reach the control plane",
            )
        elif (
            not engine.attached
            and engine.contact is not m.EngineContact.UNKNOWN
            and engine.registered_s > UNATTACHED_S
        ):
            yield problem(
                "engine_not_attached",
                f"{engine.spec.engine_id} is registered, but has no stream: it is not told what to free"
                + ("" if engine.announcements else ", and announces nothing"),
                f"registered {engine.registered_s:.0f} s ago, without AttachEngine",
                "let long-lived HTTP/2 streams through to the control plane (a proxy or load"
                " balancer between them"
                " may cut or buffer them); see kvplane.session in the engine's log",
            )


def check_roles(facts: Facts) -> Iterator[Finding]:
    """Is each engine in the role it was started for?"""
    for engine in facts.engines or ():
        said = engine.spec.settings
        meant = _ROLES.get(said.kv_role) if said is not None else None
        if said is not None and meant is not None and meant is not engine.spec.role:
            yield problem(
                "role_mismatch",
                f"{engine.spec.engine_id} is registered as {engine.spec.role}, but was started as {meant}",
                f"kv_role {said.kv_role}, role {engine.spec.role}",
                'give it the kv_role of what it is used as: "kv_producer" to prefill,'
                ' "kv_consumer" to decode',
            )
    roles = {e.spec.endpoint: e for e in facts.engines or () if e.spec.endpoint}
    for router in facts.routers:
        for used_as, other in (("prefill", m.EngineRole.DECODE), ("decode", m.EngineRole.PREFILL)):
            for url in router.engines(used_as):
                swapped = roles.get(url)
                if swapped is not None and swapped.spec.role is other:
                    yield problem(
                        "roles_swapped",
                        f"the router uses {url} to {used_as}, but it was started to {other}",
                        f"{router.url} has it under --{used_as}; {swapped.spec.engine_id}"
                        f" registered as {other}",
                        f"name it with --{other} on the router, or start it with"
                        f' "kv_role": "{"kv_producer" if used_as == "prefill" else "kv_consumer"}"',
                    )


def check_announcing(facts: Facts) -> Iterator[Finding]:
    """Do decode engines announce what they could?"""
    for engine in facts.decode():
        said = engine.spec.settings
        if said is not None and said.refusal:
            yield warning(
                "nothing_reusable",
                f"nothing that {engine.spec.engine_id} computes can be reused",
                f"its connector says {said.refusal}",
                "use a model without recurrent state, cross attention or non-causal attention, and"
                " no pipeline"
                " parallelism; or route such a model past kvplane",
            )
    routed = sum(router.requests for router in facts.routers)
    begun = sum(status.counts.turns for status in facts.statuses if status.counts is not None)
    turns = max(routed, begun)
    for engine in facts.decode():
        said, held, load = engine.spec.settings, engine.holdings, engine.load
        served = turns > 0 or (load is not None and load.running_requests > 0)
        quiet = not engine.announcements and not (held is not None and (held.conversations or held.claimed))
        if served and quiet and engine.registered_s > SILENT_S and not (said is not None and said.refusal):
            running = load.running_requests if load is not None else 0
            yield problem(
                "announces_nothing",
                f"{engine.spec.engine_id} has announced nothing, although turns were served",
                f"{turns:.0f} turns, {running} requests on it now; no announcement in"
                f" {engine.registered_s:.0f} s",
                "have its turns begun by kvplane's router, or by prefill engines with the connector; see"
                " kvplane_retain_fraction above 0, and retention_summary in the engine's log for why not",
            )
    registered = {engine.spec.endpoint for engine in facts.engines or ()}
    for http in facts.engine_https:
        if http.asked_for and http.has_metrics and not http.has_connector and http.url not in registered:
            yield problem(
                "engine_without_connector",
                f"the engine at {http.url} runs without kvplane's connector: it announces nothing",
                "its /metrics has vLLM's metrics and none of kvplane_connector",
                _CONNECTOR,
            )


def check_likeness(facts: Facts) -> Iterator[Finding]:
    """Can prefill engines read what decode engines hold?"""
    for prefill, decode in _pairs(facts):
        differing = [
            name
            for name in _MUST_EQUAL
            if getattr(prefill.spec.profile, name) != getattr(decode.spec.profile, name)
        ]
        pair = f"{prefill.spec.engine_id} (prefill) and {decode.spec.engine_id} (decode)"
        for name in differing:
            title, fix = _MUST_EQUAL[name]
            ours, theirs = getattr(prefill.spec.profile, name), getattr(decode.spec.profile, name)
            yield problem(
                f"{name}_mismatch",
                f"{pair} differ in {title}: KV of one is never offered to the other",
                f"{ours or 'not stated'} and {theirs or 'not stated'}",
                fix,
            )
        one, other = prefill.spec.settings, decode.spec.settings
        if not differing and one is not None and other is not None and one.kv_digest != other.kv_digest:
            yield problem(
                "kv_settings_mismatch",
                f"{pair} are alike by name, but compute different KV: nothing held has an equal prefix",
                f"digests {one.kv_digest[:8] or 'none'} and {other.kv_digest[:8] or 'none'}",
                "start both with the same quantisation, RoPE scaling and other --hf-overrides, draft model,"
                " multimodal processing and kvplane version",
            )


def _pairs(facts: Facts) -> Iterator[tuple[m.Engine, m.Engine]]:
    """Give for each decode engine a prefill engine that should be like it, unless one is in all.

    Each way of being different once: a hundred engines need not be named for one mistake.
    """
    told = set[tuple[object, ...]]()
    for decode in facts.decode():
        others = [e for e in facts.prefill() if e is not decode]
        same = [e for e in others if set(e.spec.served_models) & set(decode.spec.served_models)]
        candidates = same or others
        if not candidates or any(_shape(e) == _shape(decode) for e in candidates):
            continue
        prefill = candidates[0]
        shapes = (_shape(prefill), _shape(decode))
        if shapes not in told:
            told.add(shapes)
            yield prefill, decode


def _shape(engine: m.Engine) -> tuple[object, ...]:
    said = engine.spec.settings
    return (engine.spec.profile, None if said is None else said.kv_digest)


def check_caching(facts: Facts) -> Iterator[Finding]:
    """Does what decode engines hold serve the direct path, and do failed reads cost only time?"""
    off = {e.spec.engine_id: "enable_prefix_caching is false" for e in facts.decode() if _caches(e) is False}
    by_url = {e.spec.endpoint: e.spec.engine_id for e in facts.decode() if e.spec.endpoint}
    for http in facts.engine_https:
        if http.cache.get("enable_prefix_caching") == "False" and http.url in by_url:
            off.setdefault(by_url[http.url], "vllm:cache_config_info says enable_prefix_caching=False")
    for engine_id, evidence in off.items():
        yield problem(
            "prefix_caching_off",
            f"{engine_id} has no prefix cache: turns on the direct path are computed anew",
            evidence,
            "start it without --no-enable-prefix-caching",
        )
    failing = [
        engine
        for engine in facts.engines or ()
        if engine.spec.settings is not None and engine.spec.settings.kv_load_failure_policy == "fail"
    ]
    if failing:
        yield warning(
            "load_failure_policy_fail",
            f"a failed read of KV fails the request on {_names(failing)}",
            "kv_load_failure_policy fail, vLLM's default",
            'set "kv_load_failure_policy": "recompute" in their --kv-transfer-config',
        )


def _caches(engine: m.Engine) -> bool | None:
    return engine.spec.settings.prefix_caching if engine.spec.settings is not None else None


def check_addresses(facts: Facts) -> Iterator[Finding]:
    """Can engines reach each other, and routers them?"""
    several = facts.several_machines()
    troubles = {(channel.host, channel.port): channel.trouble for channel in facts.side_channels}
    channels: dict[tuple[str, int], list[str]] = defaultdict(list)
    for engine in facts.engines or ():
        said = engine.spec.settings
        if said is None or not said.side_channel_host:
            continue
        host, port = said.side_channel_host, said.side_channel_port
        channels[host, port].append(engine.spec.engine_id)
        if is_loopback(host) and several:
            yield problem(
                "side_channel_loopback",
                f"{engine.spec.engine_id} tells others to find its KV on their own machine",
                f"side channel {host}:{port}, in a fleet on several machines",
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that the other engines reach it at (or"
                " kvplane_remote_host, where that is not its own)",
            )
        elif trouble := troubles.get((host, port)):
            yield problem(
                "side_channel_unreachable",
                f"the NIXL side channel of {engine.spec.engine_id} cannot be reached from here",
                f"{host}:{port}: {trouble}",
                "open that port between engines, and see that VLLM_NIXL_SIDE_CHANNEL_HOST and"
                " VLLM_NIXL_SIDE_CHANNEL_PORT are its own",
            )
    for (host, port), names in channels.items():
        if len(names) > 1 and port:
            yield problem(
                "side_channel_shared",
                f"{' and '.join(names[:3])} name the same side channel: reads reach one of them only",
                f"{host}:{port}",
                "give engines on one machine different VLLM_NIXL_SIDE_CHANNEL_PORTs",
            )
    places: dict[tuple[str, int], list[str]] = defaultdict(list)
    for engine in facts.engines or ():
        if engine.spec.endpoint:
            places[engine.spec.endpoint, engine.spec.data_parallel_rank].append(engine.spec.engine_id)
    for (url, _), names in places.items():
        if len(names) > 1:
            yield problem(
                "endpoint_shared",
                f"{' and '.join(names[:3])} say they are at the same address",
                url,
                "give each engine its own kvplane_endpoint",
            )
        elif is_loopback(host_of(url)) and several:
            yield problem(
                "endpoint_loopback",
                f"{names[0]} tells routers to find it on their own machine",
                url,
                "set kvplane_endpoint to an address that routers reach it at, or leave it out and"
                " name the engine"
                " on the routers",
            )
    for http in facts.engine_https:
        if http.trouble and not (is_loopback(host_of(http.url)) and several):
            yield problem(
                "engine_unreachable",
                f"no engine answers at {http.url}",
                http.trouble,
                TRUST
                if http.untrusted
                else "start it, or correct its kvplane_endpoint (or --engine here); a firewall has to"
                " let its port through",
            )


def _names(engines: list[m.Engine]) -> str:
    shown = ", ".join(engine.spec.engine_id for engine in engines[:5])
    return shown + (f" and {len(engines) - 5} more" if len(engines) > 5 else "")


def _ago(seconds: float | None) -> str:
    return "at another replica" if seconds is None else f"{seconds:.0f} s ago"
