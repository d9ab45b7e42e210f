#!/usr/bin/env bash
# Trains a small llama on the sources of the Python standard library with AMO, on two CPU ranks
# (or on one or two of the machine's GPUs), in a few minutes, and shows the plan. A second call
# continues an unfinished run; without outputs/quickstart it starts anew.
#
#   ./launch/quickstart.sh                        # set up, train, show the plan; then: amo report
#   ./launch/quickstart.sh --optimizer.lr 2e-3    # options of `amo train` are passed on
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

was_active="${VIRTUAL_ENV:-}${CONDA_PREFIX:-}"
amo_activate titan,plots
[[ -n "$was_active" ]] || amo_hint
cd "$AMO_ROOT" # A relative dump folder then lies in the repository, whatever the caller's folder.
ranks="$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')"
python -m torchtitan_ext train configs/quickstart.toml --ranks "$ranks" "$@"
python - outputs/quickstart <<'PY'
import pathlib, sys
from torchtitan_ext.runs.run_files import read_metrics, read_plan

folder = pathlib.Path(sys.argv[1])
first, *_, last = read_metrics(folder).steps
print(f"\nloss {first['loss']:.3f} at step {first['step']}, {last['loss']:.3f} at {last['step']}")
print(f"phase: {last['phase']}; the plan:\n{read_plan(folder)}")
print(f"figures in one page: amo report {folder}")
PY
