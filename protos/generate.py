"""Generate the Python code of the protos with a pinned toolchain, or check that what is committed is fresh.

usage: generate.py [--check]

Generated code refuses protobuf runtimes older than its own, and vLLM pins the runtime, so the toolchain is
an old one (protobuf 5.29) in a virtual environment of its own under .cache/.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TOOLCHAIN = ("grpcio-tools==1.71.2", "mypy-protobuf==3.6.0", "setuptools<81")
VENV = ROOT.parent / ".cache" / "protoc"


def toolchain() -> Path:
    """Return the python of the pinned toolchain, installing it on first use or when the pins change."""
    python, stamp = VENV / "bin" / "python", VENV / "pins"
    pins = "\n".join(TOOLCHAIN)
    if not stamp.exists() or stamp.read_text() != pins:
        venv.create(VENV, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-qqq", "--disable-pip-version-check", *TOOLCHAIN]
        subprocess.run(command, check=True)
        stamp.write_text(pins)
    return python


def generate(out: Path) -> list[Path]:
    """Write the generated files below `out` and return their paths relative to it."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kvplane/**/*.proto"))
    services = [source for source in sources if "/storage/" not in source]
    python = toolchain()
    base = [str(python), "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    path = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    subprocess.run(
        [*base, f"--python_out={out}", f"--pyi_out={out}", *sources], check=True, cwd=ROOT, env=path
    )
    with_services = [source for source in services if "\nservice " in (ROOT / source).read_text()]
    grpc_flags = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
    subprocess.run([*base, *grpc_flags, *with_services], check=True, cwd=ROOT, env=path)
    return sorted(path.relative_to(out) for path in out.glob("**/*_pb2*.py*"))


def main() -> int:
    """Run as a program; 1 means that committed code is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if generated code is stale"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        fresh = generate(out)
        committed = sorted(path.relative_to(ROOT) for path in ROOT.glob("kvplane/**/*_pb2*.py*"))
        committed = [path for path in committed if "__pycache__" not in path.parts]
        if arguments.check:
            stale = sorted({*fresh} ^ {*committed})
            stale += [
                p for p in fresh if p in committed and not filecmp.cmp(out / p, ROOT / p, shallow=False)
            ]
            for path in stale:
                print(f"stale: protos/{path}; run 'make generate'", file=sys.stderr)
            return 1 if stale else 0
        for path in committed:
            (ROOT / path).unlink()
        for path in fresh:
            shutil.copyfile(out / path, ROOT / path)
    print(f"generated {len(fresh)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
