# mypy: allow-untyped-defs
"""Operators of the C++ kernel for recurrent layers, and the layout of its weights."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp.decompositions_for_rnn import rnn_layer

from .cpu_vec_isa import pick_vec_isa


GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
# Vectors of units in a panel of the projection
_PROJECT_WIDTH = 4

_lib = torch.library.Library("torch_rnn", "FRAGMENT")
_lib.define(
    "rnn_pack_weights(Tensor[] weights, str mode, bool has_biases, int lanes) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "rnn_layers(Tensor input, Tensor[] weights, Tensor[] hx, Tensor[] cx, str mode, "
    "int hidden_size, int output_size, bool has_biases, bool[] reverse, int lanes) "
    "-> (Tensor output, Tensor hy, Tensor cy)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def vector_lanes() -> int:
    """Floats in a vector of the kernel on this CPU; ATen's plain vector has 32 bytes."""
    return pick_vec_isa().bit_width() // 32 or 8


def panel_units(mode: str, hidden_size: int, lanes: int) -> int:
    """Vectors of hidden units in a panel: as many as give four vectors with all gates."""
    return 1 if mode in ("LSTM", "GRU") else min(4, -(-hidden_size // lanes))


def _panels(matrix: Tensor, gates: int, width: int) -> Tensor:
    """``(K, gates * N)`` to ``(panels, K, gates * width)``, N padded with zeros."""
    k = matrix.size(0)
    matrix = matrix.reshape(k, gates, -1)
    n = matrix.size(2)
    panels = -(-n // width)
    matrix = F.pad(matrix, (0, panels * width - n))
    return matrix.reshape(k, gates, panels, width).permute(2, 0, 1, 3)


def _rnn_pack_weights(weights, mode, has_biases, lanes):
    """Lay out the weights of one direction for the C++ kernel.

    Args:
        weights, mode, has_biases: as for ``torch_rnn::rnn_layer``, float32.
        lanes: floats in a vector of the CPU.

    Returns:
        A dense vector of three sections.  First the panels ``(panels, I + P, G, U)`` of
        the transposed ``w_ih`` and ``w_hh``: U hidden units, a multiple of ``lanes``,
        with the gates side by side, units that do not exist being zero.  Then the
        biases ``(panels, 1, G, U)``, added up; for GRU ``(panels, 2, G, U)``, where
        the new gate's ``b_hh`` stays apart in the second row.  Then with projections
        the transposed ``w_hr`` as panels ``(panels, H, 4 * lanes)``.
    """
    w_ih, w_hh, *rest = weights
    gates = GATES[mode]
    hidden_size = w_ih.size(0) // gates
    width = panel_units(mode, hidden_size, lanes) * lanes
    b_ih, b_hh = rest[:2] if has_biases else (w_ih.new_zeros(w_ih.size(0)),) * 2
    if mode == "GRU":
        both, apart = b_hh[: 2 * hidden_size], b_hh[2 * hidden_size :]
        biases = [b_ih + torch.cat([both, torch.zeros_like(apart)]), b_hh]
    else:
        biases = [b_ih + b_hh]
    sections = [
        _panels(torch.cat([w_ih.t(), w_hh.t()]), gates, width),
        _panels(torch.stack(biases), gates, width),
    ]
    if len(rest) > 2 * has_biases:
        sections.append(_panels(rest[-1].t(), 1, _PROJECT_WIDTH * lanes))
    return torch.cat([s.reshape(-1) for s in sections])


def _unpack(packed, mode, input_size, hidden_size, output_size, lanes):
    """Weights and biases from which ``rnn_pack_weights`` makes ``packed``."""
    gates = GATES[mode]
    width = panel_units(mode, hidden_size, lanes) * lanes

    def take(k, gates, width, n):
        nonlocal packed
        panels = -(-n // width)
        section = packed[: panels * k * gates * width]
        packed = packed[section.numel() :]
        section = section.reshape(panels, k, gates, width).permute(1, 2, 0, 3)
        return section.reshape(k, gates, -1)[:, :, :n].reshape(k, gates * n)

    k = input_size + output_size
    w_ih, w_hh = take(k, gates, width, hidden_size).split([input_size, output_size])
    b_ih, *b_hh = take(2 if mode == "GRU" else 1, gates, width, hidden_size)
    if b_hh:
        apart = torch.zeros_like(b_ih)
        apart[2 * hidden_size :] = b_hh[0][2 * hidden_size :]
        b_hh = [apart]
    weights = [w_ih.t(), w_hh.t(), b_ih, *(b_hh or [torch.zeros_like(b_ih)])]
    if output_size != hidden_size:
        weights.append(take(hidden_size, 1, _PROJECT_WIDTH * lanes, output_size).t())
    return weights


def _rnn_layers(
    input,
    weights,
    hx,
    cx,
    mode,
    hidden_size,
    output_size,
    has_biases,
    reverse,
    lanes,
):
    """Run one layer with its directions side by side, as the C++ kernel does.

    Args:
        input: ``(T, B, I)`` float32; T must not be 0.
        weights: for each direction a tensor from ``rnn_pack_weights``, or with
            ``lanes == 0`` all weights of the first direction, then of the second.
        hx, cx: for each direction ``(B, P)`` and ``(B, H)``; none for zeros.
        mode, has_biases: as for ``torch_rnn::rnn_layer``.
        hidden_size, output_size: H and P.
        reverse: for each direction whether it goes from the last step to the first.
        lanes: what the weights are packed for, or 0.

    Returns:
        output ``(T, B, D * P)``, hy ``(D, B, P)``, cy ``(D, B, H)`` (empty unless LSTM).
    """
    count = len(weights) // len(reverse)
    outputs = []
    for i, backwards in enumerate(reverse):
        ws = weights[i * count : (i + 1) * count]
        if lanes:
            (packed,) = ws
            sizes = (input.size(2), hidden_size, output_size)
            ws = _unpack(packed, mode, *sizes, lanes)
        h = hx[i] if hx else input.new_zeros(input.size(1), output_size)
        c = cx[i] if cx else input.new_zeros(input.size(1), hidden_size)
        c = c if mode == "LSTM" else None
        biases = has_biases or lanes > 0
        outputs.append(rnn_layer(input, ws, h, c, mode, biases, backwards))
    output, hy, cy = zip(*outputs)
    return (
        torch.cat(output, 2),
        torch.stack(hy),
        torch.stack(cy) if mode == "LSTM" else input.new_empty(0),
    )


def _rnn_layers_fake(
    input, weights, hx, cx, mode, hidden_size, output_size, has_biases, reverse, lanes
):
    seq_len, batch_size, _ = input.shape
    directions = len(reverse)
    cy_shape = (directions, batch_size, hidden_size) if mode == "LSTM" else (0,)
    return (
        input.new_empty(seq_len, batch_size, directions * output_size),
        input.new_empty(directions, batch_size, output_size),
        input.new_empty(cy_shape),
    )


_lib.impl("rnn_pack_weights", _rnn_pack_weights, "CompositeExplicitAutograd")
_lib.impl("rnn_layers", _rnn_layers, "CPU")
torch.library.register_fake("torch_rnn::rnn_layers", _rnn_layers_fake, lib=_lib)
