#!/usr/bin/env bash
# One linter of .lintrunner.toml, or `init`: the tools in build/ci and the pinned wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/python.sh
source scripts/python.sh
if [ "${1:-}" = init ]; then
    if [ "${2:-}" = --dry-run=1 ]; then
        echo "would install CI/requirements.txt in build/ci and fetch the pinned wheel"
        exit
    fi
    [ -x build/ci/bin/python ] || python3 -m venv build/ci
    build/ci/bin/python -m pip install --quiet --disable-pip-version-check -r CI/requirements.txt
    set -- init
fi
RNN_PYTHON=build/ci/bin/python rnn_series lint "$@"
