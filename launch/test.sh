#!/usr/bin/env bash
# Runs the tests; arguments pass to pytest.
#
#   launch/test.sh                   everything, half an hour on two cores, and coverage
#   launch/test.sh -m "not slow"     all that takes seconds
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

logs="$(mktemp -d)"
# shellcheck disable=SC2046
trap '{ kill $(jobs -p) || true; } 2>/dev/null; rm -rf "$logs"' EXIT
coverage erase
status=0
# Two halves side by side: a core is idle for as long as a test waits for ranks to start.
# The last lines are needed again below, so pytest's colours are given up.
coverage run -m pytest --color=no tests/unit tests/distributed >"$logs/first" 2>&1 &
coverage run -m pytest --color=no --ignore tests/unit --ignore tests/distributed 2>&1 |
  tee "$logs/second" || status=$?
wait $! || status=$?
cat "$logs/first"
coverage combine --quiet
coverage report --fail-under="${AMO_MIN_COVERAGE:-95}" || status=$?
printf 'skipped in each half: %s\n' \
  "$(grep -ohE '[0-9]+ skipped' "$logs/first" "$logs/second" | paste -sd, || echo none)"
grep -hE '^=+ .* in [0-9.]+s.* =+$' "$logs/first" "$logs/second"
exit "$status"
