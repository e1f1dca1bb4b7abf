"""The `kvplane` program, which also says so where what its commands need is not installed."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Of engines' environments it has the commands that need no more than is there."""
    try:
        from kvplane.cli.entry import main as run

        return run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "kvplane"):
            raise
        print(
            f"kvplane: {package} is not installed: pip install '.[router]' in a checkout of kvplane has what"
            " routers, control planes and commands need; without [router] it is for engines",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
