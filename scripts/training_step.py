"""Prints the time of a training step of a small model with a recurrent layer.

The model is Linear, layer, Linear.  It runs in eager, compiled with a graph break at the
layer, and compiled with the layer captured, in turn.
"""

import copy
import statistics
import time

import torch


KINDS = {
    "LSTM": (torch.nn.LSTM, {}),
    "LSTM, proj": (torch.nn.LSTM, {"proj_size": 16}),
    "GRU": (torch.nn.GRU, {}),
    "RNN tanh": (torch.nn.RNN, {}),
    "RNN relu": (torch.nn.RNN, {"nonlinearity": "relu"}),
}
# Time steps, batch, and the size of both the input and the hidden state.
SIZES = ((20, 1, 32), (50, 8, 64), (50, 32, 128), (50, 32, 512))


class Model(torch.nn.Module):
    def __init__(self, size: int, layer: torch.nn.RNNBase) -> None:
        super().__init__()
        self.before = torch.nn.Linear(size, size)
        self.layer = layer
        self.after = torch.nn.Linear(layer.proj_size or size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.layer(self.before(x))[0])


class WithBreak(Model):
    """Of a class of its own, so that the compiled codes do not share a cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.compiler.disable(self.layer)(self.before(x))[0])


def step(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of a training step."""
    start = time.perf_counter()
    model.zero_grad()
    model(x).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    print(f"{'T, B, H':<12}{'kind':<12}{'eager ms':>9}{'break':>8}{'captured':>9}", end="")
    print(f"{'to eager':>10}{'to break':>10}")
    for seq_len, batch, size in SIZES:
        x = torch.randn(seq_len, batch, size)
        for name, (kind, options) in KINDS.items():
            torch._dynamo.reset()
            layer = kind(size, size, **options)
            models = (
                Model(size, layer),
                torch.compile(WithBreak(size, copy.deepcopy(layer)), dynamic=False),
                torch.compile(
                    Model(size, copy.deepcopy(layer)), fullgraph=True, dynamic=False
                ),
            )
            for model in models:
                for _ in range(3):
                    step(model, x)
            times: list[tuple[float, ...]] = []
            end = time.perf_counter() + 2
            while time.perf_counter() < end or len(times) < 7:
                times.append(tuple(step(model, x) for model in models))
            eager, broken, ours = (statistics.median(t) * 1e3 for t in zip(*times))
            print(
                f"{seq_len:>3},{batch:>3},{size:>4} {name:<12}{eager:9.2f}{broken:8.2f}"
                f"{ours:9.2f}{ours / eager:10.2f}{ours / broken:10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
