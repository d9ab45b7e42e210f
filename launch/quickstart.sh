#!/usr/bin/env bash
# Trains a small llama on the sources of the Python standard library with AMO, on two CPU ranks
# (or on the GPUs that are there), in a few minutes. A second call goes on with an unfinished run.
#
#   ./launch/quickstart.sh                        # set up, train, show the plan
#   ./launch/quickstart.sh --fresh                # delete the run and start anew
#   ./launch/quickstart.sh --optimizer.lr 2e-3    # torchtitan's options are passed on
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

amo_activate titan
cd "$AMO_ROOT" # a relative dump folder lies in the repository, wherever the call came from
exec python -m torchtitan_ext quickstart "$@"
