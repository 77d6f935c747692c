"""A model as ONNX graph, one LSTM, GRU or RNN node a layer, with the model's own weights.

ONNX has no LSTM with projections. Such a layer is one product for the input of all steps and
a Scan over the steps, which is the fastest form that its operators allow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper, TensorProto

from .suite import Entry, GATES


OPSET = 17
# PyTorch's gates are LSTM i,f,g,o and GRU r,z,n; ONNX's are i,o,f,c and z,r,h.
_ORDER = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}
_FLOAT = TensorProto.FLOAT


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"n{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names[0] if outputs == 1 else names


def _weight(layer: torch.nn.Module, name: str, number: int, suffix: str) -> np.ndarray:
    return getattr(layer, f"{name}_l{number}{suffix}").detach().numpy()


def _stacked(entry: Entry, layer: torch.nn.Module, number: int) -> list[np.ndarray]:
    """W, R and B of an ONNX node, directions stacked."""
    order = _ORDER[entry.kind]

    def gates(name: str, suffix: str) -> np.ndarray:
        weight = _weight(layer, name, number, suffix)
        return weight.reshape(GATES[entry.kind], entry.H, -1)[order].reshape(
            weight.shape
        )

    suffixes = ["", "_reverse"][: entry.directions]
    biases = [
        np.concatenate([gates("bias_ih", s), gates("bias_hh", s)]) for s in suffixes
    ]
    return [
        np.stack([gates("weight_ih", s) for s in suffixes]),
        np.stack([gates("weight_hh", s) for s in suffixes]),
        np.stack(biases),
    ]


def _layer(
    graph: _Graph, entry: Entry, layer: torch.nn.Module, number: int, x: str
) -> tuple[str, list[str]]:
    """Add a layer to the graph: (T, B, I) to (T, B, directions*H) and its final states."""
    inputs = [graph.constant(w) for w in _stacked(entry, layer, number)]
    attributes: dict[str, Any] = {
        "hidden_size": entry.H,
        "direction": "bidirectional" if entry.bidirectional else "forward",
    }
    if entry.kind == "GRU":
        attributes["linear_before_reset"] = 1
    outputs = 3 if entry.kind == "LSTM" else 2
    y, *states = graph.node(entry.kind, x, *inputs, outputs=outputs, **attributes)
    if entry.bidirectional:
        # (T, directions, B, H) to (T, B, directions*H)
        y = graph.node("Transpose", y, perm=[0, 2, 1, 3])
        y = graph.node("Reshape", y, graph.ints(0, 0, -1))
    else:
        y = graph.node("Squeeze", y, graph.ints(1))
    return y, states


def _projected_layer(
    graph: _Graph, entry: Entry, layer: torch.nn.Module, number: int, x: str
) -> tuple[str, list[str]]:
    """The same for an LSTM with projections, forward only."""
    w_ih, w_hh, b_ih, b_hh, w_hr = (
        _weight(layer, name, number, "")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    )
    x = graph.node("MatMul", x, graph.constant(w_ih.T))
    x = graph.node("Add", x, graph.constant(b_ih + b_hh))

    step = _Graph()
    recurrent = step.node("MatMul", "h", step.constant(w_hh.T))
    gates = step.node("Add", "x", recurrent)
    i, f, g, o = step.node("Split", gates, outputs=4, axis=1)
    i, f, o = (step.node("Sigmoid", name) for name in (i, f, o))
    kept = step.node("Mul", f, "c")
    c = step.node("Add", kept, step.node("Mul", i, step.node("Tanh", g)))
    hidden = step.node("Mul", o, step.node("Tanh", c))
    h = step.node("MatMul", hidden, step.constant(w_hr.T))
    y = step.node("Identity", h)
    shapes = {"h": entry.proj_size, "c": entry.H, "x": 4 * entry.H}
    shapes |= {h: entry.proj_size, c: entry.H, y: entry.proj_size}
    values = [
        helper.make_tensor_value_info(name, _FLOAT, [entry.B, size])
        for name, size in shapes.items()
    ]
    # Names in the body may not repeat those around it.
    body = helper.make_graph(step.nodes, "step", values[:3], values[3:], step.constants)
    onnx.compose.add_prefix_graph(body, f"step{number}_", inplace=True)

    h0, c0 = (
        graph.constant(np.zeros((entry.B, size), dtype=np.float32))
        for size in (entry.proj_size, entry.H)
    )
    h, c, y = graph.node("Scan", h0, c0, x, outputs=3, body=body, num_scan_inputs=1)
    return y, [graph.node("Unsqueeze", s, graph.ints(0)) for s in (h, c)]


def write_onnx(
    entry: Entry, model: torch.nn.Module, results: list[torch.Tensor], path: Path
) -> None:
    """Write the model with input ``x`` and outputs of the shapes of ``results``.

    Raises:
        NotImplementedError: ONNX cannot express it.
    """
    if entry.proj_size and entry.bidirectional:
        raise NotImplementedError("a bidirectional LSTM with projections")
    graph = _Graph()
    x = "x"
    if entry.linear:
        shape = [entry.B, entry.T, entry.I]
        x = graph.node("Transpose", x, perm=[1, 0, 2])
        for lstm, linear in zip(model.lstms, model.linears):
            x, _ = _layer(graph, entry, lstm, 0, x)
            weight = graph.constant(linear.weight.detach().numpy().T)
            x = graph.node("MatMul", x, weight)
        last = graph.node("Gather", x, graph.constant(np.array(-1)), axis=0)
        outputs = [graph.node("LpNormalization", last, axis=1, p=2)]
    else:
        shape = [entry.T, entry.B, entry.I]
        add = _projected_layer if entry.proj_size else _layer
        finals = []
        for number in range(entry.layers):
            x, states = add(graph, entry, model, number, x)
            finals.append(states)
        outputs = [x]
        for parts in zip(*finals):
            one = len(parts) == 1
            outputs.append(parts[0] if one else graph.node("Concat", *parts, axis=0))
    made = helper.make_graph(
        graph.nodes,
        entry.name,
        [helper.make_tensor_value_info("x", _FLOAT, shape)],
        [
            helper.make_tensor_value_info(name, _FLOAT, list(result.shape))
            for name, result in zip(outputs, results)
        ],
        graph.constants,
    )
    opset = [helper.make_opsetid("", OPSET)]
    onnx.save(helper.make_model(made, opset_imports=opset, ir_version=8), str(path))
