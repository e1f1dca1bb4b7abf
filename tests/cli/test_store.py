"""`kvplane store`: what people see of check, dump, restore and purge, on a store in memory and on etcd."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.rig.etcd import EtcdServer
from deploy.rig.process import free_ports
from kvplane.cli import store as commands
from kvplane.cli.config import Config, load_config
from kvplane.cli.entry import app
from kvplane.cli.errors import StartError
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import EngineId, EngineRole, EngineSpec
from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.schema import Schema, ensure_schema
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.base import Delete, KeyValue, Operation, Page, Put, Store
from kvplane.store.clock import Clock, SystemClock
from kvplane.store.errors import StoreError, StoreFullError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.url import open_store

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")
CONVERSATION = m.ConversationKey("t", "m", "", "c")
HOLDER = m.Holder("d", 7, "r")


async def fill(store: Store, clock: Clock, *, live: bool = True) -> None:
    """Write what a control plane would have: one engine (if `live`) that retains one conversation."""
    await ensure_schema(store)
    until_ms = clock.now_ms() + 400_000
    fingerprint = m.Fingerprint(64, b"12345678")
    location = m.Location(CONVERSATION, HOLDER, 5, 64, 4, b"{}", fingerprint, until_ms)
    lease = (await store.grant_lease(400)).lease_id
    spec = m.EngineSpec(HOLDER.engine_id, m.EngineRole.DECODE)
    engine = m.Engine(spec, HOLDER.engine_epoch, lease, clock.now_ms())
    location_key = keys.location(CONVERSATION)
    operations: list[Operation] = [
        Put(keys.epoch("d"), records.dump_epoch(7), lease),
        Put(location_key, records.dump_location(location), lease),
        Put(keys.holding(HOLDER), records.dump_holding(location_key=location_key), lease),
        Put(keys.turns(CONVERSATION), records.dump_turns(m.Turns(5, "r", 5)), lease),
    ]
    if live:
        operations.append(Put(keys.engine("d"), records.dump_engine(engine), lease))
    assert (await store.transact([], operations)).succeeded


class Memory:
    """A store in memory for commands that each run in an event loop of their own."""

    def __init__(self) -> None:
        self.items: tuple[KeyValue, ...] = ()
        self.fault: StoreError | None = None

    @asynccontextmanager
    async def opened(self, config: Config, clock: Clock) -> AsyncIterator[Store]:
        store = _Faulty(clock)
        leases: dict[int, int] = {0: 0}
        for item in self.items:
            if item.lease_id not in leases:
                leases[item.lease_id] = (await store.grant_lease(1000)).lease_id
            await store.transact([], [Put(item.key, item.value, leases[item.lease_id])])
        store.fault = self.fault
        yield store
        store.fault = None
        self.items = (await store.scan(b"")).items
        await store.aclose()

    def change(self, work: Callable[[Store, Clock], Awaitable[object]]) -> None:
        async def run() -> None:
            clock = SystemClock()
            async with self.opened(load_config({}), clock) as store:
                await work(store, clock)

        asyncio.run(run())

    @property
    def keys(self) -> set[bytes]:
        return {item.key for item in self.items}


class _Faulty(MemoryStore):
    fault: StoreError | None = None

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        if self.fault is not None:
            raise self.fault
        return await super().scan(prefix, after=after, limit=limit)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(commands, "opened", memory.opened)
    return memory


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["store", *arguments], input=text)


def refused(*arguments: str, text: str | bytes | None = None) -> str:
    """Run what has to fail, and return its one line."""
    result = run(*arguments, text=text)
    assert isinstance(result.exception, StartError), (result.output, result.exception)
    said = str(result.exception)
    assert "\n" not in said
    return said


def dump_to(file: Path) -> None:
    assert run("dump", str(file)).exit_code == 0


# check


def test_a_clean_store_is_said_to_be_so(memory: Memory) -> None:
    memory.change(fill)
    result = run("check")
    assert result.exit_code == 0
    assert "nothing is wrong" in result.output
    for kind in ("schema", "locations", "turns", "engines", "holdings", "epochs"):
        assert re.search(rf"^{kind} +1 +\d+$", result.stdout, re.MULTILINE)
    assert re.search("^schema +1, readable from 1 on$", result.stdout, re.MULTILINE)


def test_findings_are_named_explained_and_fail_the_check(memory: Memory) -> None:
    memory.change(fill)
    memory.change(lambda store, _: store.transact([], [Delete(keys.holding(HOLDER))]))
    result = run("check")
    assert result.exit_code == 1
    assert "location_without_holding: 1 (its engine can neither withdraw nor renew it)" in result.stdout
    assert "locations 't' 'm' '' 'c'" in result.stdout


def test_a_check_for_programs(memory: Memory) -> None:
    memory.change(fill)
    memory.change(lambda store, _: store.transact([], [Put(b"zz", b"")]))
    result = run("check", "--output", "json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["clean"] is False
    assert report["schema"] == {"schema": 1, "least_reader": 1}
    assert report["kinds"]["turns"]["records"] == 1
    assert report["findings"] == {"foreign": {"count": 1, "examples": ["foreign b'zz'"]}}


# dump and restore


def test_a_dump_is_restored_elsewhere_without_anything_about_blocks(memory: Memory, tmp_path: Path) -> None:
    memory.change(fill)
    file = tmp_path / "dump"
    result = run("dump", str(file))
    assert re.fullmatch(r"dumped 6 records at revision \d+\n", result.stderr)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    memory.items = ()
    result = run("restore", str(file))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "restored: 1 epochs, 1 turns",
        "not restored, since engines announce anew what they retain: 1 engines, 1 holdings, 1 locations",
    ]
    assert memory.keys == {keys.schema(), keys.epoch("d"), keys.turns(CONVERSATION)}


def test_dump_and_restore_through_pipes(memory: Memory) -> None:
    memory.change(fill)
    result = run("dump", "-")
    assert [*map(json.loads, result.stdout.splitlines())][-1]["records"] == 6
    memory.items = ()
    assert run("restore", "-", text=result.stdout).exit_code == 0
    assert keys.epoch("d") in memory.keys


def test_a_dump_that_fails_leaves_the_older_file_and_no_other(memory: Memory, tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.write_text("older")
    memory.fault = StoreUnavailableError("no endpoint answers")
    assert refused("dump", str(file)) == "the store cannot be used: no endpoint answers"
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "older"


def test_a_restore_over_records_has_to_be_forced(memory: Memory, tmp_path: Path) -> None:
    memory.change(fill)
    dump_to(tmp_path / "dump")
    before = memory.keys
    assert "not empty" in refused("restore", str(tmp_path / "dump"))
    result = run("restore", "--force", str(tmp_path / "dump"))
    assert "left as they are, since the store's are as new: 1 epochs, 1 turns" in result.stdout
    assert memory.keys == before


def test_nothing_of_a_bad_dump_is_written(memory: Memory, tmp_path: Path) -> None:
    memory.change(fill)
    file = tmp_path / "dump"
    dump_to(file)
    memory.items = ()
    lines = file.read_text().splitlines(keepends=True)
    for bad, said in [
        (lines[:-1], f"{file}: the dump is cut short"),
        ([*lines[:3], "{}\n", *lines[3:]], f"{file}: line 4: key or value"),
        (["hello\n"], f"{file}: not a dump of 'kvplane store dump'"),
        ([], "it is empty"),
    ]:
        file.write_text("".join(bad))
        assert said in refused("restore", str(file))
        assert memory.keys == set()
    assert "standard input: not a dump" in refused("restore", "-", text=b"\xff\x00")


def test_files_that_cannot_be_are_named(memory: Memory, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "dump"
    assert refused("restore", str(absent)) == f"{absent}: no such file or directory"
    assert refused("dump", str(absent)) == f"{absent}: no such file or directory"
    assert refused("restore", str(tmp_path)) == f"{tmp_path}: is a directory"
    assert refused("dump", str(tmp_path)) == f"{tmp_path}: is a directory"


def test_turns_that_are_too_old_are_said_to_be_skipped(memory: Memory, tmp_path: Path) -> None:
    memory.change(fill)
    file = tmp_path / "dump"
    dump_to(file)
    header, rest = file.read_text().split("\n", 1)
    file.write_text(json.dumps({**json.loads(header), "time_ms": 5}) + "\n" + rest)
    memory.items = ()
    result = run("restore", str(file))
    assert "skipped, since they would have been forgotten by now: 1 turns" in result.stdout


# purge


@pytest.mark.parametrize("more", [[], ["--all"], ["--all", "--force"], ["--engine", "d"]])
def test_an_older_version_does_not_purge_a_newer_ones_store(memory: Memory, more: list[str]) -> None:
    memory.change(fill)
    memory.change(lambda store, _: ensure_schema(store, Schema(9, 9)))
    before = memory.keys
    assert "the newer one's 'kvplane store purge --all'" in refused("purge", "--yes", *more)
    assert memory.keys == before


def test_a_store_that_older_versions_may_use_and_one_of_a_damaged_schema_are_purged(memory: Memory) -> None:
    memory.change(lambda store, _: ensure_schema(store, Schema(9, 1)))
    assert run("purge", "--yes", "--all").stdout == "purged: 1 schema\n"
    memory.change(lambda store, _: store.transact([], [Put(keys.schema(), b"\xff")]))
    assert run("purge", "--yes", "--all").stdout == "purged: 1 schema\n"


def test_a_purge_under_live_engines_has_to_be_forced(memory: Memory) -> None:
    memory.change(fill)
    before = memory.keys
    assert "live engines are concerned (d)" in refused("purge", "--yes")
    assert memory.keys == before
    assert "purged: 1 engines, 1 holdings, 1 locations, 1 turns" in run("purge", "--yes", "--force").stdout
    assert memory.keys == {keys.schema(), keys.epoch("d")}
    assert "1 epochs, 1 schema" in run("purge", "--yes", "--all").stdout
    assert memory.keys == set()
    assert run("purge", "--yes").stdout == "purged: nothing\n"


def test_a_purge_asks_first_and_never_goes_on_without_an_answer(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.change(lambda store, clock: fill(store, clock, live=False))
    before = memory.keys
    assert "add --yes" in refused("purge")
    monkeypatch.setattr(commands, "_can_ask", lambda: True)
    result = run("purge", text="n\n")
    assert result.exit_code == 1
    assert "Purge 1 holdings, 1 locations, 1 turns?" in result.stderr
    assert memory.keys == before
    assert run("purge", text="").exit_code == 1
    assert memory.keys == before
    assert run("purge", text="y\n").exit_code == 0
    assert memory.keys == {keys.schema(), keys.epoch("d")}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (("--tenant", "other"), 0),
        (("--tenant", "t"), 3),
        (("--conversation", "c", "--model", "m", "--adapter", ""), 3),
        (("--conversation", "c", "--engine", "d"), 2),
        (("--engine", "d"), 2),
    ],
)
def test_a_purge_of_a_part(memory: Memory, options: tuple[str, ...], gone: int) -> None:
    memory.change(lambda store, clock: fill(store, clock, live=False))
    before = len(memory.keys)
    assert run("purge", "--yes", *options).exit_code == 0
    assert before - len(memory.keys) == gone


# What can go wrong


@pytest.mark.parametrize("option", ["tenant", "model", "adapter", "conversation", "engine"])
def test_a_name_that_nothing_can_have_is_refused(memory: Memory, option: str) -> None:
    assert f"--{option}: must be at most 256 bytes" in refused("purge", "--yes", f"--{option}", "x" * 70_000)
    assert f"--{option}: is not UTF-8" in refused("purge", "--yes", f"--{option}", "\udcff")
    assert run("purge", "--yes", f"--{option}", "x" * 256).exit_code == 0


@pytest.mark.parametrize("command", [("check",), ("dump", "-"), ("purge", "--yes")])
def test_a_store_that_cannot_be_used_is_one_line(memory: Memory, command: tuple[str, ...]) -> None:
    memory.fault = StoreUnavailableError("no endpoint answers")
    assert refused(*command) == "the store cannot be used: no endpoint answers"


def test_a_full_store_says_where_to_read_on(memory: Memory, tmp_path: Path) -> None:
    memory.change(fill)
    dump_to(tmp_path / "dump")
    memory.items, memory.fault = (), StoreFullError("no space")
    assert "NOSPACE" in refused("restore", str(tmp_path / "dump"))


def test_a_dump_for_newer_software_is_refused(memory: Memory, tmp_path: Path) -> None:
    memory.change(lambda store, _: ensure_schema(store, Schema(9, 9)))
    dump_to(tmp_path / "dump")
    memory.items = ()
    assert "takes one that knows schema 9" in refused("restore", str(tmp_path / "dump"))
    assert "schema_too_new" not in run("check").stdout


@pytest.mark.parametrize("command", [("check",), ("dump", "-"), ("purge", "--yes")])
def test_a_servers_memory_is_not_taken_for_an_empty_store(command: tuple[str, ...]) -> None:
    assert "lives in the process of the server" in refused(*command)
    assert "lives in the process of the server" in refused(*command, "--store", "memory://?history_bytes=5")


def test_a_wrong_url_is_explained() -> None:
    assert "unknown store scheme redis://" in refused("check", "--store", "redis://secret@x")


def test_the_store_is_found_as_serve_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvplane.toml"
    file.write_text('store = "file://x"\n')
    assert "file://" in refused("check", "--config", str(file))
    monkeypatch.setenv("KVPLANE_STORE", "environment://x")
    assert "environment://" in refused("check", "--config", str(file))
    assert "flag://" in refused("check", "--config", str(file), "--store", "flag://x")


# On etcd, as processes


@dataclass
class Ran:
    code: int | None
    out: str
    err: str


async def program(*arguments: str) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "store", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert b"Traceback" not in err
    return Ran(process.returncode, out.decode(), err.decode())


async def test_on_etcd_from_a_dump_over_a_purge_to_a_restore(etcd_server: EtcdServer, tmp_path: Path) -> None:
    url = f"etcd://{etcd_server.endpoint}/cli-store"
    clock = SystemClock()
    async with open_store(url, clock) as store:
        await fill(store, clock, live=False)
        file = tmp_path / "dump"
        dumped = await program("dump", str(file), "--store", url)
        assert (dumped.code, dumped.err.split(" at ")[0]) == (0, "dumped 5 records")
        found = await program("check", "--store", url)
        assert found.code == 1
        assert "location_of_gone_engine: 1" in found.out
        assert (await program("purge", "--yes", "--store", url)).code == 0
        clean = await program("check", "--output", "json", "--store", url)
        assert clean.code == 0
        assert json.loads(clean.out)["kinds"].keys() == {"schema", "epochs"}
        restored = await program("restore", "--force", str(file), "--store", url)
        assert restored.out.startswith(
            "restored: 1 turns\nleft as they are, since the store's are as new: 1 "
        )
        turns = await store.get(keys.turns(CONVERSATION))
        assert turns is not None
        assert turns.lease_id
        assert await store.get(keys.location(CONVERSATION)) is None


async def test_an_etcd_that_is_not_there_is_one_line() -> None:
    nobody = f"etcd://127.0.0.1:{free_ports(1)[0]}"
    ran = await program("check", "--store", nobody)
    assert ran.code == 2
    assert ran.err.startswith("kvplane: the store cannot be used")
    assert len(ran.err.splitlines()) == 1


async def test_a_store_that_needs_newer_software_is_not_served_from(etcd_server: EtcdServer) -> None:
    url = f"etcd://{etcd_server.endpoint}/cli-newer"
    async with open_store(url, SystemClock()) as store:
        await ensure_schema(store, Schema(9, 9))
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "serve", "--grpc-port", "0", "--store", url, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert "it takes one that knows schema 9 or later, and this one knows 1" in err.decode().splitlines()[-1]


async def test_a_replica_that_promises_other_durations_does_not_start_and_names_the_option(
    etcd_server: EtcdServer,
) -> None:
    url = f"etcd://{etcd_server.endpoint}/cli-terms"
    clock = SystemClock()
    async with open_store(url, clock) as store:
        server = ControlPlaneServer(store, clock, m.Settings())
        await server.start("127.0.0.1:0")
        process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, "serve", "--grpc-port", "0", "--store", url, "--claim-timeout", "20"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await asyncio.wait_for(process.communicate(), 60)
        await server.stop(0)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert b"task_failed" not in err
    assert "kvplane: --claim-timeout 20: the replicas that run have 30" in err.decode().splitlines()[-1]


async def test_a_control_plane_at_work_is_clean_and_not_purged_by_accident(etcd_server: EtcdServer) -> None:
    url = f"etcd://{etcd_server.endpoint}/cli-live"
    clock = SystemClock()
    async with open_store(url, clock) as store:
        server = ControlPlaneServer(store, clock, m.Settings(engine_lease_s=60))
        port = await server.start("127.0.0.1:0")
        async with ControlPlaneClient(f"127.0.0.1:{port}") as client:
            await client.register_engine(EngineSpec(EngineId("d"), EngineRole.DECODE))
            checked = await program("check", "--output", "json", "--store", url)
            assert json.loads(checked.out)["findings"] == {}
            counted = json.loads(checked.out)["kinds"]
            assert {name: counted[name]["records"] for name in ("schema", "engines", "epochs", "pulses")} == {
                "schema": 1,
                "engines": 1,
                "epochs": 1,
                "pulses": 1,
            }
            purged = await program("purge", "--yes", "--store", url)
            assert (purged.code, purged.out) == (2, "")
            assert "live engines are concerned (d)" in purged.err
        await server.stop(0)
