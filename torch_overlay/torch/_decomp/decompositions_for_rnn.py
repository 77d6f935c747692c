# mypy: allow-untyped-defs
"""One operator for one direction of one recurrent layer.

``torch_rnn::rnn_layer`` stands in a graph for the whole time loop, so neither the
graph nor the time to compile it depends on the sequence length.  It serves every
kind of layer that :class:`torch.nn.RNNBase` has; the kernel is ATen's own.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false


_RNN_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

_lib = torch.library.Library("torch_rnn", "DEF")
_ARGS = (
    "Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, str mode, bool has_biases, "
    "bool reverse, *, ScalarType? autocast_dtype=None"
)
_lib.define(
    f"rnn_layer({_ARGS}) -> (Tensor output, Tensor hy, Tensor cy)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Runs the layer again, so that the forward keeps nothing of the time steps.
_lib.define(
    f"rnn_layer_backward(Tensor grad_output, Tensor grad_hy, Tensor? grad_cy, {_ARGS}) "
    "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_cx, Tensor[] grad_weights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check_args(input, weights, hx, cx, mode, has_biases):
    """Raise an error that names the argument whose size does not fit the others."""
    torch._check(
        mode in _GATES,
        lambda: f"rnn_layer: mode must be one of {list(_GATES)}, got {mode!r}",
    )
    is_lstm = mode == "LSTM"
    torch._check(
        (cx is not None) == is_lstm,
        lambda: f"rnn_layer: cx must be given for LSTM and only there, mode is {mode}",
    )
    torch._check(
        input.dim() == 3,
        lambda: f"rnn_layer: input must be (T, B, I), got {input.dim()} dimensions",
    )
    states = {"hx": hx, "cx": cx} if is_lstm else {"hx": hx}
    for name, state in states.items():
        torch._check(
            state.dim() == 2,
            lambda: f"rnn_layer: {name} must be (B, H), got {state.dim()} dimensions",
        )
        torch._check(
            state.size(0) == input.size(1),
            lambda: (
                f"rnn_layer: {name} has batch {state.size(0)}, input has {input.size(1)}"
            ),
        )
    hidden_size = states["cx" if is_lstm else "hx"].size(1)
    output_size = hx.size(1)
    gates = _GATES[mode] * hidden_size
    shapes: list[tuple[int, ...]] = [(gates, input.size(2)), (gates, output_size)]
    if has_biases:
        shapes += [(gates,), (gates,)]
    if output_size != hidden_size:
        shapes.append((output_size, hidden_size))
    torch._check(
        len(weights) == len(shapes),
        lambda: (
            f"rnn_layer: weights must hold {len(shapes)} tensors, got {len(weights)}"
        ),
    )
    for i, (weight, shape) in enumerate(zip(weights, shapes)):
        torch._check(
            weight.dim() == len(shape)
            and all(a == b for a, b in zip(weight.shape, shape)),
            lambda: (
                f"rnn_layer: weights[{i}] must be {shape}, got {tuple(weight.shape)}"
            ),
        )


def _call_aten(input, weights, hx, cx, mode, has_biases, reverse, autocast_dtype):
    x = input.flip(0) if reverse else input
    state = hx.unsqueeze(0) if cx is None else [hx.unsqueeze(0), cx.unsqueeze(0)]
    with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None):
        output, *final = _RNN_FUNCTIONS[mode](
            x, state, weights, has_biases, 1, 0.0, False, False, False
        )
    output = output.flip(0) if reverse else output
    return output, *(s.squeeze(0) for s in final)


def _rnn_layer_cpu(
    input, weights, hx, cx, mode, has_biases, reverse, *, autocast_dtype=None
):
    _check_args(input, weights, hx, cx, mode, has_biases)
    output, hy, *cy = _call_aten(
        input, weights, hx, cx, mode, has_biases, reverse, autocast_dtype
    )
    return output.contiguous(), hy, *(cy or [input.new_empty(0)])


def _rnn_layer_backward_cpu(
    grad_output,
    grad_hy,
    grad_cy,
    input,
    weights,
    hx,
    cx,
    mode,
    has_biases,
    reverse,
    *,
    autocast_dtype=None,
):
    leaves = [input, hx, *([] if cx is None else [cx]), *weights]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in leaves]
        x, h, *rest = leaves
        c = None if cx is None else rest.pop(0)
        outputs = _call_aten(x, rest, h, c, mode, has_biases, reverse, autocast_dtype)
        grads = [grad_output, grad_hy, grad_cy][: len(outputs)]
        grads = torch.autograd.grad(outputs, leaves, grads)
    grad_x, grad_h, *grad_rest = (g.contiguous() for g in grads)
    grad_c = input.new_empty(0) if cx is None else grad_rest.pop(0)
    return grad_x, grad_h, grad_c, grad_rest


def _rnn_layer_fake(
    input, weights, hx, cx, mode, has_biases, reverse, *, autocast_dtype=None
):
    _check_args(input, weights, hx, cx, mode, has_biases)
    dtype = input.dtype
    state_dtype = dtype
    if autocast_dtype is not None:
        # Under autocast only the matrix products are in the lower precision; a state
        # that is updated in place of being a product's result stays as wide as it was.
        dtype = state_dtype = autocast_dtype
        if mode == "GRU":
            dtype = torch.promote_types(hx.dtype, autocast_dtype)
        elif mode == "LSTM":
            state_dtype = torch.promote_types(cx.dtype, autocast_dtype)
    seq_len, batch_size, _ = input.shape
    output = input.new_empty((seq_len, batch_size, hx.size(1)), dtype=dtype)
    hy = hx.new_empty(hx.shape, dtype=dtype)
    if cx is None:
        return output, hy, input.new_empty(0)
    return output, hy, cx.new_empty(cx.shape, dtype=state_dtype)


def _rnn_layer_backward_fake(
    grad_output, grad_hy, grad_cy, input, weights, hx, cx, *args, **kwargs
):
    grad_c = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    grad_weights = [w.new_empty(w.shape) for w in weights]
    return input.new_empty(input.shape), hx.new_empty(hx.shape), grad_c, grad_weights


def _setup_context(ctx, inputs, keyword_only_inputs, output):
    input, weights, hx, cx, *ctx.args = inputs
    ctx.kwargs = keyword_only_inputs
    ctx.save_for_backward(input, hx, cx, *weights)


def _backward(ctx, grad_output, grad_hy, grad_cy):
    input, hx, cx, *weights = ctx.saved_tensors
    grad_x, grad_h, grad_c, grad_weights = torch.ops.torch_rnn.rnn_layer_backward(
        *(grad_output, grad_hy, None if cx is None else grad_cy),
        *(input, weights, hx, cx, *ctx.args),
        **ctx.kwargs,
    )
    no_grads = [None] * len(ctx.args)
    return grad_x, grad_weights, grad_h, None if cx is None else grad_c, *no_grads


_lib.impl("rnn_layer", _rnn_layer_cpu, "CPU")
_lib.impl("rnn_layer_backward", _rnn_layer_backward_cpu, "CPU")
torch.library.register_fake("torch_rnn::rnn_layer", _rnn_layer_fake, lib=_lib)
torch.library.register_fake(
    "torch_rnn::rnn_layer_backward", _rnn_layer_backward_fake, lib=_lib
)
torch.library.register_autograd(
    "torch_rnn::rnn_layer", _backward, setup_context=_setup_context, lib=_lib
)


def rnn_layer(
    input: Tensor,
    weights: list[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    mode: str,
    has_biases: bool,
    reverse: bool,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Run one direction of one recurrent layer over a whole sequence on CPU.

    The formulas are those of :class:`torch.nn.LSTM`, :class:`torch.nn.GRU` and
    :class:`torch.nn.RNN`.  The derivative runs the layer
    again; it has no derivative itself.

    Args:
        input: ``(T, B, I)``; T must not be 0.
        weights: ``w_ih (G*H, I)``, ``w_hh (G*H, P)``, with ``has_biases`` also
            ``b_ih (G*H)`` and ``b_hh (G*H)``, and for an LSTM with projections
            ``w_hr (P, H)``.  G is the number of gates: 4 for LSTM, 3 for GRU, else 1.
            P is H without projections.
        hx: initial hidden state, ``(B, P)``.
        cx: initial cell state of an LSTM, ``(B, H)``; ``None`` for the others.
        mode: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        reverse: go from the last time step to the first.
        autocast_dtype: the type of CPU autocast to run under, if any.

    Returns:
        output ``(T, B, P)`` contiguous, ``hy (B, P)`` and ``cy (B, H)`` (empty unless LSTM).

    Raises:
        RuntimeError: sizes do not fit together, or T is 0.
    """
    return torch.ops.torch_rnn.rnn_layer.default(
        input,
        weights,
        hx,
        cx,
        mode,
        has_biases,
        reverse,
        autocast_dtype=autocast_dtype,
    )


def _autocast_dtype() -> torch.dtype | None:
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return None


def can_use_rnn_layer(input: Tensor, states, params) -> bool:
    """Whether a layer may become one node: all of it is on CPU."""
    tensors = [input, *states, *(p for layer in params for p in layer)]
    return all(t.device.type == "cpu" for t in tensors)


def _onednn_serves(dtype: torch.dtype) -> bool:
    """Whether oneDNN's LSTM runs in this type on this CPU."""
    if not torch._C._get_mkldnn_enabled():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float


def one_layer_rnn(inp, hidden, params, has_biases, mode, reverse=False):
    """A layer of GRU or RNN as one node, in the signature that ``_rnn_helper`` calls."""
    output, hy, _ = rnn_layer(
        inp, params, hidden, None, mode, has_biases, reverse, _autocast_dtype()
    )
    return output, hy


def one_layer_lstm(inp, hidden, params, has_biases, reverse=False):
    """A layer of LSTM as one node: oneDNN's operator where it serves, else rnn_layer."""
    hx, cx = hidden
    autocast_dtype = _autocast_dtype()
    has_projections = hx.size(1) != cx.size(1)
    # oneDNN divides by the batch size.
    is_empty = guard_or_false(inp.numel() == 0)
    if not has_projections and not is_empty:
        if autocast_dtype is not None:
            # All of a layer is cast, states too, as autocast does for oneDNN's operator.
            inp, hx, cx, *params = (
                t.to(autocast_dtype) for t in (inp, hx, cx, *params)
            )
            autocast_dtype = None
        tensors = (inp, hx, cx, *params)
        # oneDNN's operator is called without the workspace that a backward needs.
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        one_dtype = len({t.dtype for t in tensors}) == 1
        if one_dtype and not wants_grad and _onednn_serves(inp.dtype):
            return _onednn_lstm_layer(inp, hx, cx, params, has_biases, reverse)
    output, hy, cy = rnn_layer(
        inp, params, hx, cx, "LSTM", has_biases, reverse, autocast_dtype
    )
    return output, (hy, cy)


def _onednn_lstm_layer(inp, hx, cx, params, has_biases, reverse):
    w_ih, w_hh, *biases = params
    if not has_biases:
        # The operator always takes two biases and adds them.
        biases = [w_ih.new_zeros(w_ih.size(0))] * 2
    output, hy, cy, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        inp.contiguous(),
        w_ih,
        w_hh,
        *biases,
        hx.unsqueeze(0).contiguous(),
        cx.unsqueeze(0).contiguous(),
        reverse,
        [],  # batch_sizes: the batch is dense
        2,  # mode: ideep::rnn_kind::LSTM
        hx.size(1),
        1,  # num_layers
        has_biases,
        False,  # bidirectional: each direction is a layer of its own
        False,  # batch_first: _rnn_helper has transposed the input
        False,  # train
    )
    return output, (hy.squeeze(0), cy.squeeze(0))
