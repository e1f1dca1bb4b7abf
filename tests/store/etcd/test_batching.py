"""Group commit by itself, over a sender that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import Compare, Delete, Operation, Put
from kvplane.store.errors import StoreClosedError, StoreUnavailableError
from kvplane.store.etcd.batching import MAX_BATCH_BYTES, Committed, GroupCommit
from kvplane.store.etcd.convert import transaction
from kvplane.store.testing import settle


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no")


@dataclass
class Etcd:
    """Keeps what is sent until the test answers it."""

    sent: list[pb.TxnRequest] = field(default_factory=list)
    answers: list[asyncio.Future[None]] = field(default_factory=list)
    refuse: dict[bytes, grpc.StatusCode] = field(default_factory=dict)
    """By a key that is written, refused wherever it is."""
    refuse_above: int = 1000
    hold: bool = True

    async def send(self, request: pb.TxnRequest) -> pb.TxnResponse:
        self.sent.append(request)
        revision = len(self.sent)
        if self.hold:
            self.answers.append(asyncio.get_running_loop().create_future())
            await self.answers[-1]
        for member in members(request):
            for key in written(member):
                if key in self.refuse:
                    raise refusal(self.refuse[key])
        if len(members(request)) > self.refuse_above:
            raise refusal(grpc.StatusCode.INVALID_ARGUMENT)
        answer = pb.TxnResponse(succeeded=True)
        answer.header.revision = revision
        for _ in nested(request):
            answer.responses.add().response_txn.succeeded = True
        return answer

    def answer(self, place: int = 0) -> None:
        self.answers.pop(place).set_result(None)


def nested(request: pb.TxnRequest) -> list[pb.TxnRequest]:
    return [step.request_txn for step in request.success if step.HasField("request_txn")]


def members(request: pb.TxnRequest) -> list[pb.TxnRequest]:
    return nested(request) or [request]


def written(request: pb.TxnRequest) -> list[bytes]:
    return [
        step.request_put.key or step.request_delete_range.key
        for step in request.success
        if not step.HasField("request_range")
    ]


def keys(request: pb.TxnRequest) -> list[bytes]:
    """What a sent request writes, of all its members."""
    return [key for member in members(request) for key in written(member)]


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


def group(etcd: Etcd, *, in_flight: int = 1, timeout_s: float = 60.0) -> GroupCommit:
    return GroupCommit(etcd.send, timeout_s=timeout_s, in_flight=in_flight)


def commit(
    commits: GroupCommit, operations: list[Operation], compares: tuple[Compare, ...] = ()
) -> asyncio.Task[Committed]:
    return asyncio.ensure_future(commits.commit(transaction(b"", compares, operations)))


async def run(*work: Awaitable[Committed]) -> list[Committed | BaseException]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*work, return_exceptions=True)


async def behind_another(commits: GroupCommit, etcd: Etcd) -> asyncio.Task[Committed]:
    """Have a transaction under way, so that the next ones wait."""
    first = commit(commits, [Put(b"first", b"")])
    await settle()
    assert keys(etcd.sent[-1]) == [b"first"]
    return first


async def test_an_idle_group_sends_at_once_and_not_nested(etcd: Etcd) -> None:
    commits = group(etcd)
    task = commit(commits, [Put(b"a", b"")])
    for _ in range(3):  # the task's first step, the end of the turn, the batch's first step
        await asyncio.sleep(0)
    assert [nested(request) for request in etcd.sent] == [[]]
    etcd.answer()
    assert (await task).revision == 1
    assert commits.counters.batches == commits.counters.transactions == 1


async def test_what_comes_in_one_turn_goes_together(etcd: Etcd) -> None:
    commits = group(etcd)
    etcd.hold = False
    done = await run(*[commit(commits, [Put(b"%d" % n, b"")]) for n in range(20)])
    assert [keys(request) for request in etcd.sent] == [[b"%d" % n for n in range(20)]]
    assert {committed.revision for committed in done if isinstance(committed, Committed)} == {1}
    assert (commits.counters.batches, commits.counters.transactions) == (1, 20)


async def test_what_comes_while_others_are_under_way_goes_together_after_them(etcd: Etcd) -> None:
    commits = group(etcd)
    first = await behind_another(commits, etcd)
    rest = [commit(commits, [Put(b"%d" % n, b"")]) for n in range(3)]
    await settle()
    assert len(etcd.sent) == 1
    etcd.answer()
    await settle()
    assert keys(etcd.sent[1]) == [b"0", b"1", b"2"]
    etcd.answer()
    await run(first, *rest)


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (([Put(b"k", b"1")], ()), ([Put(b"k", b"2")], ()), False),
        (([Put(b"k", b"1")], ()), ([Delete(b"k")], ()), False),
        (([Delete(b"k")], ()), ([Delete(b"k")], ()), False),
        (([Put(b"k", b"1")], ()), ([Put(b"x", b"2")], (Compare(b"k", 1),)), False),
        (([Put(b"x", b"1")], (Compare(b"k", 1),)), ([Delete(b"k")], ()), False),
        (([Put(b"k", b"1")], ()), ([], (Compare(b"k", 1),)), False),
        (([Put(b"x", b"1")], (Compare(b"k", 1),)), ([Put(b"y", b"2")], (Compare(b"k", 1),)), True),
        (([], (Compare(b"k", 1),)), ([], (Compare(b"k", 1),)), True),
        (([Put(b"k", b"1")], ()), ([Put(b"k2", b"2")], ()), True),
    ],
)
async def test_no_two_go_together_of_which_one_writes_what_the_other_sees(
    etcd: Etcd,
    one: tuple[list[Operation], tuple[Compare, ...]],
    other: tuple[list[Operation], tuple[Compare, ...]],
    together: bool,
) -> None:
    commits = group(etcd)
    etcd.hold = False
    done = await run(commit(commits, *one), commit(commits, *other))
    assert all(isinstance(committed, Committed) for committed in done)
    assert [len(members(request)) for request in etcd.sent] == ([2] if together else [1, 1])


async def test_who_conflicts_lets_others_pass_and_is_first_in_the_next_batch(etcd: Etcd) -> None:
    commits = group(etcd)
    first = await behind_another(commits, etcd)
    tasks = [commit(commits, [Put(key, b"")]) for key in (b"k", b"k", b"a", b"k", b"b")]
    etcd.hold = False
    etcd.answer()
    await run(first, *tasks)
    assert [keys(request) for request in etcd.sent[1:]] == [[b"k", b"a", b"b"], [b"k"], [b"k"]]


@pytest.mark.parametrize(("ops", "count"), [(1, 127), (4, 124), (64, 64), (127, 1), (128, 1)])
async def test_a_batch_keeps_to_the_number_of_operations_etcd_takes(etcd: Etcd, ops: int, count: int) -> None:
    commits = group(etcd)
    etcd.hold = False
    tasks = [commit(commits, [Put(b"%d/%d" % (n, op), b"") for op in range(ops)]) for n in range(count + 1)]
    await run(*tasks)
    assert [len(members(request)) for request in etcd.sent] == [count, 1]


async def test_compares_count_as_operations_do(etcd: Etcd) -> None:
    commits = group(etcd)
    etcd.hold = False
    many = tuple(Compare(b"%d" % n, 0) for n in range(126))
    await run(
        *[commit(commits, [Put(b"a", b"")], many), commit(commits, [Put(b"b", b"")])],
        commit(commits, [Put(b"c", b"")]),
    )
    assert [len(members(request)) for request in etcd.sent] == [2, 1]


async def test_a_batch_keeps_to_the_size_etcd_takes(etcd: Etcd) -> None:
    commits = group(etcd)
    etcd.hold = False
    value = bytes(MAX_BATCH_BYTES // 4)
    await run(*[commit(commits, [Put(b"%d" % n, value)]) for n in range(5)])
    assert [len(members(request)) for request in etcd.sent] == [3, 2]
    assert max(request.ByteSize() for request in etcd.sent) <= MAX_BATCH_BYTES
    await run(*[commit(commits, [Put(b"%d" % n, bytes(1_400_000))]) for n in range(2)])
    assert [len(members(request)) for request in etcd.sent[2:]] == [1, 1]


async def test_so_many_batches_are_under_way_and_no_more(etcd: Etcd) -> None:
    commits = group(etcd, in_flight=2)
    tasks = []
    for n in range(4):
        tasks.append(commit(commits, [Put(b"%d" % n, b"")]))
        await settle()
    assert [keys(request) for request in etcd.sent] == [[b"0"], [b"1"]]
    etcd.answer(1)
    await settle()
    assert keys(etcd.sent[2]) == [b"2", b"3"]
    etcd.answer()
    etcd.answer()
    await run(*tasks)


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT],
)
async def test_a_batch_refused_for_one_of_it_is_sent_one_by_one(etcd: Etcd, code: grpc.StatusCode) -> None:
    commits = group(etcd)
    etcd.hold, etcd.refuse = False, {b"1": code}
    done = await run(*[commit(commits, [Put(b"%d" % n, b"")]) for n in range(3)])
    assert [type(committed) for committed in done] == [Committed, grpc.aio.AioRpcError, Committed]
    assert [keys(request) for request in etcd.sent] == [[b"0", b"1", b"2"], [b"0"], [b"1"], [b"2"]]
    assert commits.counters.alone == 3


async def test_a_server_with_lower_limits_gets_smaller_batches(etcd: Etcd) -> None:
    commits = group(etcd)
    etcd.hold, etcd.refuse_above = False, 10
    for _ in range(2):
        done = await run(*[commit(commits, [Put(b"%d" % n, b"")]) for n in range(16)])
        assert all(isinstance(committed, Committed) for committed in done)
    assert [len(members(request)) for request in etcd.sent] == [16, *[1] * 16, 8, 8]


async def test_of_an_unknown_outcome_all_are_told_and_nothing_is_sent_again() -> None:
    sent = 0

    async def send(request: pb.TxnRequest) -> pb.TxnResponse:
        nonlocal sent
        sent += 1
        raise StoreUnavailableError("gone")

    commits = GroupCommit(send, timeout_s=60.0)
    done = await run(*[commit(commits, [Put(b"%d" % n, b"")]) for n in range(3)])
    assert [type(error) for error in done] == [StoreUnavailableError] * 3
    assert len({id(error) for error in done}) == 3  # each raises one of its own
    assert sent == 1


async def test_an_error_nobody_foresaw_leaves_nobody_waiting() -> None:
    async def send(request: pb.TxnRequest) -> pb.TxnResponse:
        return pb.TxnResponse()  # no answers for the members

    commits = GroupCommit(send, timeout_s=60.0)
    done = await run(*[commit(commits, [Put(b"%d" % n, b"")]) for n in range(2)])
    assert [type(error) for error in done] == [StoreUnavailableError] * 2


async def test_cancelled_before_it_was_sent_it_never_is(etcd: Etcd) -> None:
    commits = group(etcd)
    first = await behind_another(commits, etcd)
    tasks = [commit(commits, [Put(b"%d" % n, b"")]) for n in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    etcd.hold = False
    etcd.answer()
    await run(first, tasks[0], tasks[2])
    assert keys(etcd.sent[1]) == [b"0", b"2"]
    assert tasks[1].cancelled()


async def test_cancelled_afterwards_it_concerns_nobody_else(etcd: Etcd) -> None:
    commits = group(etcd)
    tasks = [commit(commits, [Put(b"%d" % n, b"")]) for n in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert not tasks[0].done()
    etcd.answer()
    done = await run(*tasks)
    assert [type(committed) for committed in done] == [Committed, asyncio.CancelledError, Committed]
    assert keys(etcd.sent[0]) == [b"0", b"1", b"2"]


async def test_no_answer_in_time_is_an_unknown_outcome(etcd: Etcd) -> None:
    commits = group(etcd, timeout_s=0.05)
    first = await behind_another(commits, etcd)
    waiting = commit(commits, [Put(b"waiting", b"")])
    assert [type(error) for error in await run(first, waiting)] == [StoreUnavailableError] * 2
    etcd.hold = False
    etcd.answer()
    await settle()
    assert len(etcd.sent) == 1  # what had waited in vain was not sent
    await run(commit(commits, [Put(b"next", b"")]))
    await commits.aclose()


async def test_closing_tells_those_under_way_and_those_that_wait(etcd: Etcd) -> None:
    commits = group(etcd)
    first = await behind_another(commits, etcd)
    waiting = commit(commits, [Put(b"waiting", b"")])
    await settle()
    await commits.aclose()
    await commits.aclose()
    assert [type(error) for error in await run(first, waiting)] == [StoreClosedError] * 2
    with pytest.raises(StoreClosedError):
        await commit(commits, [Put(b"late", b"")])
