# mypy: allow-untyped-defs
"""Turn recurrent layers of a graph into calls of the C++ kernel, with packed weights."""

import dataclasses
import logging
import operator
import platform
import sys
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch.fx import Graph, Node
from torch.fx.graph_module import _get_attr

from .. import config
from ..pattern_matcher import stable_topological_sort
from ..rnn_ops import GATES, vector_lanes


aten = torch.ops.aten
rnn_log = torch._logging.getArtifactLogger(__name__, "rnn")


@dataclasses.dataclass
class _Layer:
    """One direction of a layer, from a node of either operator."""

    node: Node
    weights: list[Node]
    hx: Node
    cx: Node | None
    mode: str
    has_biases: bool
    reverse: bool
    autocast: bool = False

    @staticmethod
    def parse(node: Node) -> "_Layer | None":
        if node.op != "call_function":
            return None
        if node.target is torch.ops.torch_rnn.rnn_layer.default:
            autocast = node.kwargs.get("autocast_dtype") is not None
            return _Layer(node, *node.args[1:], autocast=autocast)  # type: ignore[arg-type, misc]
        if node.target is aten.mkldnn_rnn_layer.default:
            _, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, *_ = node.args
            has_biases, train = node.args[12], node.args[15]
            weights = [w_ih, w_hh, *([b_ih, b_hh] if has_biases else [])]
            if train:
                return None
            return _Layer(node, weights, hx, cx, "LSTM", has_biases, reverse)  # type: ignore[arg-type]
        return None

    @property
    def input(self) -> Node:
        # Not kept, since the layer below may be replaced meanwhile
        return self.node.args[0]  # type: ignore[return-value]

    def kind(self):
        """What two directions of one layer have in common."""
        shapes = [w.meta["val"].shape for w in self.weights]
        return self.input, self.mode, self.has_biases, shapes

    def output(self, i: int) -> Node | None:
        for user in self.node.users:
            if user.target is operator.getitem and user.args[1] == i:
                return user
        return None


def _obstacle(layer: _Layer) -> str | None:
    """What keeps a layer from the C++ kernel, if anything."""
    if not config.cpp.rnn_template:
        return "config.cpp.rnn_template is off"
    # Tried on x86 only
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return "the C++ kernel is for x86, and not for Windows"
    if layer.autocast:
        return "autocast is on"
    states = [s for s in (layer.hx, layer.cx) if s is not None]
    for node in (layer.input, *layer.weights, *states):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.is_mkldnn:
            return "its weights are packed for oneDNN"
        if value.dtype != torch.float32:
            return f"the C++ kernel is for float32, not {value.dtype}"
        if value.device.type != "cpu":
            return f"it is on {value.device.type}"
        # The sizes of the layer are constants of the kernel.
        if not isinstance(value.shape[-1], int):
            return "the sizes of its weights are not constant"
    return None


def _is_zeros(node: Node) -> bool:
    """Whether a state is a view of zeros that the graph makes itself."""
    views: tuple[Any, ...] = (
        *(operator.getitem, aten.unbind.int, aten.select.int, aten.slice.Tensor),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
        *(aten.view.default, aten.reshape.default, aten.expand.default),
        *(aten.clone.default, aten.split.Tensor),
    )
    while node.target in views:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.target is aten.full.default and bool(node.args[1] == 0)


def _find_cat(first: _Layer, second: _Layer) -> Node | None:
    """The node that joins the outputs of two directions, if nothing else reads them."""
    outputs = [first.output(0), second.output(0)]
    if None in outputs or any(len(o.users) != 1 for o in outputs):  # type: ignore[union-attr]
        return None
    (cat,) = outputs[0].users  # type: ignore[union-attr]
    if cat.target is not aten.cat.default or list(cat.args[0]) != outputs:  # type: ignore[arg-type]
        return None
    return cat if cat.args[1:] in ((2,), (-1,)) else None


def fuse_rnn_layers(graph: Graph, freezing: bool = False) -> None:
    """Replace recurrent layers by ``torch_rnn.rnn_layers`` where the C++ kernel serves.

    The two directions of a bidirectional layer become one node.  With ``freezing`` a
    layer is replaced only if its weights are constants of the graph, and they are
    packed; constant folding then drops the weights as they were.
    """
    layers = [_Layer.parse(node) for node in graph.nodes]
    layers = [layer for layer in layers if layer and not _obstacle(layer)]
    if freezing:
        layers = [
            layer for layer in layers if all(w.op == "get_attr" for w in layer.weights)
        ]
    if not layers:
        return
    lanes = vector_lanes() if freezing else 0
    while layers:
        layer = layers.pop(0)
        cat = None
        for other in layers:
            if other.kind() == layer.kind() and other.reverse and not layer.reverse:
                cat = _find_cat(layer, other)
                if cat is not None:
                    layers.remove(other)
                    _replace(graph, [layer, other], cat, lanes)
                    break
        if cat is None:
            _replace(graph, [layer], None, lanes)
    stable_topological_sort(graph)


def _replace(graph: Graph, layers: list[_Layer], cat: Node | None, lanes: int) -> None:
    first = layers[0]
    hidden_size = first.weights[0].meta["val"].size(0) // GATES[first.mode]
    output_size = first.weights[1].meta["val"].size(1)

    def call(target, *args):
        node = graph.call_function(target, args)
        fake_args = torch.fx.map_arg(args, lambda n: n.meta["val"])
        fake_mode = first.input.meta["val"].fake_mode
        with fake_mode, enable_python_dispatcher():
            node.meta["val"] = target(*fake_args)
        return node

    def states(nodes):
        if all(_is_zeros(node) for node in nodes):
            return []
        # mkldnn_rnn_layer has a dimension of layers in front.
        return [
            call(aten.squeeze.dim, n, 0) if n.meta["val"].dim() == 3 else n
            for n in nodes
        ]

    with graph.inserting_before(layers[-1].node):
        hx = states([layer.hx for layer in layers])
        cx = [] if first.cx is None else states([layer.cx for layer in layers])
        weights = [w for layer in layers for w in layer.weights]
        if lanes:
            weights = [
                call(
                    torch.ops.torch_rnn.rnn_pack_weights.default,
                    layer.weights,
                    layer.mode,
                    layer.has_biases,
                    lanes,
                )
                for layer in layers
            ]
            for kind in ("rnn", first.mode.lower()):
                counters["inductor"][f"{kind}_weight_pack_matcher_count"] += len(layers)
        node = call(
            torch.ops.torch_rnn.rnn_layers.default,
            first.input,
            weights,
            hx,
            cx,
            first.mode,
            hidden_size,
            output_size,
            first.has_biases,
            [layer.reverse for layer in layers],
            lanes,
        )
        for key in ("nn_module_stack", "stack_trace"):
            if key in first.node.meta:
                node.meta[key] = first.node.meta[key]
        counters["inductor"]["rnn_layers_matcher_count"] += 1
        results = {
            i: call(operator.getitem, node, i)
            for i in range(3)
            if any(layer.output(i) for layer in layers)
        }
        old = []
        for d, layer in enumerate(layers):
            for i, result in results.items():
                user = layer.output(i)
                if user is None:
                    continue
                old.append(user)
                if i == 0:
                    new = result if cat is None else None
                elif user.meta["val"].dim() == 3:
                    new = call(aten.slice.Tensor, result, 0, d, d + 1)
                else:
                    new = call(aten.select.int, result, 0, d)
                if new is not None:
                    user.replace_all_uses_with(new)
    if cat is not None:
        cat.replace_all_uses_with(results[0])
        graph.erase_node(cat)
    for user in old:
        graph.erase_node(user)
    for layer in layers:
        graph.erase_node(layer.node)


@dataclasses.dataclass
class RnnNode:
    """What became of a layer, or of one direction of it, in a graph before lowering."""

    modules: dict[str, tuple[str, Any]]
    """The modules that it is in, from the outermost to the layer: key to name and type."""
    kernel: str
    packed: bool
    reason: str
    """Why it is not the C++ kernel, or why the weights are not packed; else empty."""

    def __str__(self) -> str:
        name = next(reversed(self.modules.values()), ("a recurrent layer",))[0]
        packed = "packed" if self.packed else "not packed"
        reason = f", as {self.reason}" if self.reason else ""
        return f"{name}: {self.kernel}, {packed}{reason}"

    @staticmethod
    def parse(node: Node) -> "RnnNode | None":
        ops = torch.ops.torch_rnn
        kernel, reason = "training", "gradients are on"
        packed = False
        if node.target is ops.rnn_layers.default:
            kernel, packed = "C++ kernel", bool(node.args[-1] != 0)
            if packed:
                reason = ""
            elif config.freezing:
                reason = "the weights are not constants of the graph"
            else:
                reason = "config.freezing is off"
        elif layer := _Layer.parse(node):
            onednn = node.target is aten.mkldnn_rnn_layer.default
            kernel = "oneDNN" if onednn else "ATen"
            packed = onednn and any(_is_packed(w) for w in layer.weights)
            reason = _obstacle(layer) or "the weights are not constants of the graph"
        elif node.target is not ops.rnn_layer_train.default:
            return None
        modules = node.meta.get("nn_module_stack", {})
        return RnnNode(modules, kernel, packed, reason)


def _is_packed(weight: Node) -> bool:
    module = weight.graph.owning_module
    if weight.op != "get_attr" or module is None:
        return False
    return bool(_get_attr(module, str(weight.target)).is_mkldnn)


def log_rnn_layers(graph: Graph) -> None:
    """Tell ``TORCH_LOGS=rnn`` what became of each recurrent layer of a graph."""
    if rnn_log.isEnabledFor(logging.INFO):
        for node in graph.nodes:
            if layer := RnnNode.parse(node):
                rnn_log.info("%s", layer)
