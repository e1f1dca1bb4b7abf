"""Run one engine of the rig in the foreground, for trying things by hand. Ctrl-C stops it."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.rig.engines import ROOT, Engine, EngineSettings, Role, tiny_model, vllm_venv
from deploy.rig.process import RigError


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; None: that of the program."""
    parser = argparse.ArgumentParser(prog="python -m deploy.rig.run_engine", description=__doc__)
    parser.add_argument("role", choices=[role.value for role in Role])
    parser.add_argument("--http-port", type=int, required=True, help="port of the engine's HTTP server")
    parser.add_argument("--kvplane", default="127.0.0.1:50051", help="control plane (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="the same on all engines (default: %(default)s)")
    parser.add_argument("--log-file", type=Path, help="default: .cache/ROLE-PORT.log in the checkout")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, venv: Path, model: Path) -> EngineSettings:
    """Return what a command line asks for. Routers find the engine through its control plane, too."""
    role = Role(options.role)
    return EngineSettings(
        role=role,
        venv=venv,
        model=model,
        log_file=options.log_file or ROOT / ".cache" / f"{role}-{options.http_port}.log",
        core=0 if role is Role.PREFILL else 1,
        kvplane_address=options.kvplane,
        http_port=options.http_port,
        dtype=options.dtype,
        prefix_caching=role is Role.DECODE,
        extra_config={"kvplane_endpoint": f"http://127.0.0.1:{options.http_port}"},
    )


def main() -> int:
    """Parse the command line, start the engine, and stay until it ends or is told to."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        settings = settings_of(options, vllm_venv(), tiny_model())
        with Engine(settings) as engine, contextlib.suppress(KeyboardInterrupt):
            print(f"starting; the log is {settings.log_file}", flush=True)
            engine.wait_ready()
            print(f"{engine.name} ready at {engine.url}", flush=True)
            while engine.running:
                time.sleep(0.5)
            print(f"{engine.name} ended; see {settings.log_file}", file=sys.stderr)
            return 1
    except RigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
