"""Which recurrent layers (RNN, GRU, LSTM) Dynamo captures, and which it leaves to eager."""

import torch

from . import config, graph_break_hints
from .exc import unimplemented


rnn_log = torch._logging.getArtifactLogger(__name__, "rnn")


def reason_for_eager(layer: torch.nn.Module) -> str | None:
    """Why tracing does not go into a layer's forward in the present grad mode, if so.

    On CPU a layer becomes nodes whose number does not depend on the sequence length.
    With gradients such a node may cost more than eager in a lower precision, and on
    other devices a layer is unrolled over time: both are captured only if
    ``config.allow_rnn`` asks for it.
    """
    if config.allow_rnn:
        return None
    weights = list(layer.parameters())
    if devices := {w.device.type for w in weights} - {"cpu"}:
        return f"its weights are on {devices.pop()}"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it is under a function transform"
    if torch.is_grad_enabled():
        if torch.is_autocast_enabled("cpu"):
            return "gradients are on under autocast"
        for w in weights:
            if w.dtype not in (torch.float32, torch.float64):
                return f"gradients are on and its weights are {w.dtype}"
    return None


def _on_cpu(arguments: object) -> bool:
    """Whether all tensors among the variables of a call are on CPU."""
    from .variables.base import VariableTracker
    from .variables.tensor import TensorVariable

    devices = set()

    def note_device(variable: VariableTracker) -> None:
        variable = variable.realize()
        if isinstance(variable, TensorVariable) and variable.device is not None:
            devices.add(variable.device.type)

    VariableTracker.visit(note_device, arguments)
    return devices <= {"cpu"}


def break_graph_unless_captured(value: object, arguments: object = ()) -> None:
    """Break the graph if ``value`` is a recurrent layer that is left to eager.

    ``arguments`` are the variables that it is called with.  Eager says what is wrong
    with a layer on CPU that is given tensors of other devices.
    """
    if not isinstance(value, (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)):
        return
    reason = reason_for_eager(value)
    if reason is None and not config.allow_rnn and not _on_cpu(arguments):
        reason = "it is given tensors that are not on CPU"
    if reason is not None:
        rnn_log.info("%s: left to eager, as %s", value, reason)
        unimplemented(
            gb_type="Attempted to wrap RNN, GRU, or LSTM",
            context=str(value),
            explanation="Dynamo does not support RNN, GRU, or LSTM.",
            hints=[
                "Set torch._dynamo.config.allow_rnn=True to enable experimental support for RNN, GRU, and LSTM in Dynamo",
                *graph_break_hints.SUPPORTABLE,
            ],
        )
