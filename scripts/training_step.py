"""Prints the time of a training step of recurrent layers, eager and compiled, in turn."""

import statistics
import time

import torch


def main() -> None:
    x = torch.randn(50, 32, 128)
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch._dynamo.reset()
        module = kind(128, 128)
        compiled = torch.compile(module, fullgraph=True)
        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        for _ in range(16):
            for name, fn in (("eager", module), ("compiled", compiled)):
                start = time.perf_counter()
                module.zero_grad()
                fn(x)[0].square().mean().backward()
                times[name].append(time.perf_counter() - start)
        eager, ours = (statistics.median(t[1:]) * 1e3 for t in times.values())
        print(
            f"{kind.__name__:<5} eager {eager:5.1f} ms  compiled {ours:5.1f} ms  "
            f"ratio {ours / eager:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
