"""Run one engine of the rig in the foreground, for trying things by hand. Ctrl-C stops it."""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

from deploy.rig.engines import ROOT, Engine, EngineSettings, Role, tiny_model, vllm_venv
from deploy.rig.process import RigError


def main() -> int:
    """Parse the command line, start the engine, and stay until it ends or is told to."""
    parser = argparse.ArgumentParser(prog="python -m deploy.rig.run_engine", description=__doc__)
    parser.add_argument("role", choices=[role.value for role in Role])
    parser.add_argument("--http-port", type=int, required=True, help="port of the engine's HTTP server")
    parser.add_argument("--kvplane", default="127.0.0.1:50051", help="control plane (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="the same on all engines (default: %(default)s)")
    parser.add_argument("--log-file", type=Path, help="default: .cache/ROLE-PORT.log in the checkout")
    options = parser.parse_args()
    role = Role(options.role)
    log_file = options.log_file or ROOT / ".cache" / f"{role}-{options.http_port}.log"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        settings = EngineSettings(
            role=role,
            venv=vllm_venv(),
            model=tiny_model(),
            log_file=log_file,
            core=0 if role is Role.PREFILL else 1,
            kvplane_address=options.kvplane,
            http_port=options.http_port,
            dtype=options.dtype,
            prefix_caching=role is Role.DECODE,
        )
        with Engine(settings) as engine, contextlib.suppress(KeyboardInterrupt):
            print(f"starting; the log is {log_file}", flush=True)
            engine.wait_ready()
            print(f"{engine.name} ready at {engine.url}", flush=True)
            while engine.running:
                time.sleep(0.5)
            print(f"{engine.name} ended; see {log_file}", file=sys.stderr)
            return 1
    except RigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
