"""Which recurrent layers of a model are captured, packed, and by which kernel they run.

``python -m torch._inductor.rnn_report FILE.py:FACTORY`` prints it; FACTORY is a function
without arguments that returns a model and a tuple of example inputs.
"""

import argparse
import dataclasses
import importlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.rnn_capture import reason_for_eager
from torch._dynamo.utils import counters
from torch.fx import Graph

from . import config
from .custom_graph_pass import CustomGraphPass
from .fx_passes.rnn_fusion import RnnNode


@dataclasses.dataclass
class RnnReport:
    """What became of one module."""

    name: str
    """Its path in the model, empty for the model itself."""
    layer: torch.nn.RNNBase
    kernel: str
    """``C++ kernel``, ``oneDNN``, ``ATen``, ``training``, ``eager`` or ``not called``."""
    packed: bool
    """Whether the weights of all its layers are packed."""
    reason: str
    """Why it is not packed, not in the C++ kernel, or not captured; else empty."""


class _Collect(CustomGraphPass):
    def __init__(self) -> None:
        self.nodes: list[RnnNode] = []

    def __call__(self, graph: Graph) -> None:
        self.nodes += filter(None, map(RnnNode.parse, graph.nodes))

    def uuid(self) -> None:
        return None


def rnn_report(
    model: torch.nn.Module, inputs: Sequence[Any], **options: Any
) -> list[RnnReport]:
    """Run ``model`` once in eager and once compiled anew, and tell what became of each layer.

    Args:
        model: any module; the layers looked at are its RNN, GRU and LSTM modules.
        inputs: the positional arguments of a call.
        options: of ``torch.compile``.

    The grad mode, the configuration and the mode of the model are as the caller set them.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM))
    }
    called = set()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer))
        for layer in layers.values()
    ]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    collect = _Collect()
    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=collect, force_disable_caches=True):
        torch.compile(model, **options)(*inputs)
    rows = []
    for name, layer in layers.items():
        nodes = [n for n in collect.nodes if str(id(layer)) in n.modules]
        kernel = ", ".join(dict.fromkeys(n.kernel for n in nodes))
        packed = bool(nodes) and all(n.packed for n in nodes)
        reason = next((n.reason for n in nodes if n.reason), "")
        if layer not in called:
            kernel = "not called"
        elif not nodes:
            kernel = "eager"
            reason = reason_for_eager(layer) or (
                "the call is not in a graph: see TORCH_LOGS=graph_breaks,rnn"
            )
        rows.append(RnnReport(name, layer, kernel, packed, reason))
    return rows


def _load(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place:
        raise ValueError(f"expected FILE.py:FACTORY or MODULE:FACTORY, found {target}")
    if place.endswith(".py"):
        names = runpy.run_path(place)
    else:
        names = vars(importlib.import_module(place))
    if name not in names:
        raise ValueError(f"expected a function {name} in {place}, found none")
    return names[name]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m torch._inductor.rnn_report", None, __doc__)
    parser.add_argument("factory", metavar="FILE.py:FACTORY", help="or MODULE:FACTORY")
    parser.add_argument("--train", action="store_true", help="in training mode, with gradients")
    options = parser.parse_args(args)
    try:
        made = _load(options.factory)()
        if not (
            isinstance(made, tuple)
            and len(made) == 2
            and isinstance(made[0], torch.nn.Module)
            and isinstance(made[1], (tuple, list))
        ):
            raise ValueError(
                f"expected {options.factory} to return a model and a tuple of inputs, "
                f"found {type(made).__name__}"
            )
    except (ValueError, ImportError, FileNotFoundError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    model, inputs = made
    counters.clear()
    with torch.set_grad_enabled(options.train):
        rows = rnn_report(model.train(options.train), inputs)
    table = [("layer", "kind", "kernel", "packed", "why")] + [
        (
            row.name or "(the model)",
            type(row.layer).__name__,
            row.kernel,
            "yes" if row.packed else "no",
            row.reason,
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip())
    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    print(f"\ngraphs: {graphs}, graph breaks: {sum(breaks.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
