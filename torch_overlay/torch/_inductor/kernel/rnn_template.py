# mypy: allow-untyped-defs
"""Lowering of ``torch_rnn::rnn_layers`` to its C++ kernel."""

import torch

from .. import ir, rnn_ops  # noqa: F401  # rnn_ops defines the operator
from ..codegen.cpp_rnn_template import CppRnnTemplate
from ..lowering import empty, register_lowering


@register_lowering(torch.ops.torch_rnn.rnn_layers.default, type_promotion_kind=None)
def rnn_layers(
    input, weights, hx, cx, mode, hidden_size, output_size, has_biases, reverse, lanes
):
    """The C++ kernel; both directions of a layer in one call."""
    x = ir.ExternKernel.realize_input(input)
    x.freeze_layout()
    if x.get_stride()[-1] != 1:
        # The kernel takes any strides but of the last dimension.
        x = ir.ExternKernel.require_contiguous(x)
    weights, hx, cx = (
        [
            ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t))
            for t in tensors
        ]
        for tensors in (weights, hx, cx)
    )
    seq_len, batch_size, _ = x.get_size()
    directions = len(reverse)
    sizes = [
        [seq_len, batch_size, directions * output_size],
        [directions, batch_size, output_size],
        [directions, batch_size, hidden_size],
    ][: 3 if mode == "LSTM" else 2]
    layouts = [
        ir.FixedLayout(
            x.get_device_or_error(),
            x.get_dtype(),
            size,
            ir.FlexibleLayout.contiguous_strides(size),
        )
        for size in sizes
    ]
    count = len(weights) // directions
    inputs = [x, *weights, *hx, *cx]
    template = CppRnnTemplate(
        input_nodes=[ir.InputsKernel.unwrap_storage_for_input(t) for t in inputs],
        layout=layouts[0],
        x=x,
        weights=[weights[i * count : (i + 1) * count] for i in range(directions)],
        hx=hx,
        cx=cx,
        mode=mode,
        hidden_size=hidden_size,
        output_size=output_size,
        has_biases=has_biases,
        reverse=reverse,
        lanes=lanes,
    )
    results = [ir.TensorBox.create(output) for output in template.create(layouts)]
    if mode != "LSTM":
        results.append(empty([0], dtype=input.get_dtype(), device=input.get_device()))
    return results
