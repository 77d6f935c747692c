#!/usr/bin/env bash
# Everything that must hold, from a fresh clone: lint, series checks, build, all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONDONTWRITEBYTECODE=1 TORCHINDUCTOR_CACHE_DIR=$PWD/build/inductor
mkdir -p build

step() {
    local start=$SECONDS
    printf '\n== %s\n' "$1"
    shift
    "$@"
    printf '== ok, %d s\n' $((SECONDS - start))
}

test_tools() {
    grep -E '^(pytest|pytest-xdist|expecttest|hypothesis)==' CI/requirements.txt |
        xargs build/venv/bin/python -m pip install --quiet --disable-pip-version-check
}

# Two at a time: most of a test is one compiler at work.
run_tests() {
    "$1" -m pytest -q -p no:cacheprovider --show-capture=no --durations=10 \
        --numprocesses=2 --dist=worksteal "$2"
}

step "tools" scripts/lint.sh init
step "lint" build/ci/bin/lintrunner --all-files
step "series" scripts/check_series.sh
step "build" scripts/apply_and_build.sh
step "test tools" test_tools
step "tests of the scripts" run_tests build/ci/bin/python test/scripts
step "tests of the series" run_tests build/venv/bin/python test/inductor
printf '\nall done in %d s\n' "$SECONDS"
