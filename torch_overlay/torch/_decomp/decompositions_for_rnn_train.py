# mypy: allow-untyped-defs
"""Training of one direction of one recurrent layer on CPU.

``torch_rnn::rnn_layer_train`` is ``torch_rnn::rnn_layer`` with one more output, the
reserve: what the backward needs of the time steps.  Its derivative goes through the
steps once, from the last to the first, with one matrix product a step, and makes the
gradients of weights and input by one product over all steps.
"""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import decompositions_for_rnn as inference


_lib = torch.library.Library("torch_rnn", "FRAGMENT")
_LAYER = "Tensor input, Tensor[] weights, Tensor hx, Tensor? cx"
_OPTIONS = "str mode, bool has_biases, bool reverse"
_lib.define(
    f"rnn_layer_train({_LAYER}, {_OPTIONS}, bool onednn) "
    "-> (Tensor output, Tensor hy, Tensor cy, Tensor[] reserve)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "rnn_layer_train_backward("
    f"Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, {_LAYER}, "
    f"Tensor output, Tensor hy, Tensor cy, Tensor[] reserve, {_OPTIONS}, bool onednn, "
    "bool input_grad) "
    "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_cx, Tensor[] grad_weights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# The last dimension of the reserve, in hidden sizes.  GRU: the hidden part of the new
# gate, then the gates r, z, n.  LSTM: the gates i, f, g, o, then the cell.  RNN has its
# output and needs nothing else.
_RESERVED = {"LSTM": 5, "GRU": 4}


def _unpack(weights, has_biases):
    """w_ih, w_hh, b_ih, b_hh, w_hr; what a layer does not have is None."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    return w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None


def _steps(reverse, *tensors):
    """The tensors' time steps, in the order in which the layer takes them."""
    return zip(*(t.unbind(0)[:: -1 if reverse else 1] for t in tensors))


def _project_input(input, weight, bias, out):
    """``input @ weight.T + bias`` for all time steps at once, into ``out``."""
    rows, out = input.reshape(-1, input.size(2)), out.flatten(0, 1)
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _forward_rnn(input, weights, hx, mode, has_biases, reverse, output):
    w_ih, w_hh, b_ih, b_hh, _ = _unpack(weights, has_biases)
    _project_input(input, w_ih, b_ih + b_hh if has_biases else None, output)
    activate = torch.tanh_ if mode == "RNN_TANH" else torch.relu_
    w_hh = w_hh.t()
    for (h,) in _steps(reverse, output):
        hx = activate(h.addmm_(hx, w_hh))


def _forward_gru(input, weights, hx, has_biases, reverse, output, reserve):
    w_ih, w_hh, b_ih, b_hh, _ = _unpack(weights, has_biases)
    size = hx.size(1)
    n_hidden = reserve[..., :size]
    if has_biases:
        n_hidden.copy_(b_hh[2 * size :])
        b_ih = b_ih.clone()
        b_ih[: 2 * size] += b_hh[: 2 * size]
    else:
        n_hidden.zero_()
    _project_input(input, w_ih, b_ih, reserve[..., size:])
    # In the order of the reserve, n before r and z, one product serves all gates.
    w_hh = w_hh.roll(size, 0).t()
    for h, products, r_z, n_hidden, r, z, n in _steps(
        *(reverse, output, reserve[..., : 3 * size]),
        *(reserve[..., size : 3 * size], *reserve.split(size, 2)),
    ):
        products.addmm_(hx, w_hh)
        r_z.sigmoid_()
        n.addcmul_(r, n_hidden).tanh_()
        hx = torch.lerp(n, hx, z, out=h)


def _forward_lstm(input, weights, hx, cx, has_biases, reverse, output, reserve):
    w_ih, w_hh, b_ih, b_hh, w_hr = _unpack(weights, has_biases)
    size = cx.size(1)
    gates = reserve[..., : 4 * size]
    _project_input(input, w_ih, b_ih + b_hh if has_biases else None, gates)
    w_hh = w_hh.t()
    hidden = torch.empty_like(cx)
    for y, products, i_f, i, f, g, o, c in _steps(
        reverse, output, gates, reserve[..., : 2 * size], *reserve.split(size, 2)
    ):
        products.addmm_(hx, w_hh)
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        cx = torch.mul(i, g, out=c).addcmul_(f, cx)
        torch.tanh(cx, out=hidden)
        if w_hr is None:
            hx = torch.mul(o, hidden, out=y)
        else:
            hx = torch.mm(hidden.mul_(o), w_hr.t(), out=y)
    return cx.clone()


def _onednn_args(input, weights, hx, cx, has_biases):
    w_ih, w_hh, b_ih, b_hh, _ = _unpack(weights, has_biases)
    if not has_biases:
        b_ih = b_hh = w_ih.new_zeros(w_ih.size(0))
    states = hx.unsqueeze(0).contiguous(), cx.unsqueeze(0).contiguous()
    return input.contiguous(), w_ih, w_hh, b_ih, b_hh, *states


def _forward_onednn(input, weights, hx, cx, has_biases, reverse):
    # Without grad mode the operator makes no workspace.
    with torch.enable_grad():
        output, hy, cy, workspace = torch.ops.aten.mkldnn_rnn_layer(
            *_onednn_args(input, weights, hx, cx, has_biases),
            *(reverse, [], 2, hx.size(1), 1, has_biases, False, False, True),
        )
    # Only oneDNN knows how large its workspace is, so what the graph sees of it is
    # empty, and the memory behind it goes along; the size tells if it got lost.
    size = torch.tensor(workspace.untyped_storage().nbytes())
    return output, hy.squeeze(0), cy.squeeze(0), [workspace[:0], size]


def _rnn_layer_train_cpu(input, weights, hx, cx, mode, has_biases, reverse, onednn):
    inference._check_args(input, weights, hx, cx, mode, has_biases)
    seq_len, batch_size, _ = input.shape
    torch._check(
        seq_len > 0, lambda: "Expected sequence length to be larger than 0 in RNN"
    )
    with torch._C._DisableAutocast():
        if onednn:
            return _forward_onednn(input, weights, hx, cx, has_biases, reverse)
        output, hy, cy, reserve = _rnn_layer_train_fake(
            input, weights, hx, cx, mode, has_biases, reverse, onednn
        )
        if mode == "LSTM":
            cy = _forward_lstm(
                input, weights, hx, cx, has_biases, reverse, output, *reserve
            )
        elif mode == "GRU":
            _forward_gru(input, weights, hx, has_biases, reverse, output, *reserve)
        else:
            _forward_rnn(input, weights, hx, mode, has_biases, reverse, output)
        return output, hy.copy_(output[0 if reverse else -1]), cy, reserve


def _rnn_layer_train_fake(input, weights, hx, cx, mode, has_biases, reverse, onednn):
    inference._check_args(input, weights, hx, cx, mode, has_biases)
    seq_len, batch_size, _ = input.shape
    output = input.new_empty((seq_len, batch_size, hx.size(1)))
    hy = hx.new_empty(hx.shape)
    cy = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    reserve = []
    if onednn:
        reserve = [
            input.new_empty(0, dtype=torch.uint8),
            input.new_empty((), dtype=torch.int64),
        ]
    elif mode in _RESERVED:
        size = _RESERVED[mode] * (hx if cx is None else cx).size(1)
        reserve = [input.new_empty((seq_len, batch_size, size))]
    return output, hy, cy, reserve


def _backward_rnn(grads, grad_hx, w_hh, mode, reverse, output):
    """Returns the gradient of the gates before their activation."""
    if mode == "RNN_TANH":
        gates = torch.addcmul(output.new_ones(()), output, output, value=-1)
    else:
        gates = (output > 0).to(output.dtype)
    steps = list(_steps(not reverse, gates, grads))
    for i, (gate, grad) in enumerate(steps):
        before = steps[i + 1][1] if i + 1 < len(steps) else grad_hx
        before.addmm_(gate.mul_(grad), w_hh)
    return gates


def _backward_gru(grads, grad_hx, w_hh, reverse, output, reserve):
    """Returns the gradient of the parts of the reserve before their activation."""
    size = grad_hx.size(1)
    n_hidden, r, z, n = reserve.split(size, 2)
    # What the gradient of a step's output is multiplied by, for all steps at once.
    gates = torch.empty_like(reserve)
    d_n_hidden, d_r, d_z, d_n = gates.split(size, 2)
    torch.addcmul(z.new_ones(()), n, n, value=-1, out=d_n)
    one_less_z = 1 - z
    d_n.mul_(one_less_z)
    torch.mul(d_n, r, out=d_n_hidden)
    torch.mul(d_n_hidden, n_hidden, out=d_r)
    d_r.addcmul_(d_r, r, value=-1)
    torch.sub(output, n, out=d_z)
    d_z.mul_(one_less_z)
    w_hh = w_hh.roll(size, 0)
    steps = list(
        _steps(
            not reverse,
            *(gates.unflatten(2, (4, size)), gates[..., : 3 * size]),
            *(z, grads.unsqueeze(2), grads),
        )
    )
    for i, (step, products, z, grad_unsqueezed, grad) in enumerate(steps):
        before = steps[i + 1][4] if i + 1 < len(steps) else grad_hx
        step.mul_(grad_unsqueezed)
        before.addcmul_(grad, z).addmm_(products, w_hh)
    return gates


def _backward_lstm(grads, grad_hx, grad_cx, w_hh, w_hr, reverse, reserve):
    """Returns the gradient of the gates before their activation.

    Overwrites ``grad_cx``, the gradient of the last cell, by that of the first."""
    size = grad_cx.size(1)
    i, f, g, o, c = reserve.split(size, 2)
    tanh_c = c.tanh()
    gates = reserve.new_empty((*reserve.shape[:2], 4 * size))
    d_i, d_f, d_g, d_o = gates.split(size, 2)
    # c - i * g is the forget gate times the cell before.
    torch.addcmul(c, i, g, value=-1, out=d_f)
    d_f.addcmul_(d_f, f, value=-1)
    torch.mul(i, g, out=d_i)
    torch.addcmul(i, d_i, g, value=-1, out=d_g)
    d_i.addcmul_(d_i, i, value=-1)
    torch.mul(o, tanh_c, out=d_o)
    d_c = torch.addcmul(o, d_o, tanh_c, value=-1)
    hidden = d_o.clone() if w_hr is not None else None
    d_o.addcmul_(d_o, o, value=-1)
    steps = list(
        _steps(
            not reverse,
            *(gates[..., : 3 * size].unflatten(2, (3, size)), d_o, gates, d_c),
            *(f, grads),
        )
    )
    grad_cx_unsqueezed = grad_cx.unsqueeze(1)
    grad_h = torch.empty_like(grad_cx)
    for k, (i_f_g, d_o, step, d_c, f, grad) in enumerate(steps):
        before = steps[k + 1][5] if k + 1 < len(steps) else grad_hx
        if w_hr is not None:
            grad = torch.mm(grad, w_hr, out=grad_h)
        grad_cx.addcmul_(grad, d_c)
        d_o.mul_(grad)
        i_f_g.mul_(grad_cx_unsqueezed)
        grad_cx.mul_(f)
        before.addmm_(step, w_hh)
    return gates, hidden


def _grad_w_hh(gates, hx, output, reverse):
    """The products of the gates' gradients with the hidden states before them."""
    first, rest = (-1, slice(-1)) if reverse else (0, slice(1, None))
    previous = output[1:] if reverse else output[:-1]
    product = gates[first].t() @ hx
    return product.addmm_(
        gates[rest].reshape(-1, gates.size(2)).t(),
        previous.reshape(-1, previous.size(2)),
    )


def _backward_onednn(
    grad_output, grad_hy, grad_cy, input, weights, hx, cx, output, hy, cy, reserve,
    has_biases, reverse,
):  # fmt: skip
    args = _onednn_args(input, weights, hx, cx, has_biases)
    workspace, size = reserve
    if workspace.untyped_storage().nbytes() != size.item():
        # A copy, as saved_tensors_hooks make it, has not got the memory behind.
        args_again = input, weights, hx, cx, has_biases, reverse
        workspace, _ = _forward_onednn(*args_again)[3]
    workspace = workspace.new_empty(0).set_(workspace.untyped_storage())
    d_x, d_w_ih, d_w_hh, d_b, _, d_h, d_c = torch.ops.aten.mkldnn_rnn_layer_backward(
        *args,
        *(output, hy.unsqueeze(0), cy.unsqueeze(0)),
        grad_output,
        *(None if g is None else g.unsqueeze(0) for g in (grad_hy, grad_cy)),
        *(reverse, 2, hx.size(1), 1, has_biases, True, False, [], False, workspace),
    )
    biases = [d_b, d_b.clone()] if has_biases else []
    return d_x, d_h.squeeze(0), d_c.squeeze(0), [d_w_ih, d_w_hh, *biases]


def _rnn_layer_train_backward_cpu(
    grad_output, grad_hy, grad_cy, input, weights, hx, cx, output, hy, cy, reserve,
    mode, has_biases, reverse, onednn, input_grad,
):  # fmt: skip
    with torch._C._DisableAutocast():
        if onednn:
            d_x, *rest = _backward_onednn(
                *(grad_output, grad_hy, grad_cy, input, weights, hx, cx),
                *(output, hy, cy, reserve, has_biases, reverse),
            )
            return d_x if input_grad else input.new_empty(0), *rest
        w_ih, w_hh, _, _, w_hr = _unpack(weights, has_biases)
        size = hx.size(1)
        # Becomes the gradient of each step's output by all that comes after it.
        grads = torch.zeros_like(output)
        if grad_output is not None:
            grads.copy_(grad_output)
        if grad_hy is not None:
            grads[0 if reverse else -1] += grad_hy
        grad_hx = torch.zeros_like(hx)
        grad_cx = input.new_empty(0)
        grad_w_hr = []
        if mode == "LSTM":
            grad_cx = cx.new_zeros(cx.shape)
            if grad_cy is not None:
                grad_cx.copy_(grad_cy)
            gates, hidden = _backward_lstm(
                grads, grad_hx, grad_cx, w_hh, w_hr, reverse, *reserve
            )
            if w_hr is not None:
                grad_w_hr = [grads.flatten(0, 1).t() @ hidden.flatten(0, 1)]
            input_gates = hidden_gates = gates
        elif mode == "GRU":
            gates = _backward_gru(grads, grad_hx, w_hh, reverse, output, *reserve)
            hidden_gates, input_gates = gates[..., : 3 * size], gates[..., size:]
        else:
            gates = _backward_rnn(grads, grad_hx, w_hh, mode, reverse, output)
            input_gates = hidden_gates = gates
        grad_w_hh = _grad_w_hh(hidden_gates, hx, output, reverse)
        rows = input_gates.flatten(0, 1)
        grad_w_ih = rows.t() @ input.reshape(-1, input.size(2))
        grad_biases = []
        if has_biases:
            sums = gates.sum((0, 1))
            if mode == "GRU":
                grad_biases = [sums[size:].clone(), sums[: 3 * size].roll(-size)]
            else:
                grad_biases = [sums, sums.clone()]
        if mode == "GRU":
            grad_w_hh = grad_w_hh.roll(-size, 0)
        if input_grad:
            grad_input = (rows @ w_ih).view(input.shape)
        else:
            grad_input = input.new_empty(0)
        return (
            grad_input,
            grad_hx,
            grad_cx,
            [grad_w_ih, grad_w_hh, *grad_biases, *grad_w_hr],
        )


def _rnn_layer_train_backward_fake(
    grad_output, grad_hy, grad_cy, input, weights, hx, cx, output, hy, cy, reserve,
    mode, has_biases, reverse, onednn, input_grad,
):  # fmt: skip
    grad_input = input.new_empty(input.shape if input_grad else 0)
    grad_cx = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    grad_weights = [w.new_empty(w.shape) for w in weights]
    return grad_input, hx.new_empty(hx.shape), grad_cx, grad_weights


def _setup_context(ctx, inputs, output):
    input, weights, hx, cx, *ctx.args = inputs
    ctx.set_materialize_grads(False)
    *outputs, reserve = output
    ctx.mark_non_differentiable(*reserve)
    ctx.reserved = len(reserve)
    ctx.save_for_backward(input, hx, cx, *outputs, *reserve, *weights)


def _backward(ctx, grad_output, grad_hy, grad_cy, _):
    input, hx, cx, output, hy, cy, *rest = ctx.saved_tensors
    reserve, weights = rest[: ctx.reserved], rest[ctx.reserved :]
    input_grad = ctx.needs_input_grad[0]
    grad_x, grad_h, grad_c, grad_weights = torch.ops.torch_rnn.rnn_layer_train_backward(
        *(grad_output, grad_hy, None if cx is None else grad_cy),
        *(input, weights, hx, cx, output, hy, cy, reserve, *ctx.args, input_grad),
    )
    return (
        grad_x if input_grad else None,
        grad_weights,
        grad_h,
        None if cx is None else grad_c,
        *[None] * len(ctx.args),
    )


_lib.impl("rnn_layer_train", _rnn_layer_train_cpu, "CPU")
_lib.impl("rnn_layer_train_backward", _rnn_layer_train_backward_cpu, "CPU")
torch.library.register_fake(
    "torch_rnn::rnn_layer_train", _rnn_layer_train_fake, lib=_lib
)
torch.library.register_fake(
    "torch_rnn::rnn_layer_train_backward", _rnn_layer_train_backward_fake, lib=_lib
)
torch.library.register_autograd(
    "torch_rnn::rnn_layer_train", _backward, setup_context=_setup_context, lib=_lib
)


def rnn_layer_train(
    input: Tensor,
    weights: list[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    mode: str,
    has_biases: bool,
    reverse: bool,
    onednn: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    r"""Run one direction of one recurrent layer on CPU and keep what its backward needs.

    Arguments, shapes and the first three results are those of
    :func:`torch._decomp.decompositions_for_rnn.rnn_layer`; all tensors have one dtype.
    It has a first derivative in all of its tensors and no second one.

    Args:
        onednn: use oneDNN's LSTM, which serves float32 without projections and a batch
            that is not empty.

    Returns:
        output, hy, cy, and a list of what the backward needs: none for RNN,
        ``(T, B, 4 * H)`` for GRU, ``(T, B, 5 * H)`` for LSTM, oneDNN's workspace and its
        size with ``onednn``.

    Raises:
        RuntimeError: sizes do not fit together, or T is 0.
    """
    return torch.ops.torch_rnn.rnn_layer_train.default(
        input, weights, hx, cx, mode, has_biases, reverse, onednn
    )


def _trains(tensors: list[Tensor]) -> bool:
    """Whether a derivative is wanted that rnn_layer_train has."""
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and len({t.dtype for t in tensors}) == 1
        and not torch.is_autocast_enabled("cpu")
    )


def one_layer_rnn(inp, hidden, params, has_biases, mode, reverse=False):
    """A layer of GRU or RNN as one node, in the signature that ``_rnn_helper`` calls."""
    if not _trains([inp, hidden, *params]):
        return inference.one_layer_rnn(inp, hidden, params, has_biases, mode, reverse)
    output, hy, _, _ = rnn_layer_train(
        inp, params, hidden, None, mode, has_biases, reverse, False
    )
    return output, hy


def one_layer_lstm(inp, hidden, params, has_biases, reverse=False):
    """A layer of LSTM as one node, in the signature that ``_rnn_helper`` calls."""
    hx, cx = hidden
    if not _trains([inp, hx, cx, *params]):
        return inference.one_layer_lstm(inp, hidden, params, has_biases, reverse)
    onednn = (
        inp.dtype == torch.float
        and inference._onednn_serves(inp.dtype)
        and hx.size(1) == cx.size(1)
        and not guard_or_false(inp.numel() == 0)
    )
    output, hy, cy, _ = rnn_layer_train(
        inp, params, hx, cx, "LSTM", has_biases, reverse, onednn
    )
    return output, (hy, cy)
