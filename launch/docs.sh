#!/usr/bin/env bash
# Builds the site: the pages, and a reference of the public names from their docstrings.
#
#   launch/docs.sh            # into build/site; open build/site/index.html through a web server
#   launch/docs.sh FOLDER     # into this folder, which is replaced
#
# A broken link or an unknown name is an error.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

amo_activate docs
python "$AMO_ROOT/docs/site/build.py" "${1:-$AMO_ROOT/build/site}"
