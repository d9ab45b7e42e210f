#!/usr/bin/env bash
# Trains on several nodes. Run the same command on each of them, in any order:
#
#   NODES=4 HEAD=node0:29500 launch/train_nodes.sh configs/qwen3_1.7b.toml [torchtitan's options]
#
# NODES         how many nodes take part
# HEAD          host:port of one of them, where all meet (a free port there; c10d rendezvous)
# GPUS          ranks of each node (default: its accelerators; a node that sees fewer, or none, is an
#               error)
# AMO_DEVICE    cpu trains on CPUs
# RUN_ID        tells this run from others that meet at HEAD (default amo)
# MAX_RESTARTS  how often the ranks of all nodes are started again after a failure, since the start or
#               since the last new checkpoint (default 3); never after a mistake (exit status 2)
# LOGS          folder of <RUN_ID>/<host>-rank<r>/<start>/std{out,err}.log (default outputs/logs)
#
# The run goes on from the latest checkpoint in its dump folder, after a restart as after a second
# call. SIGTERM saves and leaves. Dump folder and code must lie on a file system that all nodes share.
# launch/README.md tells what each exit status means, and what to do.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root" # a relative dump folder lies in the repository, wherever the call came from

# shellcheck source=launch/lib.sh
source launch/lib.sh
amo_environment
python -c 'from importlib.metadata import version as v; v("torch"), v("torchtitan"), v("amo-dist")' \
  2>/dev/null || {
  echo "error: $(command -v python) lacks the project; launch/setup.sh sets one up" >&2
  exit 2
}

exec python -m torchtitan_ext.tools.nodes "$@"
