"""Leases replayed on small traces; what a policy brings and costs, to the block-second."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvplane.bench.leases import curve, plot
from kvplane.bench.leases.replay import Adaptive, Fixed, Outcome, Setting, replay
from kvplane.bench.leases.trace import Turn
from kvplane.bench.rig import BenchError
from tests.bench.test_commands import bench

AT_ONCE = Setting(ms_per_token=0.0)


def turn(number: int, at_s: float, previous: int | None = None, tokens: int = 1000, reply: int = 24) -> Turn:
    return Turn(number, at_s, tokens, reply, 1 if previous is None else 2, previous)


def test_a_fixed_lease_to_the_block_second() -> None:
    turns = [turn(0, 0.0), turn(1, 30.0, 0, tokens=1500), turn(2, 200.0)]
    outcome = replay(turns, Fixed(30.0), AT_ONCE)  # back at the very end of the lease: a hit
    assert outcome == Outcome(
        turns=3,
        follow_ups=1,
        hits=1,
        prompt_tokens=3500,
        tokens_saved=1024,
        block_seconds=2 * 30.0 + 3 * 30.0,  # the last one is retained when the trace ends
        given_up=0,
        most_blocks=3,
    )
    assert outcome.hit_rate == 1.0
    outcome = replay(turns, Fixed(29.9), AT_ONCE)
    assert (outcome.hits, outcome.tokens_saved) == (0, 0)
    assert outcome.block_seconds == pytest.approx(5 * 29.9)


def test_a_turn_is_retained_from_its_end_on() -> None:
    turns = [turn(0, 0.0, reply=100), turn(1, 40.0, 0, tokens=1500, reply=10_000)]
    assert replay(turns, Fixed(100.0), Setting(ms_per_token=100.0)).block_seconds == 3 * 30.0
    # One that comes back before the modelled end was over by then.
    assert replay(turns, Fixed(100.0), Setting(ms_per_token=1000.0)).hits == 1


def test_a_reply_that_is_dropped_saves_no_more_than_the_prompt_has() -> None:
    turns = [turn(0, 0.0, tokens=1000, reply=500), turn(1, 5.0, 0, tokens=1400)]
    assert replay(turns, Fixed(10.0), AT_ONCE).tokens_saved == 1400


def test_a_budget_gives_up_the_oldest_first() -> None:
    turns = [turn(number, float(number)) for number in range(4)]
    turns += [turn(4, 10.0, 0, tokens=1500), turn(5, 11.0, 3, tokens=1500)]
    outcome = replay(turns, Fixed(100.0), Setting(ms_per_token=0.0, budget=7))
    assert (outcome.hits, outcome.given_up) == (1, 3)  # only the last is still there
    assert outcome.most_blocks <= 7


def chat(
    gap_of: Callable[[int, Random], float | None], count: int, every_s: float = 1.2, seed: int = 3
) -> list[Turn]:
    """Conversations that begin at a steady rate and whose turns come back after a gap, or not."""
    random = Random(seed)
    raw = list[tuple[float, int, int, int]]()  # arrival, conversation, index, tokens
    for conversation in range(count):
        at, index, tokens = conversation * every_s, 1, random.choice((1500, 4000, 9000))
        while True:
            raw.append((at, conversation, index, tokens))
            gap = gap_of(index, random) if index < 12 else None
            if gap is None:
                break
            at, index, tokens = at + gap, index + 1, tokens + 400
    last = dict[int, int]()
    turns = list[Turn]()
    for number, (at, conversation, index, tokens) in enumerate(sorted(raw)):
        turns.append(Turn(number, at, tokens, 200, index, last.get(conversation)))
        last[conversation] = number
    return turns


def halfway(before: float, after: float) -> Callable[[int, Random], float | None]:
    seen = [0]

    def gap(_: int, random: Random) -> float | None:
        seen[0] += 1
        mean = before if seen[0] < 1800 else after
        return random.uniform(0.7, 1.3) * mean if random.random() < 0.5 else None

    return gap


HABITS: dict[str, tuple[Callable[[int, Random], float | None], int, float, float]] = {
    # gap, conversations, least share of tokens saved, most share of block-seconds
    "all within 20 s": (lambda i, r: r.uniform(2, 20), 300, 0.97, 1.0),
    "half within 20 s": (lambda i, r: r.uniform(2, 20) if r.random() < 0.5 else None, 1600, 0.97, 0.45),
    "nobody": (lambda i, r: None, 2000, 0.0, 0.6),
    "bimodal": (
        lambda i, r: (
            (r.uniform(3, 10) if r.random() < 0.6 else r.uniform(200, 400)) if r.random() < 0.6 else None
        ),
        1400,
        0.93,
        1.0,
    ),
    "bursts of an agent": (lambda i, r: r.expovariate(0.5) if r.random() < 0.85 else None, 1200, 0.97, 0.55),
    "slower from halfway on": (halfway(15.0, 250.0), 1600, 0.75, 1.0),
    "faster from halfway on": (halfway(250.0, 15.0), 1600, 0.93, 1.0),
}


@pytest.mark.parametrize("habit", HABITS)
def test_adaptive_is_never_much_worse_than_fixed(habit: str) -> None:
    gap, conversations, least_saved, most_held = HABITS[habit]
    turns = chat(gap, conversations)
    fixed = replay(turns, Fixed(480.0), AT_ONCE)
    adaptive = replay(turns, Adaptive(max_ttl_s=480.0), AT_ONCE)
    assert adaptive.tokens_saved >= least_saved * fixed.tokens_saved
    assert adaptive.block_seconds <= most_held * fixed.block_seconds


def test_a_budget_is_better_spent_on_those_that_come_back() -> None:
    turns = chat(lambda i, r: r.uniform(30, 120) if r.random() < (0.1 if i == 1 else 0.9) else None, 1500)
    whole = replay(turns, Fixed(480.0), AT_ONCE)
    setting = Setting(ms_per_token=0.0, budget=whole.most_blocks // 10)
    fixed = replay(turns, Fixed(480.0), setting)
    adaptive = replay(turns, Adaptive(max_ttl_s=480.0), setting)
    assert adaptive.tokens_saved > 1.15 * fixed.tokens_saved
    assert adaptive.most_blocks <= whole.most_blocks // 10


def test_the_same_seed_gives_the_same_run() -> None:
    turns = chat(lambda i, r: r.uniform(5, 90) if r.random() < 0.5 else None, 400)
    runs = [replay(turns, Adaptive(max_ttl_s=480.0, seed=seed), AT_ONCE) for seed in (7, 7)]
    assert runs[0] == runs[1]


def test_the_curve_compares_with_the_longest_lease() -> None:
    turns = chat(lambda i, r: r.uniform(5, 90) if r.random() < 0.5 else None, 150)
    plan = curve.Plan(max_ttl_s=100.0, setting=Setting(budget=400), shares=(0.9,))
    names, played = list[str](), list[int]()
    points = curve.run(turns, plan, begun=names.append, told=played.append)
    assert len(names) == plan.replays
    assert sum(played) == plan.replays * len(turns)
    assert [point.name for point in points][-3:] == [
        "fixed 100 s",
        "adaptive, keep 90%",
        "adaptive (default)",
    ]
    assert all(point.saved_share <= 1.0 for point in points)
    free = curve.run(turns, curve.Plan(max_ttl_s=100.0, shares=()))
    longest = next(point for point in free if point.value == 100.0)
    assert (longest.saved_share, longest.held_share) == (1.0, 1.0)
    assert 0 < (curve.held_share_at(free, curve.FIXED, 0.5) or 0) < 1
    assert curve.held_share_at(free, curve.FIXED, 1.5) is None


def test_a_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install 'kvplane\[demo\]'"):
        plot.check()


def test_the_command_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    trace = Path(__file__).parent / "data" / "conversations.jsonl"
    figures, picture = tmp_path / "figures.json", tmp_path / "curve.svg"
    done = bench("retention", str(trace), "--json", str(figures), "--plot", str(picture), "--max-ttl", "300")
    assert done.returncode == 0, done.stderr
    assert "fixed 300 s" in done.stdout
    assert "adaptive (default)" in done.stdout
    document = json.loads(figures.read_text())
    assert document["trace"] == "conversations.jsonl"
    longest = next(row for row in document["results"] if row["value"] == 300.0)
    assert longest["saved_share"] == longest["held_share"] == 1.0
    assert longest["hits"] == longest["follow_ups"] > 5
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: no such file or directory"),
        (("x", "--plot", "curve.gif"), "--plot curve.gif: must end in .svg or .png"),
        (("x", "--json", "/nowhere/x"), "--json /nowhere/x: cannot be written"),
        ((__file__,), "line 1: not JSON"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = bench("retention", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
