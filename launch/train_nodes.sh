#!/usr/bin/env bash
# Trains on several nodes. Run the same command on each of them, in any order:
#
#   NODES=4 HEAD=node0:29500 launch/train_nodes.sh configs/qwen3_1.7b.toml [torchtitan's options]
#
# NODES         how many nodes take part
# HEAD          host:port of one of them, where all meet (a free port there; c10d rendezvous)
# GPUS          ranks of each node (default: its GPUs, or its CPUs where it has none)
# RUN_ID        tells this run from others that meet at HEAD (default amo)
# MAX_RESTARTS  how often torchrun starts the ranks of all nodes again after a failure (default 3)
# LOGS          folder for stdout and stderr of each rank (default outputs/logs)
#
# The run goes on from the latest checkpoint in its dump folder, after a restart as after a second
# call. Nothing is saved when a run is killed: what is lost is bounded by checkpoint.interval.
# Dump folder and code must lie on a file system that all nodes share.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root" # a relative dump folder lies in the repository, wherever the call came from

if (($# == 0)) || [[ -z "${NODES:-}" || -z "${HEAD:-}" ]]; then
  echo "usage: NODES=4 HEAD=node0:29500 launch/train_nodes.sh CONFIG.toml [options]" >&2
  exit 2
fi
config="$1"
shift
[[ -f "$config" ]] || {
  echo "error: no config $config (relative to $root)" >&2
  exit 2
}

# Nothing is installed here: several nodes would do so at once, in the same place.
if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" && -f .venv/bin/activate ]]; then
  # shellcheck disable=SC1091
  source .venv/bin/activate
fi
python -c 'import torch, torchtitan, amo_dist' 2>/dev/null || {
  echo "error: $(command -v python) lacks the project; launch/quickstart.sh sets one up" >&2
  exit 2
}

# NCCL. The network is found by itself on most clusters; where it is not:
#   NCCL_SOCKET_IFNAME=eth0    the interface over which ranks find each other
#   NCCL_IB_HCA=mlx5           the InfiniBand adapters for data
#   NCCL_DEBUG=INFO            tells what it chose ("NET/IB" is fast, "NET/Socket" is not)
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# A collective that one rank never reaches aborts all of them after comm.train_timeout_seconds;
# torchtitan sets this up and dumps the last collectives of each rank to <dump folder>/comm_traces.

# torchrun keeps one store for all restarts, and restarted ranks would read the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Segments that grow leave less memory unused between tensors of many sizes.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

logs="${LOGS:-outputs/logs}"
mkdir -p "$logs"
# Everything goes to <logs>/<run>/attempt_*/<rank>; rank 0 of each node is shown as well.
exec python -m torch.distributed.run \
  --nnodes "$NODES" \
  --nproc-per-node "${GPUS:-auto}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD" \
  --rdzv-id "${RUN_ID:-amo}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  --log-dir "$logs" --redirects 3 --tee 0:3 \
  -m torchtitan_ext.train --job.config_file "$config" "$@"
