"""Reading traces, and finding which request continues which."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvplane.bench.leases.trace import LINES, Request, TraceError, link, read

BLOCK = 512
GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def request(at_s: float, tokens: int, *ids: int, reply: int = 50) -> Request:
    assert len(ids) == -(-tokens // BLOCK)
    return Request(at_s * 1000.0, tokens, reply, ids)


def previous(*requests: Request) -> list[int | None]:
    return [turn.previous for turn in link(requests)]


def test_reads_lines_plain_and_packed(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 1500.5, "hash_ids": [1, 2]}
    plain = written(tmp_path / "a.jsonl", GOOD, "", later)
    expected = [Request(0.0, 1100, 20, (1, 2, 3)), Request(1500.5, 1100, 20, (1, 2))]
    assert read(plain) == expected
    packed = tmp_path / "a.bin"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    sizes = list[int]()
    assert read(packed, told=sizes.append) == expected
    assert sum(sizes) == plain.stat().st_size


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: nested too deeply"),
        ({**GOOD, "output_length": 10**400}, f"line 2: output_length: 1{'0' * 39}… is out of range"),
        ("[1]", "line 2: not a JSON object"),
        ({**GOOD, "timestamp": "0"}, "line 2: timestamp: not a number"),
        ({**GOOD, "timestamp": True}, "line 2: timestamp: not a number"),
        ({**GOOD, "timestamp": -1}, "line 2: timestamp: -1 is out of range"),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "timestamp: nan is out of",
        ),
        ({"timestamp": 0, "output_length": 1, "hash_ids": []}, "line 2: input_length: missing"),
        ({**GOOD, "input_length": 1100.5}, "line 2: input_length: not a whole number"),
        ({**GOOD, "output_length": None}, "line 2: output_length: not a whole number"),
        ({**GOOD, "hash_ids": "1"}, "line 2: hash_ids: not a list of whole numbers"),
        ({**GOOD, "hash_ids": [1, 2, "3"]}, "line 2: hash_ids: not a list of whole numbers"),
        (
            {**GOOD, "hash_ids": [1]},
            "line 2: hash_ids: 1 ids for input_length 1100, which is 3 blocks of 512",
        ),
        ({**GOOD, "timestamp": 1}, "line 3: timestamp: earlier than the line before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    path = written(tmp_path / "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(TraceError, match="holds no requests"):
        read(written(tmp_path / "empty", ""))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(TraceError, match="compressed file ended"):
        read(cut)
    cut.write_bytes(gzip.compress(b"x")[:10] + b"\xff" * 20)
    with pytest.raises(TraceError, match="while decompressing"):
        read(cut)


def test_a_turn_continues_the_one_whose_blocks_it_begins_with() -> None:
    turns = link([request(0, 1100, 1, 2, 3), request(9, 1300, 1, 2, 4), request(20, 2000, 1, 2, 5, 6)])
    assert [(turn.previous, turn.turn_index) for turn in turns] == [(None, 1), (0, 2), (1, 3)]
    assert [turn.arrival_s for turn in turns] == [0.0, 9.0, 20.0]


def test_what_is_no_continuation() -> None:
    first = request(0, 1100, 1, 2, 3, reply=300)
    assert previous(first, request(0, 1500, 1, 2, 4)) == [None, None]  # at the same time
    assert previous(first, request(9, 1100, 1, 2, 3)) == [None, None]  # the same again
    assert previous(first, request(9, 1250, 1, 2, 4)) == [None, None]  # too short for the reply
    assert previous(first, request(9, 1275, 1, 2, 4)) == [None, 0]  # as it is trimmed
    assert previous(first, request(9, 1500, 1, 5, 4)) == [None, None]  # edited in a whole block
    assert previous(request(0, 500, 1), request(9, 800, 1, 2)) == [None, None]  # nothing whole to go by


def test_each_is_continued_once_and_by_the_first() -> None:
    first = request(0, 1100, 1, 2, 3)
    assert previous(first, request(9, 1300, 1, 2, 4), request(12, 1400, 1, 2, 5)) == [None, 0, 1]
    fork = (request(9, 1600, 1, 2, 4, 5), request(12, 1700, 1, 2, 6, 7))
    assert previous(first, *fork) == [None, 0, None]


def test_the_longest_and_then_the_latest_is_continued() -> None:
    short, long = request(0, 600, 1, 2), request(0, 1100, 1, 3, 4)
    assert previous(short, long, request(9, 1700, 1, 3, 5, 6)) == [None, None, 1]
    twins = (request(0, 1100, 1, 2, 3), request(1, 1100, 1, 2, 3))
    assert previous(*twins, request(9, 1300, 1, 2, 4)) == [None, None, 1]


def test_a_system_prompt_links_nobody_once_it_is_known() -> None:
    """Conversations that have nothing in common but their first ten blocks, each with two turns."""
    system = tuple(range(100, 110))
    requests = list[Request]()
    for conversation in range(40):
        own = 1000 + 10 * conversation
        at = 10.0 * conversation
        requests.append(request(at, 5900, *system, own, own + 1))
        requests.append(request(at + 5, 6500, *system, own, own + 2, own + 3))
    assert previous(*requests) == [None if number % 2 == 0 else number - 1 for number in range(80)]
    # With nothing whole of their own, few are taken for each other, and none later on.
    short = [request(10.0 * n, 5200 + n % 7, *system, 2000 + n) for n in range(200)]
    links = [number for number, other in enumerate(previous(*short)) if other is not None]
    assert len(links) <= 10 * LINES
    assert all(number < 40 for number in links)


def test_repetitions_of_a_prompt_do_not_make_it_common() -> None:
    again = [request(float(n), 1100, 1, 2, 3) for n in range(3 * LINES)]
    assert previous(*again, request(50, 1300, 1, 2, 4))[-1] == len(again) - 1


def test_links_depend_on_earlier_requests_only() -> None:
    requests = [
        request(
            float(n),
            600 + 97 * (n * 7919 % 31),
            1,
            *(10 * (n % 9) + i for i in range((599 + 97 * (n * 7919 % 31)) // BLOCK)),
        )
        for n in range(120)
    ]
    whole = previous(*requests)
    assert any(other is not None for other in whole)
    for end in (1, 30, 77):
        assert previous(*requests[:end]) == whole[:end]
