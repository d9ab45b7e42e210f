#!/usr/bin/env bash
# Runs the tests; arguments pass to pytest.
#
#   launch/test.sh                   everything, under 15 minutes on two cores, and coverage
#   launch/test.sh -m "not slow"     under 3 minutes
#   launch/test.sh tests/unit -x     any selection
#
# Without arguments the coverage of amo_dist, that of all child processes included, must reach
# AMO_MIN_COVERAGE percent (default 95); a selection is not measured.
set -euo pipefail

# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
amo_activate dev
cd "$AMO_ROOT"

if (($# > 0)); then
  exec python -m pytest "$@"
fi

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
coverage erase
status=0
# The last lines are needed again below, so pytest's colours are given up.
coverage run -m pytest --color=no 2>&1 | tee "$log" || status=$?
coverage combine --quiet
coverage report --fail-under="${AMO_MIN_COVERAGE:-95}" || status=$?
printf 'skipped: %s\n' "$(grep -oE '[0-9]+ skipped' "$log" | tail -n 1 || echo none)"
grep -E '^=+ .* in [0-9.]+s.* =+$' "$log" | tail -n 1
exit "$status"
