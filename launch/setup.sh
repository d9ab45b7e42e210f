#!/usr/bin/env bash
# Installs what training needs, once, where all nodes see it: on a login node, before any job.
#
#   launch/setup.sh            # .venv in the repository, or the active environment
#   launch/setup.sh dev        # other extras of pyproject.toml
#
# AMO_PYTHON  the interpreter that .venv is made with (default python3)
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

amo_activate "${1:-titan}"
amo_say "ready: $(command -v python)"
