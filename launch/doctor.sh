#!/usr/bin/env bash
# Checks this node, or the nodes of a Slurm job, in at most five minutes: all-to-alls, spectra, every
# layout of the optimizer against one process, and failures in a run. It prints one verdict per line. The
# exit status is not 0 if a check failed. The ranks get the environment variables of training.
#
#   launch/doctor.sh                                         # all GPUs of this node, or its CPUs
#   GPUS=2 launch/doctor.sh
#   salloc --nodes=2 --gpus-per-node=8 launch/doctor.sh
#   sbatch --nodes=2 --gpus-per-node=8 --wrap launch/doctor.sh
#
# GPUS   ranks per node (default: its GPUs, or its CPUs if it has no GPU)
# NODES, HEAD, RUN_ID   to start it by hand on each node: number of nodes, host:port where they meet, a name
#
# Options are those of `python -m amo_dist doctor`.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/lib.sh
source "$root/launch/lib.sh"
if [[ -n "${SLURM_JOB_NODELIST:-}" && -z "${HEAD:-}" ]]; then
  amo_slurm_nodes
  export RUN_ID="doctor-$SLURM_JOB_ID"
  "${AMO_SRUN[@]}" "$root/launch/doctor.sh" "$@"
  exit
fi
amo_use
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
variables="$(python -m torchtitan_ext.environment "${GPUS:-auto}")"
while read -r variable; do
  [[ -z "$variable" ]] || export "${variable?}"
done <<<"$variables"

# Port 0: any free one. Nothing is started again: a failure is an answer.
exec python -m torch.distributed.run \
  --nnodes "${NODES:-1}" \
  --nproc-per-node "${GPUS:-auto}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${HEAD:-localhost:0}" \
  --rdzv-id "${RUN_ID:-doctor-$$}" \
  --max-restarts 0 \
  -m amo_dist doctor "$@"
