#!/usr/bin/env bash
# Installs training and its report, once, in a folder that all nodes see: run it on a login node before any job.
#
#   launch/setup.sh            # into .venv in the repository, or into the active environment
#   launch/setup.sh dev        # other extras of pyproject.toml
#
# AMO_PYTHON  the interpreter that .venv is made with (default python3)
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

was_active="${VIRTUAL_ENV:-}${CONDA_PREFIX:-}"
amo_activate "${1:-titan,plots}"
python -m torchtitan_ext.environment 1 >/dev/null # an error where PyTorch does not see this machine's GPUs
amo_say "ready: $(command -v python)"
[[ -n "$was_active" ]] || amo_hint
