"""Which recurrent layers (RNN, GRU, LSTM) Dynamo captures, and which it leaves to eager."""

import torch

from . import config, graph_break_hints
from .exc import unimplemented


def is_captured(layer: torch.nn.Module) -> bool:
    """Whether tracing goes into a layer's forward in the present grad mode.

    On CPU a layer becomes nodes whose number does not depend on the sequence length.
    With gradients such a node costs more than eager in a lower precision, and on other
    devices a layer is unrolled over time: both are captured only if
    ``config.allow_rnn`` asks for it.
    """
    if config.allow_rnn:
        return True
    weights = list(layer.parameters())
    if torch._C._functorch.maybe_current_level() is not None or any(
        w.device.type != "cpu" for w in weights
    ):
        return False
    return not torch.is_grad_enabled() or (
        all(w.dtype in (torch.float32, torch.float64) for w in weights)
        and not torch.is_autocast_enabled("cpu")
    )


def break_graph_unless_captured(value: object) -> None:
    """Break the graph if ``value`` is a recurrent layer that is left to eager."""
    if isinstance(value, (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)) and (
        not is_captured(value)
    ):
        unimplemented(
            gb_type="Attempted to wrap RNN, GRU, or LSTM",
            context=str(value),
            explanation="Dynamo does not support RNN, GRU, or LSTM.",
            hints=[
                "Set torch._dynamo.config.allow_rnn=True to enable experimental support for RNN, GRU, and LSTM in Dynamo",
                *graph_break_hints.SUPPORTABLE,
            ],
        )
