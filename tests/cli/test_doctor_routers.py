"""What the doctor finds at routers, and in the files that it is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trustme

from kvplane.cli.doctor.facts import Facts, RouterFacts
from kvplane.cli.doctor.router_checks import check_routers
from kvplane.router.tls import ServerFiles
from tests.cli.fleet import EngineHttp, Fleet, comes_true, healthy, says
from tests.cli.people import run


async def test_a_router_that_is_not_there_or_is_none(f: Fleet) -> None:
    await healthy(f)
    f.routers = ["http://127.0.0.1:1"]
    says(await f.diagnosed(), "router_unreachable", "--router URL", "127.0.0.1:1")
    http = EngineHttp()
    await f.spec("x", "decode", http=http)
    f.routers = [http.url]
    says(await f.diagnosed(), "router_unreachable", "kvplane route", "no router of kvplane's")


async def test_a_router_without_control_plane_and_without_an_engine(f: Fleet) -> None:
    await f.plane()
    p, d = await f.engine("p", "prefill"), await f.engine("d", "decode")
    gone = "http://127.0.0.1:1"
    await f.router(prefill_urls=(p.endpoint,), decode_urls=(d.endpoint, gone), plane_address=None)
    found = await f.diagnosed()
    says(found, "router_without_plane", "--plane HOST:PORT")
    says(found, "router_cannot_reach_engine", "--decode", gone)
    assert set(found) == {"router_without_plane", "router_cannot_reach_engine"}


async def test_a_router_whose_control_plane_is_another(f: Fleet) -> None:
    await healthy(f)
    urls = [engine.spec.endpoint for engine in await (await f.client()).list_engines()]
    await f.router(decode_urls=(urls[0],), prefill_urls=(urls[1],), plane_address="127.0.0.1:1")
    says(await f.diagnosed(), "router_lost_plane", "--grpc-host")


async def test_a_router_that_hears_nothing_of_its_decode_engine(f: Fleet) -> None:
    await f.plane()
    await f.engine("p", "prefill")
    stock = EngineHttp("vllm:num_requests_running 1\n")
    await f.spec("x", "decode", http=stock)
    url = await f.router(decode_urls=(stock.url,), poll_interval_s=0.02)

    async def told() -> bool:
        found = await f.diagnosed()
        return "no announcements from" in str(found.get("router_degraded"))

    await comes_true(told)
    says(await f.diagnosed(), "router_degraded", "do as it says", url, "KVPlaneConnector")


def test_roles_that_only_the_router_knows_to_be_swapped() -> None:
    line = "http://d:8200 is given with --prefill, but registered as a decode engine"
    router = RouterFacts("http://r:8000", ready={"control_plane": "up", "problems": [line]})
    (finding,) = check_routers(Facts(routers=(router,)))
    says({finding.code: finding}, "roles_swapped", "swap --prefill and --decode", line, router.url)


async def test_who_cannot_be_connected_to_is_told_without_tls(f: Fleet) -> None:
    await healthy(f)
    f.routers = ["http://127.0.0.1:1"]
    trouble = (await f.diagnosed())["router_unreachable"].evidence
    assert trouble == "cannot connect to 127.0.0.1:1: Connection refused"


def test_two_problems_of_a_router_have_two_titles() -> None:
    said = ["two engines at http://a: one of them is old", "no prefill engine is up"]
    router = RouterFacts("http://r", health={"status": "degraded", "problems": said})
    titles = [finding.what for finding in check_routers(Facts(routers=(router,)))]
    assert titles == [
        "the router at http://r is not as it should be: two engines at http://a",
        "the router at http://r is not as it should be: no prefill engine is up",
    ]


async def test_files_of_tenants_and_of_access_that_make_no_sense(f: Fleet, tmp_path: Path) -> None:
    await healthy(f)
    bad, good = tmp_path / "bad.toml", tmp_path / "good.toml"
    await asyncio.to_thread(bad.write_text, "[tenants.a]\nblocs = 7\n")
    await asyncio.to_thread(good.write_text, "[tenants.a]\nblocks = 7\n")
    found = await f.diagnosed(files={"--tenant-limits": bad})
    says(found, "tenants_file", "mend what is named", "--tenant-limits", "blocs")
    found = await f.diagnosed(files={"--access": bad})
    says(found, "tenants_file", "mend what is named", "--access", str(bad))
    found = await f.diagnosed(files={"--tenants": bad})
    says(found, "tenants_file", "mend what is named", "--tenants", "blocs")
    done = await run("doctor", "--plane", f.addresses[0], "--tenant-limits", str(good), "-o", "json")
    assert (done.code, done.json["findings"]) == (0, [])
    done = await run("doctor", "--plane", f.addresses[0], "--access", str(tmp_path / "none"), "-o", "json")
    assert [finding["code"] for finding in done.json["findings"]] == ["tenants_file"]


async def test_a_router_with_a_certificate_of_its_own_and_a_key(f: Fleet, tmp_path: Path) -> None:
    await healthy(f)
    ca = trustme.CA()
    files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}

    def write() -> None:
        issued = ca.issue_cert("127.0.0.1")
        ca.cert_pem.write_to_path(str(files["ca"]))
        issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
        issued.private_key_pem.write_to_path(str(files["key"]))
        (tmp_path / "operator").write_text("k-123\n")

    await asyncio.to_thread(write)
    url = await f.router(tls=ServerFiles(str(files["cert"]), str(files["key"]), None))
    url = f.routers[0] = url.replace("http:", "https:")
    says(await f.diagnosed(), "router_unreachable", "--http-ca FILE", "certificate")
    assert "--http-ca FILE" in (await run("explain", "x", "--router", url)).error
    explained = await run("explain", "x", "--router", url, "--http-ca", str(files["ca"]), "-o", "json")
    assert "Request x is not on record" in explained.error
    known = ("--http-ca", str(files["ca"]), "--api-key-file", str(tmp_path / "operator"))
    done = await run("doctor", "--plane", f.addresses[0], "--router", url, *known, "-o", "json")
    assert done.json["findings"] == []
    top = await run("top", "--once", "--plane", f.addresses[0], "--router", url, *known, "-o", "json")
    assert top.json["router"]["trouble"] is None


@pytest.mark.parametrize("option", ["--http-ca", "--api-key-file"])
async def test_files_to_reach_routers_with_are_named_if_they_are_of_no_use(
    option: str, tmp_path: Path
) -> None:
    assert f"{option} /nowhere: no such file" in (await run("doctor", option, "/nowhere")).error
    empty = tmp_path / "empty"
    await asyncio.to_thread(empty.touch)
    assert f"{option} {empty}: " in (await run("top", "--once", option, str(empty))).error
