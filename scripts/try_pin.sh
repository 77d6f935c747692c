#!/usr/bin/env bash
set -euo pipefail
# shellcheck source=scripts/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
rnn_series try_pin "$@"
