"""The models in PyTorch, and their exact results."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .suite import Entry


class SpeakerEncoder(torch.nn.Module):
    """The encoder of Coqui TTS's tts_angular: (B, T, I) to (B, linear), of length 1."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        sizes = [entry.I] + [entry.linear] * (entry.layers - 1)
        self.lstms = torch.nn.ModuleList(
            torch.nn.LSTM(size, entry.H, batch_first=True) for size in sizes
        )
        self.linears = torch.nn.ModuleList(
            torch.nn.Linear(entry.H, entry.linear, bias=False) for _ in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        for lstm, linear in zip(self.lstms, self.linears):
            x = linear(lstm(x)[0])
        return torch.nn.functional.normalize(x[:, -1], dim=1)


def build(entry: Entry) -> tuple[torch.nn.Module, Tensor]:
    """The model in eval mode and its input, the same in every process."""
    torch.manual_seed(0)
    if entry.linear:
        return SpeakerEncoder(entry).eval(), torch.randn(entry.B, entry.T, entry.I)
    sizes = (entry.I, entry.H, entry.layers)
    kwargs: dict[str, Any] = {"bidirectional": entry.bidirectional}
    if entry.proj_size:
        kwargs["proj_size"] = entry.proj_size
    model = getattr(torch.nn, entry.kind)(*sizes, **kwargs).eval()
    return model, torch.randn(entry.T, entry.B, entry.I)


def flat(result: Any) -> list[Tensor]:
    """The tensors of a model's result: output, hidden state, cell state."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in flat(part)]


def exact(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """What eager gives in float64."""
    with torch.no_grad():
        return flat(copy.deepcopy(model).double()(x.double()))
