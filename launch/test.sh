#!/usr/bin/env bash
# Runs the tests in two processes side by side.
#
#   launch/test.sh                    what each commit must pass: ten minutes on two idle cores
#   launch/test.sh --all              what a release must pass: `slow` ones too, and coverage
#   launch/test.sh benchmarks         the studies' own tests
#   launch/test.sh tests/unit -x      any selection: arguments pass to pytest
#   launch/test.sh -n 0 tests/unit    in one process, as a debugger needs it
#
# With --all the coverage of amo_dist, that of all child processes included, must reach
# AMO_MIN_COVERAGE percent (default 95). What starts programs anew (torchtitan_ext, examples) runs last and
# untraced: to trace their imports takes longer than the rest.
set -euo pipefail

# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
amo_activate dev
cd "$AMO_ROOT"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two processes, two cores
# Each worker begins with half of the tests; the first to be done takes from the other.
workers=(-n 2 --dist worksteal --durations=10)
if (($# == 0)); then
  exec python -m pytest "${workers[@]}" -m "not slow"
elif [[ "$*" != --all ]]; then
  exec python -m pytest "${workers[@]}" "$@"
fi

untraced=(tests/titan tests/integration tests/test_{readme_examples,recipes}.py)
coverage erase
status=0
coverage run -m pytest "${workers[@]}" "${untraced[@]/#/--ignore=}" || status=$?
python -m pytest "${workers[@]}" "${untraced[@]}" || status=$?
coverage combine --quiet
coverage report --fail-under="${AMO_MIN_COVERAGE:-95}" || status=$?
exit "$status"
