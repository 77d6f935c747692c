# mypy: allow-untyped-defs
"""Lowering of ``torch_rnn::rnn_layer``, one direction of one recurrent layer."""

import torch
from torch._dispatch.python import enable_python_dispatcher

from ..lowering import (
    empty,
    fallback_handler,
    register_lowering,
    rev,
    squeeze,
    unsqueeze,
)


aten = torch.ops.aten
_ATEN_OPS = {
    "LSTM": aten.lstm.input,
    "GRU": aten.gru.input,
    "RNN_TANH": aten.rnn_tanh.input,
    "RNN_RELU": aten.rnn_relu.input,
}


@register_lowering(torch.ops.torch_rnn.rnn_layer.default, type_promotion_kind=None)
def rnn_layer(
    input, weights, hx, cx, mode, has_biases, reverse, *, autocast_dtype=None
):
    """Call ATen's operator for a layer, without the Python that rnn_layer runs in eager."""
    if autocast_dtype is not None:
        # A call from generated code does not run under autocast.
        fallback = fallback_handler(
            torch.ops.torch_rnn.rnn_layer.default, add_to_fallback_set=False
        )
        return fallback(
            *(input, weights, hx, cx, mode, has_biases, reverse),
            autocast_dtype=autocast_dtype,
        )
    states = [unsqueeze(s, 0) for s in (hx, cx) if s is not None]
    # The fake outputs come from the decomposition, which does not unroll over time.
    with enable_python_dispatcher():
        output, *final = fallback_handler(_ATEN_OPS[mode], add_to_fallback_set=False)(
            rev(input, [0]) if reverse else input,
            states if mode == "LSTM" else states[0],
            list(weights),
            *(has_biases, 1, 0.0, False, False, False),
        )
    if reverse:
        output = rev(output, [0])
    hy, *cy = (squeeze(s, 0) for s in final)
    if not cy:
        cy = [empty([0], dtype=input.get_dtype(), device=input.get_device())]
    return output, hy, *cy
