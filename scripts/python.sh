# shellcheck shell=bash
# Sourced by the scripts: runs a command of scripts/rnn_series with a Python that is new
# enough. RNN_PYTHON names one to use.
rnn_series() {
    local here candidate
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    for candidate in ${RNN_PYTHON:+"$RNN_PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            RNN_SCRIPT=$(basename "$0") PYTHONPATH=$here exec "$candidate" -B -m rnn_series.cli "$@"
        fi
    done
    echo "error: expected Python 3.10 or newer with venv, found none on PATH; install one or set RNN_PYTHON" >&2
    exit 1
}
