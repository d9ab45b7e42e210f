# shellcheck shell=bash
# Shared by the scripts of this folder: a Python environment with the project in it. Source it, then:
#
#   amo_activate titan        # extras of pyproject.toml, e.g. dev; installs what is missing
#   amo_use                   # activates what is installed already
#   amo_slurm_nodes           # in a Slurm job: NODES, HEAD, GPUS, and AMO_SRUN for a task on each node
#   amo_probe_nodes 60        # in a Slurm job: the nodes that fail the doctor's probe
#
# An active virtual environment (or conda environment) is used as it is; otherwise `.venv` in the
# repository root is created and activated. An installed torch is kept, whatever its build. A
# second call takes a fraction of a second: a stamp records the installation.
#
# AMO_PYTHON         the interpreter `.venv` is made with (default python3)
# AMO_TORCH_VERSION  a PyTorch to run on instead, such as 2.15.0: in .venv-2.15.0, made once,
#                    whatever environment is active

AMO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
AMO_VENV="$AMO_ROOT/.venv${AMO_TORCH_VERSION:+-$AMO_TORCH_VERSION}"

amo_say() { printf '[amo] %s\n' "$*" >&2; }

amo_die() {
  printf '[amo] error: %s\n' "$*" >&2
  exit 1
}

# Runs a command with its output in a log; shows the log's last line every ten seconds, and its end only
# when the command fails.
_amo_quietly() {
  local log="$1" start=$SECONDS ticker status=0
  shift
  while sleep 10 && kill -0 $$ 2>/dev/null; do
    amo_say "$((SECONDS - start)) s: $(tail -n 1 "$log" | cut -c -80)"
  done &
  ticker=$!
  "$@" >>"$log" 2>&1 || status=$?
  kill "$ticker"
  wait "$ticker" 2>/dev/null || true
  if ((status)); then
    tail -n 25 "$log" >&2
    amo_die "failed: $* (whole log: $log)"
  fi
}

# torchtitan needs this version; pip would leave torchtitan out for an older one, without a word.
_amo_require_version() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    amo_die "$1 is $("$1" --version), Python >= 3.11 is needed; $2"
}

_amo_create_venv() {
  local python="${AMO_PYTHON:-python3}" options=()
  command -v "$python" >/dev/null || amo_die "no $python found; set AMO_PYTHON to Python >= 3.11"
  _amo_require_version "$python" "set AMO_PYTHON"
  # A machine with an accelerator often has its torch in the system's Python: let .venv see it.
  if [[ -z "${AMO_TORCH_VERSION:-}" ]] && "$python" -c 'import torch' >/dev/null 2>&1; then
    options+=(--system-site-packages)
  fi
  amo_say "creating ${AMO_VENV##*/} with $("$python" --version)"
  if ! "$python" -m venv ${options[@]+"${options[@]}"} "$AMO_VENV"; then
    rm -rf "$AMO_VENV" # half of it would pass for a whole one at the next call
    amo_die "cannot create ${AMO_VENV##*/} (on Debian and Ubuntu: apt install python3-venv)"
  fi
}

# A digest of all that the installation depends on.
_amo_fingerprint() {
  python - "$AMO_ROOT" "$1" <<'PY'
import hashlib, pathlib, sys

root, extras = sys.argv[1:]
project = pathlib.Path(root, "pyproject.toml").read_bytes()
print(hashlib.sha256(repr((root, extras, sys.version, project)).encode()).hexdigest())
PY
}

_amo_install() {
  local extras="$1" log="$2" torch="${AMO_TORCH_VERSION:-2.13.0}" constraints
  if ! python -c 'import torch' >/dev/null 2>&1; then
    amo_say "installing torch $torch"
    _amo_quietly "$log" python -m pip install "torch==$torch"
  fi
  constraints="$(mktemp)"
  # Without this line pip may replace a torch that was built for the machine's accelerator.
  # Read from its metadata: importing a torch without NumPy warns.
  python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
    >"$constraints"
  amo_say "installing the project with $extras (some minutes the first time; log: $log)"
  _amo_quietly "$log" python -m pip install -c "$constraints" -e "${AMO_ROOT}[$extras]"
  rm -f "$constraints"
}

# amo_activate EXTRAS: activates an environment with the project and these extras in it.
amo_activate() {
  local extras="$1" prefix stamp fingerprint
  if [[ -n "${AMO_TORCH_VERSION:-}" || -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]]; then
    [[ -x "$AMO_VENV/bin/python" ]] || _amo_create_venv
    # shellcheck disable=SC1091
    source "$AMO_VENV/bin/activate"
    unset PIP_CONSTRAINT # an image's pins, of setuptools too; here nothing changes the image's packages
  fi
  _amo_require_version python "delete ${AMO_VENV##*/}, or leave this environment"
  prefix="$(python -c 'import sys; print(sys.prefix)')"
  stamp="$prefix/.amo-installed-${extras//,/-}"
  fingerprint="$(_amo_fingerprint "$extras")"
  if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$fingerprint" ]]; then
    _amo_install "$extras" "$prefix/amo-install.log"
    printf '%s\n' "$fingerprint" 2>/dev/null >"$stamp" || true
  fi
}

# Tells how to find `amo` in the user's own shell, which a script cannot activate.
amo_hint() {
  amo_say "in a new shell, \`amo\` needs: source $(python -c 'import sys; print(sys.prefix)')/bin/activate"
}

# Activates without installing: several nodes would install at once, in the same place. The file AMO_SITE
# has your cluster's own lines, and srun passes on what they export.
amo_use() {
  # shellcheck disable=SC1090
  [[ -z "${AMO_SITE:-}" ]] || source "$AMO_SITE"
  if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" && -f "$AMO_ROOT/.venv/bin/activate" ]]; then
    # shellcheck disable=SC1091
    source "$AMO_ROOT/.venv/bin/activate"
  fi
}

# Where the nodes of a Slurm job meet, and how srun starts a task on each. Linux hands out ports from 32768
# on to any program. The task of a node starts all of its ranks and needs all CPUs: srun would give it one.
# After a stop nodes end a few seconds apart and with status 75, and the first must not kill the others.
amo_slurm_nodes() {
  local nodes
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export NODES="${#nodes[@]}"
  export HEAD="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
  export GPUS="${GPUS:-${SLURM_GPUS_ON_NODE:-auto}}"
  AMO_SRUN=(srun --kill-on-bad-exit=0 --wait=60 --ntasks-per-node=1 --nodes="$NODES"
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"
    ${AMO_SRUN_OPTIONS[@]+"${AMO_SRUN_OPTIONS[@]}"})
}

# amo_take_nodes NUMBER [BAD...]: has HEAD and AMO_SRUN name so many nodes of the job, none of the bad ones.
amo_take_nodes() {
  local number="$1" nodes
  shift
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST" |
    grep -vxFf <(printf '%s\n' "$@") | head -n "$number")
  HEAD="${nodes[0]}:${HEAD##*:}"
  AMO_SRUN+=(--nodes="$number" --nodelist="$(IFS=,; echo "${nodes[*]}")")
}

# Runs a command of Slurm, whose controller may be busy for a minute, until it succeeds.
amo_retry() {
  local pause
  for pause in 2 5 15 30 0; do
    "$@" && return 0 # in a trap a bare return has the status from before the trap
    amo_say "failed: $*; again in $pause s"
    sleep "$pause"
  done
  return 1
}

# amo_probe_nodes SECONDS: prints the nodes that do not pass the doctor's probe alone. The doctor gives its checks
# so many seconds, and a node AMO_START_SECONDS more to start: first imports from a shared disk take minutes.
amo_probe_nodes() {
  local task passed node limit=$(($1 + ${AMO_START_SECONDS:=300}))
  # shellcheck disable=SC2016 # the task expands it
  task='NODES=1 HEAD=localhost:0 RUN_ID=probe timeout -k 10 "$2" launch/doctor.sh --probe . --seconds "$1" >&2 &&
    echo "passed $SLURMD_NODENAME"'
  # A node whose task does not even start holds nobody up for longer than this.
  passed="$(timeout -k 10 $((limit + 60)) "${AMO_SRUN[@]}" bash -c "$task" probe "$1" "$limit")" || true
  while read -r node; do
    grep -qxF "passed $node" <<<"$passed" || echo "$node"
  done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}

# amo_probe_network SECONDS [NODE...]: the same probe on these nodes together, by default on all.
amo_probe_network() {
  local limit="$1" options=()
  shift
  if (($#)); then
    local NODES="$#" HEAD="$1:${HEAD##*:}"
    options=(--nodes="$#" --nodelist="$(IFS=,; echo "$*")")
  fi
  export RUN_ID="probe-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$*"
  timeout -k 10 $((limit + ${AMO_START_SECONDS:=300})) "${AMO_SRUN[@]}" "${options[@]}" launch/doctor.sh --probe . --seconds "$limit" >&2
}

# amo_probe_pairs SECONDS: probes each node with the next one, and prints those that fail with both neighbours.
amo_probe_pairs() {
  local limit="$1" nodes node before
  local -A passed=()
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  before="${nodes[-1]}"
  for node in "${nodes[@]}"; do
    if amo_probe_network "$limit" "$before" "$node"; then
      passed["$before"]=1 passed["$node"]=1
    fi
    before="$node"
  done
  for node in "${nodes[@]}"; do
    [[ -n "${passed[$node]:-}" ]] || echo "$node"
  done
}

# amo_exclude NODE...: keeps the job, which must be pending, away from these nodes, too.
amo_exclude() {
  local excluded nodes
  excluded="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')"
  nodes="$(IFS=,; echo "$*")"
  amo_retry scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${excluded:+$excluded,}$nodes" ||
    amo_say "scontrol failed: $nodes are not excluded, and the next start probes them again"
}
