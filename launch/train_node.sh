#!/usr/bin/env bash
# Trains on the GPUs of this node (AMO_DEVICE=cpu: on its CPUs), and again after a failure.
#
#   launch/train_node.sh configs/qwen3_300m.toml [torchtitan's options]
#   GPUS=6 launch/train_node.sh configs/qwen3_70m.toml
#
# GPUS, MAX_RESTARTS, LOGS, and how a run goes on: see train_nodes.sh.
set -euo pipefail

# Port 0: any free one. Two runs on one node do not meet.
NODES=1 HEAD=localhost:0 RUN_ID="${RUN_ID:-node-$$}" \
  exec "$(dirname "${BASH_SOURCE[0]}")/train_nodes.sh" "$@"
