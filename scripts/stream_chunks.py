"""Serve a recurrent layer to a stream: chunks of any length in, the state kept between them.

    stream_chunks.py [--kind LSTM|GRU] [--hidden N] [--package FILE]

The layer is run by torch.compile and by an AOTInductor package. Both are fed the same stream
in chunks of 1 to 32 steps and are compared with eager on the whole stream. Then single steps
are timed. The package stays in FILE, for stream_chunks.cpp or another process.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn, Tensor
from torch.export import Dim


class Streamer(nn.Module):
    """A layer that takes its state as plain tensors and gives the next one back.

    ``forward(chunk, *state)`` takes a chunk ``(T, 1, I)`` and the state, ``h`` or ``h, c`` of
    ``(1, 1, H)``, and gives the output ``(T, 1, H)`` followed by the next state.
    """

    def __init__(self, kind: str, size: int, hidden: int) -> None:
        super().__init__()
        self.is_lstm = kind == "LSTM"
        self.layer = (nn.LSTM if self.is_lstm else nn.GRU)(size, hidden)

    def start(self) -> tuple[Tensor, ...]:
        # Not one tensor twice: export would take h and c for the same for good.
        states = 2 if self.is_lstm else 1
        return tuple(torch.zeros(1, 1, self.layer.hidden_size) for _ in range(states))

    def forward(self, chunk: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        output, state = self.layer(chunk, state if self.is_lstm else state[0])
        return (output, *state) if self.is_lstm else (output, state)


Step = Callable[..., tuple[Tensor, ...]]


def compiled(model: Streamer) -> Step:
    # dynamic: one graph serves all lengths above 1. Set freezing before the first call.
    torch._inductor.config.freezing = True
    return torch.compile(model, fullgraph=True, dynamic=True)


def packaged(model: Streamer, path: Path) -> Step:
    length = Dim("length", min=1, max=4096)
    state = model.start()
    program = torch.export.export(
        model,
        (torch.zeros(8, 1, model.layer.input_size), *state),
        dynamic_shapes=({0: length}, tuple({} for _ in state)),
    )
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs={"freezing": True}
    )
    # A stream has one caller, so the package may skip its locks.
    return torch._inductor.aoti_load_package(str(path), run_single_threaded=True)


def stream(step: Step, state: tuple[Tensor, ...], chunks: list[Tensor]) -> Tensor:
    outputs = []
    for chunk in chunks:
        output, *state = step(chunk, *state)
        outputs.append(output)
    return torch.cat(outputs)


def microseconds(step: Step, state: tuple[Tensor, ...], chunk: Tensor) -> float:
    """The median of a thousand calls of one step each."""
    times = []
    for i in range(1100):
        start = time.perf_counter()
        _, *state = step(chunk, *state)
        if i >= 100:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a recurrent layer to a stream.")
    parser.add_argument("--kind", choices=("LSTM", "GRU"), default="LSTM")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--package", type=Path, default=Path("build/stream.pt2"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Streamer(args.kind, args.hidden, args.hidden).eval()
    lengths = torch.randint(1, 33, (20,)).tolist()
    x = torch.randn(sum(lengths), 1, args.hidden)
    with torch.no_grad():
        expected = model(x, *model.start())[0]
        steps = {"eager": model, "torch.compile": compiled(model)}
        steps["package"] = packaged(model, args.package)
        for name, step in steps.items():
            output = stream(step, model.start(), list(x.split(lengths)))
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            us = microseconds(step, model.start(), x[:1])
            print(f"{args.kind} {args.hidden} {name:<14} {us:7.1f} us a step")


if __name__ == "__main__":
    main()
