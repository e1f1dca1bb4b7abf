"""The demo: real vLLM engines, real KV transfer, three ways to serve a follow-up turn.

usage: python -m deploy.demo.demo [--lengths 200,500,...] [--repeat 3] [--budget 480] [--out demo-out]

`make demo` installs what it needs and runs it. It starts the control plane, the router, one prefill and one
decode engine, plays conversations (see measure.py), prints a table and writes results and pictures. It stops
everything before it ends, also when it fails or is interrupted; should it be killed, the engines die with it.
"""

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deploy.demo import report
from deploy.demo.conversation import DemoError
from deploy.demo.measure import OFF, Measurement, plan, weight
from deploy.rig.engines import ROOT, tiny_model, vllm_venv
from deploy.rig.process import RigError
from deploy.rig.stack import Stack

DEFAULT_LENGTHS = (200, 500, 1000, 2000, 4100, 8100)  # texts come out a little under or over
MAX_LENGTH = 15000


def _lengths(text: str) -> list[int]:
    """Parse --lengths: prompt lengths in tokens, separated by commas."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 200,1000,4000") from None
    if lengths[0] < 150 or lengths[-1] > MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"lengths must be between 150 and {MAX_LENGTH} tokens")
    return lengths


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="measure KV reuse on real vLLM engines")
    parser.add_argument(
        "--lengths", type=_lengths, default=list(DEFAULT_LENGTHS), help="prompt lengths in tokens, by commas"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="samples per length and path (off: one if very long)"
    )
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which nothing is repeated any more"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="folder for results and logs")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


def _total_weight(lengths: list[int], repeat: int) -> float:
    """The weight of all cold turns: the first of each conversation and the measured ones of the off path."""
    total = 0.0
    for length in lengths:
        conversations = plan(length, repeat)
        total += weight(length) * (sum(conversations.values()) + conversations[OFF])
    return total


def _start(stack: Stack, progress: Progress) -> None:
    """Start everything, showing which program is waited for and what it says."""
    task = progress.add_task("starting", total=None)

    def show(name: str, waited: float, line: str) -> None:
        progress.update(task, description=f"starting {name} ({waited:.0f} s) [dim]{_plain(line)}[/dim]")

    stack.start(progress=show)
    progress.remove_task(task)


def _plain(line: str) -> str:
    """A log line made short and harmless for rich's markup."""
    return line[:60].replace("[", "(").replace("]", ")")


def run(options: argparse.Namespace, console: Console) -> None:
    """Run the demo; raises DemoError or RigError when something fails."""
    begin = time.monotonic()
    venv, model = vllm_venv(), tiny_model()
    logs = options.out / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        stack = Stack(venv=venv, model=model, log_dir=logs)
        console.print(
            "starting control plane, router, prefill engine and decode engine: some minutes on few cores;"
            f" their logs are in {logs}"
        )
        try:
            _start(stack, progress)
            console.print(f"all up after {time.monotonic() - begin:.0f} s; router at {stack.url}")
            task = progress.add_task("measuring", total=_total_weight(options.lengths, options.repeat))

            def advance(what: str, done: float) -> None:
                progress.update(task, advance=done, description=what or None)

            measurement = Measurement(stack.url, stack.prefill.url, stack.decode.url, advance=advance)
            measurement.warm_up()
            deadline = time.monotonic() + options.budget
            for length in options.lengths:
                rows.append(
                    report.as_json(
                        measurement.row(length, options.repeat, lambda: time.monotonic() > deadline)
                    )
                )
                last = rows[-1]
                console.print(
                    f"{last['prompt_tokens']:>6,} tokens: off {last['off_ms']:>8,.0f} ms   "
                    f"pull {last['pull_ms']:>6,.0f} ms   direct {last['direct_ms']:>6,.0f} ms"
                )
        finally:
            stack.stop()
    files = report.write(rows, options.out)
    console.print(report.table(rows))
    turns, hits = sum(row["reuse_turns"] for row in rows), sum(row["hits"] for row in rows)
    console.print(f"reuse: {hits} of {turns} turns that asked for it ({hits / turns:.1%})")
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True)
    console.print(f"done in {time.monotonic() - begin:.0f} s; nothing is left running")


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo from the command line; returns the exit code."""
    options = _arguments()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run(options, Console(highlight=False))
    except (DemoError, RigError, OSError) as error:
        first_line = str(error).splitlines()[0]
        print(f"demo failed: {first_line} (logs: {options.out / 'logs'})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted; everything is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
