#!/usr/bin/env bash
# Checks this node, or the nodes of a Slurm job, in at most five minutes: versions, bandwidth,
# kernels, every layout of the optimizer against one process, a step by part. A verdict a line;
# the exit status is not 0 where a check failed.
#
#   launch/doctor.sh                                         # all GPUs of this node, or its CPUs
#   GPUS=2 launch/doctor.sh --model qwen3-1.7b --json doctor.json
#   salloc --nodes=2 --gpus-per-node=8 launch/doctor.sh --json doctor.json
#   sbatch --nodes=2 --gpus-per-node=8 --wrap launch/doctor.sh
#
# GPUS   ranks of each node (default: its GPUs, or its CPUs where it has none)
# NODES, HEAD, RUN_ID   as for train_nodes.sh, to start it on each node by hand
#
# Options are those of `python -m amo_dist doctor`. `amo preflight --hardware doctor.json` predicts a
# run from what was measured.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -n "${SLURM_JOB_NODELIST:-}" && -z "${HEAD:-}" ]]; then
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export NODES="${#nodes[@]}" HEAD="${nodes[0]}:$((20000 + SLURM_JOB_ID % 20000))"
  export RUN_ID="doctor-$SLURM_JOB_ID" GPUS="${GPUS:-${SLURM_GPUS_ON_NODE:-auto}}"
  exec srun --ntasks-per-node=1 --nodes="$NODES" "$root/launch/doctor.sh" "$@"
fi

# Nothing is installed here: several nodes would do so at once, in the same place.
if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" && -f "$root/.venv/bin/activate" ]]; then
  # shellcheck disable=SC1091
  source "$root/.venv/bin/activate"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Port 0: any free one. Nothing is started again: a failure is an answer.
exec python -m torch.distributed.run \
  --nnodes "${NODES:-1}" \
  --nproc-per-node "${GPUS:-auto}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${HEAD:-localhost:0}" \
  --rdzv-id "${RUN_ID:-doctor-$$}" \
  --max-restarts 0 \
  -m amo_dist doctor "$@"
