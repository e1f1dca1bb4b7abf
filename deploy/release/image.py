"""The image without a container engine: what its Dockerfile's build stage runs, run in folders of our own.

Steps are read from the Dockerfile, paths in them put elsewhere. That shows that they work and that what they
make works; not that an image can be built of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.release.environments import ROOT, ReleaseError, run
from deploy.release.smoke import Serving, smoke
from deploy.rig.process import free_ports

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name in capitals, and what follows, on one line."""

    name: str
    text: str


def stages(dockerfile: Path = DOCKERFILE) -> dict[str, list[Instruction]]:
    """Return the instructions of each stage by its name; those before the first FROM are under ""."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[Instruction]] = {"": []}
    stage = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" AS ")[2]
            found[stage] = []
        found[stage].append(Instruction(name, " ".join(rest.split())))
    return found


def command_of(stage: list[Instruction], name: str) -> list[str]:
    """Return an ENTRYPOINT or CMD in its exec form."""
    (text,) = (one.text for one in stage if one.name == name)
    words: list[str] = json.loads(text)
    return words


def build(wheel: Path, interpreter: Path, folder: Path) -> Path:
    """Do what the build stage does, with `interpreter` as its python; return the folder of programs.

    Raises ReleaseError.
    """
    where = {"/opt/kvplane": str(folder / "kvplane"), "/build": str(folder / "build")}
    (folder / "build").mkdir(parents=True)
    variables: dict[str, str] = {}
    for step in stages()["build"]:
        if step.name == "COPY":
            source, target = step.text.split()
            files = [wheel] if source == "dist/*.whl" else list(ROOT.glob(source))
            for file in files:
                shutil.copy(file, _placed(target, where))
        elif step.name in ("ENV", "ARG"):
            variables |= dict(word.split("=", 1) for word in step.text.split())
        elif step.name == "RUN":
            script = _placed(re.sub(r"^python ", f"{interpreter} ", step.text), where)
            run(["env", *(f"{k}={v}" for k, v in variables.items()), "bash", "-o", "pipefail", "-c", script])
    return folder / "kvplane" / "bin"


def _placed(text: str, where: Mapping[str, str]) -> str:
    for path, placed in where.items():
        text = re.sub(rf"(?<![\w/.]){re.escape(path)}(?![\w-])", placed, text)
    return text


def try_image(wheel: Path, interpreter: Path, folder: Path, version: str) -> str:
    """Build, start what the image starts, ask its health check, send requests; nothing may be written.

    Returns what came of it. Raises ReleaseError and RigError.
    """
    programs = build(wheel, interpreter, folder)
    stage = stages()["run"]
    program, *rest = [*command_of(stage, "ENTRYPOINT"), *command_of(stage, "CMD")]
    if "Usage: kvplane" not in run([str(programs / program), *rest]):
        raise ReleaseError("the image's command shows no usage")
    before = _files(programs.parent)
    if "grpcio==" not in (programs.parent / "packages.txt").read_text():
        raise ReleaseError("packages.txt does not list what was installed")
    came = smoke(programs, folder / "logs", version)
    (port,) = free_ports(1)
    health = ROOT / "deploy" / "docker" / "health.py"
    words = ["serve", "--grpc-port", str(port)]
    script = f"import runpy, sys; sys.exit(runpy.run_path({str(health)!r})['main']({words!r}, {{}}))"
    asking = [str(programs / "python"), "-B", "-c", script]
    with Serving(programs, folder / "logs", "health", port) as plane:
        plane.wait_ready(60)
        run(asking)
    try:
        run(asking)
    except ReleaseError:
        pass
    else:
        raise ReleaseError("the health check finds a control plane that has ended healthy")
    if written := _files(programs.parent) - before:
        raise ReleaseError(f"it writes into the image: {', '.join(sorted(written)[:5])}")
    return came


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
