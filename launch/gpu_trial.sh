#!/usr/bin/env bash
# Tries the optimizer on one GPU, in at most nine minutes, and writes a page of verdicts after each part:
#
#   launch/gpu_trial.sh gpu_trial                  # trial.json and trial.md in this folder
#   launch/gpu_trial.sh gpu_trial --dion ../dion    # with a checkout of microsoft/dion as a peer
#
# Needs an installed PyTorch >= 2.11; pytest too, for one of its parts. Runs in whatever Python is active.
# Without a GPU everything runs small on the CPU.
#
# AMO_PYTHON  the interpreter (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "${AMO_PYTHON:-python3}" -m benchmarks.gpu_trial all --folder "${1:-gpu_trial}" "${@:2}"
