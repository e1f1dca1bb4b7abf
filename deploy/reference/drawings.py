"""Draw the pictures of deploy/CONCEPTS.md into deploy/pictures, or check that they are fresh.

usage: python -m deploy.reference.drawings [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.reference.svg import Picture

TARGET = Path(__file__).resolve().parents[1] / "pictures"


def turn() -> Picture:
    """The loop of a turn: who says what to whom, from top to bottom."""
    picture = Picture(
        960,
        672,
        "The loop of a turn",
        "A client's request goes to the router, which begins the turn at the control plane, chooses a path"
        " and claims the location; the prefill engine pulls the KV from the decode engine, which pulls the"
        " result and streams the reply; then it retains and announces the turn: the next one finds it.",
    )
    lanes = {"client": 84, "router": 260, "plane": 450, "P": 660, "D": 868}
    names = {
        "client": ["client"],
        "router": ["router"],
        "plane": ["control plane", "and its store"],
        "P": ["prefill engine P"],
        "D": ["decode engine D"],
    }
    for lane, x in lanes.items():
        picture.box(x - 74, 16, 148, 46, names[lane])
        picture.path(f"M{x},62 V616", "life")

    def say(y: float, source: str, target: str, line: str, kind: str = "arrow") -> None:
        start, end = lanes[source], lanes[target]
        gap = 8 if end > start else -8
        picture.path(f"M{start},{y} H{end - (gap if kind == 'tensor' else 0)}", kind)
        picture.words((start + end) / 2, y - 7, line, "deed", "middle")

    say(104, "client", "router", "turn N, whole history")
    say(138, "router", "plane", "BeginTurn")
    say(172, "plane", "router", "turn N; D holds N-1")
    picture.words(270, 194, "chooses: here, pull", "title")
    say(226, "router", "plane", "ClaimLocation")
    say(258, "router", "P", "prompt, and the location of turn N-1")
    picture.paragraph(672, 282, ["compares fingerprints,", "keeps the equal prefix"], "soft")
    say(332, "D", "P", "KV of the equal prefix", "tensor")
    picture.words(672, 358, "computes what is new", "title")
    say(392, "router", "D", "prompt, and where P has its KV")
    say(434, "P", "D", "KV of the rest", "tensor")
    say(476, "D", "router", "streams the reply")
    say(476, "router", "client", "and how it was served")
    picture.words(858, 512, "retains the blocks of turn N", "title", "end")
    say(548, "D", "plane", "AnnounceLocation: turn N, for so many seconds")
    say(590, "plane", "D", "release order for turn N-1, if it is still there")
    picture.words(16, 640, "direct: prompt and work go to D alone, nothing moves.", "soft")
    picture.words(16, 658, "cold: P computes all of the prompt. Then turn N+1 begins at the top.", "soft")
    return picture


def location() -> Picture:
    """The life of a location: what it can be, and what takes it from one to the next."""
    picture = Picture(
        960,
        570,
        "The life of a location",
        "A turn in flight becomes a retained location when its engine announces it. A claim gives it to"
        " one reader. It ends when the reader finishes or its time is over, when it expires, is superseded,"
        " withdrawn or ended, or when its engine is gone. Announced again after a loss, it is quarantined.",
    )
    picture.box(30, 40, 190, 70, ["in flight", "the turn has a number"])
    picture.box(430, 40, 190, 70, ["RETAINED", "may be claimed"], "good")
    picture.box(750, 40, 180, 70, ["CLAIMED", "one reader, finally"], "good")
    picture.box(180, 210, 190, 70, ["in quarantine", "an old reader may be there"])
    picture.box(430, 430, 190, 70, ["gone", "D frees the blocks"], "bad")

    picture.path("M220,75 H430")
    picture.paragraph(320, 48, ["D announces it;", "the newest turn counts"], "deed", "middle")
    picture.path("M620,75 H750")
    picture.words(682, 66, "ClaimLocation", "deed", "middle")
    picture.path("M200,110 V210")
    picture.paragraph(
        210, 146, ["announced again after the plane,", "or the engine's lease, was lost"], "deed"
    )
    picture.path("M370,245 H470 V110")
    picture.paragraph(378, 266, ["a claim's time", "and 10 s later"], "deed")

    picture.path("M60,110 V465 H430")
    picture.paragraph(
        70,
        330,
        ["a newer turn was announced", "before it, its conversation", "was ended, or it was refused"],
        "deed",
    )
    picture.words(70, 396, "never announced: not on record", "soft")
    picture.path("M300,280 V450 H430")
    picture.words(310, 430, "as one retained", "deed")
    picture.path("M525,110 V430")
    picture.paragraph(
        535,
        300,
        ["superseded, expired,", "ended, withdrawn,", "quota, capacity"],
        "deed",
    )
    picture.path("M840,110 V465 H620")
    picture.paragraph(
        830,
        200,
        [
            "the reader has finished;",
            "D says that it was read;",
            "or the claim's time (30 s)",
            "and 10 s are over",
        ],
        "deed",
        "end",
    )
    picture.words(
        480,
        532,
        "From anywhere to gone, at any time: the engine's lease ended, it registered anew, or forgot all.",
        "soft",
        "middle",
    )
    picture.words(
        480,
        552,
        "What is gone never comes back. Blocks are freed by agreement, never under a reader.",
        "soft",
        "middle",
    )
    return picture


def failures() -> Picture:
    """What happens at failures: which part is lost, and what the client sees."""
    picture = Picture(
        960,
        540,
        "What happens at failures",
        "Where something fails, another replica or another engine is tried, or the request is served cold."
        " Nothing outdated is offered, and reuse comes back by itself.",
    )
    columns = ((24, 216, "what fails"), (262, 330, "what happens at once"), (614, 322, "when it is back"))
    for x, _, name in columns:
        picture.words(x + 6, 34, name, "title")
    rows = (
        (
            ["a replica", "of the control plane"],
            ["engines attach to the next within 1 s,", "calls go to the others"],
            ["takes its share again"],
        ),
        (
            ["etcd, or all replicas"],
            ["requests go cold, none fails;", "engines keep what they retain"],
            ["engines announce again what they", "hold; offered 40 s later (quarantine)"],
        ),
        (
            ["decode engine D"],
            ["nothing of it is offered any more;", "its conversations go cold, on another D"],
            ["a new epoch: older locations", "are gone for good"],
        ),
        (
            ["prefill engine P"],
            ["another P; without any, D computes", "the prompt itself"],
            ["one request first,", "then its full share over 10 s"],
        ),
        (
            ["a read of KV"],
            ["P computes the prompt itself", "(kv_load_failure_policy: recompute)"],
            ["after 3 in a minute P leaves that D", "alone, and tries again after 10 s"],
        ),
        (
            ["a router"],
            ["its streams break; any other router", "goes on: it keeps no state"],
            ["takes requests again"],
        ),
    )
    for number, row in enumerate(rows):
        y = 50 + number * 76
        for (x, width, _), lines, kind in zip(columns, row, ("bad", "box", "good"), strict=True):
            picture.box(x, y, width, 60, lines, kind, named=False)
        picture.path(f"M240,{y + 30} H262")
        picture.path(f"M592,{y + 30} H614")
    never = "Never: a request that fails for want of a control plane; KV of another conversation or time."
    picture.words(480, 522, never, "soft", "middle")
    return picture


PICTURES = {"turn.svg": turn, "location.svg": location, "failures.svg": failures}


def stale() -> list[str]:
    """Return the names of pictures that are not as this program draws them."""
    return [
        name
        for name, draw in PICTURES.items()
        if not (TARGET / name).exists() or (TARGET / name).read_text() != draw().text()
    ]


def main() -> int:
    """Run as a program; 1 means that a committed picture is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a picture is stale")
    if parser.parse_args().check:
        for name in (names := stale()):
            print(f"stale: deploy/pictures/{name}; run 'make generate'", file=sys.stderr)
        return 1 if names else 0
    TARGET.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (TARGET / name).write_text(draw().text())
    print(f"drew {len(PICTURES)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
