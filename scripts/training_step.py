"""Prints the time of a training step of recurrent layers, eager and compiled, in turn."""

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


def main() -> None:
    print(f"{'T, B, H':<12}{'kind':<12}{'eager ms':>9}{'compiled':>9}{'ratio':>7}")
    for seq_len, batch, size in SIZES:
        x = torch.randn(seq_len, batch, size)
        for name, (kind, options) in KINDS.items():
            torch._dynamo.reset()
            module = kind(size, size, **options)
            layers = (module, torch.compile(module, fullgraph=True, dynamic=False))
            times: tuple[list[float], list[float]] = ([], [])
            for layer in layers:
                layer(x)[0].square().mean().backward()
            end = time.perf_counter() + 1.5
            while time.perf_counter() < end or len(times[0]) < 7:
                for layer, taken in zip(layers, times):
                    start = time.perf_counter()
                    module.zero_grad()
                    layer(x)[0].square().mean().backward()
                    taken.append(time.perf_counter() - start)
            eager, ours = (statistics.median(t) * 1e3 for t in times)
            print(
                f"{seq_len:>3},{batch:>3},{size:>4} {name:<12}{eager:9.2f}{ours:9.2f}"
                f"{ours / eager:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
