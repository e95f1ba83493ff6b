#!/usr/bin/env bash
# One command for a machine with a GPU: benchmarks/device.sh PART ... [--limit SECONDS] [--only TEST ...] [--out FOLDER]
#
#     PYTHON   the interpreter (default: python3)        DEVICE   cuda; `cpu` runs tiny sizes, to try this
#
# benchmarks/device.py has the parts.
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "missing: $python (PYTHON names the interpreter)" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m benchmarks.device "$@"
