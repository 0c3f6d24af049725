#!/usr/bin/env bash
# Create a virtual environment from a pinned lock file and install the project into it.
# usage: setup.sh PYTHON VENV LOCK TORCH_INDEX
set -euo pipefail
python=$1 venv=$2 lock=$3 torch_index=$4

need() {
    command -v "$1" >/dev/null || { echo "setup: $1 is missing; install it ($2)" >&2; exit 2; }
}
if ! command -v "$python" >/dev/null; then
    python=python3
fi
need "$python" "Debian: apt-get install python3 python3-venv"
need g++ "vLLM compiles its kernels at first use; Debian: apt-get install g++"
"$python" - <<'PY'
import ctypes, os, sys, sysconfig
if sys.version_info[:2] != (3, 11):
    sys.exit("setup: Python 3.11 is needed (make PYTHON=/path/to/python3.11 …)")
if not os.path.exists(sysconfig.get_path("include") + "/Python.h"):
    sys.exit("setup: Python's headers are missing; Debian: apt-get install python3-dev")
try:
    ctypes.CDLL("libnuma.so.1")
except OSError:
    sys.exit("setup: libnuma is missing, vLLM's kernels load it; Debian: apt-get install libnuma1")
PY

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "setup: installing the packages of $lock (about 3.5 GB, a few minutes)"
torch=$(grep '^torch==' "$lock")
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
grep -v '^torch==' "$lock" >"$rest"
if ! pip install --quiet --no-deps "$torch" 2>"$rest.log"; then
    echo "setup: $torch is not on the default index; trying PyTorch's own"
    pip --timeout 20 install --quiet --no-deps --index-url "$torch_index" "$torch" ||
        { cat "$rest.log" >&2; echo "setup: $torch cannot be installed" >&2; exit 1; }
fi
rm -f "$rest.log"
pip install --quiet --no-deps -r "$rest"
pip install --quiet --no-deps --no-build-isolation -e .
echo "setup: done"
