#!/usr/bin/env bash
# Builds what is missing, installs the peers in build/venv, and runs the benchmark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/apply_and_build.sh
build/venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-bench.txt
exec build/venv/bin/python scripts/bench_rnn.py "$@"
