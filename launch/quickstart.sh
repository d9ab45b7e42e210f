#!/usr/bin/env bash
# Trains a small llama on the sources of the Python standard library with AMO, on two CPU ranks
# (or on the machine's GPUs), in a few minutes. A second call continues an unfinished run.
#
#   ./launch/quickstart.sh                        # set up, train, show the plan; then: amo report
#   ./launch/quickstart.sh --fresh                # delete the run and start anew
#   ./launch/quickstart.sh --optimizer.lr 2e-3    # torchtitan's options are passed on
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

was_active="${VIRTUAL_ENV:-}${CONDA_PREFIX:-}"
amo_activate titan,plots
[[ -n "$was_active" ]] || amo_hint
cd "$AMO_ROOT" # A relative dump folder then lies in the repository, whatever the caller's folder.
exec python -m torchtitan_ext quickstart "$@"
