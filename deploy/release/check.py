"""make release-check: build what is released, and try it as those who install it will.

sdist and wheel are built in an environment of their own, looked through, and installed each alone into fresh
environments of every Python that is supported and is here. Needs the package index. Exit codes: 0 all is well
with all Pythons; 1 something is not; 4 all is well, but some Pythons are not here.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from readme_renderer import markdown

from deploy.release.environments import (
    ROOT,
    ReleaseError,
    environment,
    interpreters,
    run,
    with_extras,
)
from deploy.release.image import try_image
from deploy.release.smoke import smoke, without_extras
from deploy.rig.process import RigError

SOURCES = ("protos", "store", "controlplane", "connector")


def version() -> str:
    """Return the version, from the one place where it is: pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: str = project["version"]
    return found


def sources() -> set[str]:
    """Return the files that belong into a wheel, by their path in it."""
    return {
        str(path.relative_to(ROOT / source))
        for source in SOURCES
        for path in (ROOT / source / "kvplane").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def problems_of_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel's contents and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        folder = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = HeaderParser().parsestr(archive.read(f"{folder}/METADATA").decode())
        entries = archive.read(f"{folder}/entry_points.txt").decode()
    found = []
    inside = {name for name in names if not name.startswith(folder)}
    found += [f"missing: {name}" for name in sorted(sources() - inside)]
    found += [f"does not belong there: {name}" for name in sorted(inside - sources())]
    if "kvplane = kvplane.cli.program:main" not in entries:
        found.append("the command kvplane is missing")
    if f"{folder}/licenses/LICENSE" not in names:
        found.append("LICENSE is missing")
    found += problems_of_metadata(metadata["Version"], metadata["Requires-Python"], metadata.get_payload())
    return found


def problems_of_metadata(said: str, python: str, description: object) -> list[str]:
    """Return what is wrong with version, supported Pythons and the description, which is the README."""
    found = []
    if said != version():
        found.append(f"version {said}, but pyproject.toml says {version()}")
    if python != ">=3.11":
        found.append(f"Requires-Python: {python}")
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None or heading[1] != version():
        found.append(f"CHANGELOG.md does not begin with {version()}")
    text = str(description)
    page = markdown.render(text)
    if page is None or "<table>" not in page or "<pre" not in page:
        found.append("the README does not render")
    if text.strip() != (ROOT / "README.md").read_text().strip():
        found.append("the description is not the README")
    return found


def problems_of_sdist(sdist: Path) -> list[str]:
    """Return what is wrong with an sdist's contents."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"}
    needed |= {f"{source}/{name}" for source in SOURCES for name in sources() if _is_of(source, name)}
    foreign = {name for name in names if re.search(r"(^|/)(\.venv|\.cache|__pycache__|demo-out)(/|$)", name)}
    return [f"missing: {name}" for name in sorted(needed - names)] + [
        f"does not belong there: {name}" for name in sorted(foreign)
    ]


def _is_of(source: str, name: str) -> bool:
    return (ROOT / source / name).is_file()


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel; return both. Raises ReleaseError."""
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist])
    problems = [f"{wheel.name}: {problem}" for problem in problems_of_wheel(wheel)]
    problems += [f"{sdist.name}: {problem}" for problem in problems_of_sdist(sdist)]
    if problems:
        raise ReleaseError("\n".join(problems))
    return wheel, sdist


def try_out(wheel: Path, sdist: Path, interpreter: Path, folder: Path) -> None:
    """Install wheel and sdist, each alone, and try them. Raises ReleaseError and RigError."""
    for distribution in (wheel, sdist):
        kind = "wheel" if distribution is wheel else "sdist"
        programs = environment(folder / kind, interpreter, with_extras(distribution, "router"))
        print(f"  {kind} with [router]: {smoke(programs, folder / f'{kind}-logs', version())}", flush=True)
    plain = environment(folder / "plain", interpreter, with_extras(wheel))
    print(f"  wheel alone: {without_extras(plain)}", flush=True)


def main() -> int:
    """Build, look, install, try. See the module for exit codes."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where sdist and wheel are left")
    parser.add_argument("--build-only", action="store_true", help="build and look, install nothing")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="kvplane-release-") as made:
            folder = Path(made)
            wheel, sdist = build(folder / "dist")
            options.out.mkdir(parents=True, exist_ok=True)
            for built in (wheel, sdist):
                (options.out / built.name).write_bytes(built.read_bytes())
            print(f"built {wheel.name} and {sdist.name}: contents, metadata and README are right", flush=True)
            if options.build_only:
                return 0
            missing, newest = [], Path(sys.executable)
            for name, interpreter in interpreters().items():
                if interpreter is None:
                    print(f"Python {name}: NOT TRIED, there is no python{name} here", flush=True)
                    missing.append(name)
                    continue
                print(f"Python {name}:", flush=True)
                try_out(wheel, sdist, interpreter, folder / name)
                newest = interpreter
            came = try_image(wheel, newest, folder / "image", version())
            print(f"the Dockerfile's steps, without a container engine: {came}", flush=True)
    except (ReleaseError, RigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 4 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
