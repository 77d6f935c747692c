"""Checks an installed build, run by the Python of that installation.

Prints a line of JSON for each check: its name, whether it holds, and what was found.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path


def check_version(expected: dict) -> str:
    import torch

    assert torch.__version__ == expected["version"], torch.__version__
    assert torch.version.git_version == expected["commit"], torch.version.git_version
    assert importlib.metadata.version("torch") == expected["version"]
    return torch.__version__


def check_onednn(expected: dict) -> str:
    import torch

    assert torch.backends.mkldnn.is_available(), (
        "torch.backends.mkldnn is not available"
    )
    assert torch._C._get_mkldnn_enabled(), "oneDNN is switched off"
    line = next(s for s in torch.__config__.show().splitlines() if "MKL-DNN" in s)
    return line.strip(" -")


def check_files(expected: dict) -> str:
    import torch

    site = Path(torch.__file__).parents[1]
    for name, digest in expected["files"].items():
        path = site / name
        assert path.is_file(), f"{name} is missing"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == digest, f"{name} differs from the series"
    return f"{len(expected['files'])} files as in the series"


def check_compiled_lstm(expected: dict) -> str:
    import torch
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    layers, directions = 2, 2
    module = torch.nn.LSTM(16, 32, layers, bidirectional=directions == 2).eval()
    counters.clear()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(module, fullgraph=True)
        worst = 0.0
        for seq_len in (5, 9, 12):
            x = torch.randn(seq_len, 3, 16)
            actual, reference = compiled(x)[0], module.double()(x.double())[0]
            module.float()
            error = (actual - reference).norm() / reference.norm()
            worst = max(worst, error.item())
    graphs = counters["stats"]["unique_graphs"]
    packed = counters["inductor"]["rnn_weight_pack_matcher_count"]
    assert worst < 1e-5, f"relative error {worst:.1e} against eager in float64"
    assert graphs == 2, f"{graphs} graphs for 3 lengths"
    assert packed == graphs * layers * directions, f"{packed} layers packed"
    return f"{graphs} graphs for 3 lengths, {packed} weights packed, error {worst:.0e}"


CHECKS: dict[str, Callable[[dict], str]] = {
    "version": check_version,
    "oneDNN": check_onednn,
    "series": check_files,
    "compiled LSTM": check_compiled_lstm,
}


def main() -> int:
    expected = json.load(sys.stdin)
    status = 0
    for name, check in CHECKS.items():
        try:
            holds, found = True, check(expected)
        except Exception as e:  # whatever a broken build raises is the finding
            holds, found = False, " ".join(f"{type(e).__name__}: {e}".split())[:300]
            status = 1
        print(json.dumps({"check": name, "holds": holds, "found": found}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
