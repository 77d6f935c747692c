"""Prints the time of the first call of compiled recurrent layers, short and long."""

import time

import torch
from torch._inductor.utils import fresh_cache


def main() -> None:
    for kind in (torch.nn.GRU, torch.nn.RNN, torch.nn.LSTM):
        for seq_len in (16, 4096):
            torch._dynamo.reset()
            module = kind(64, 64, 2).eval()
            x = torch.randn(seq_len, 4, 64)
            with torch.no_grad(), fresh_cache():
                start = time.perf_counter()
                torch.compile(module, fullgraph=True)(x)
                seconds = time.perf_counter() - start
            print(f"{kind.__name__:<5} T={seq_len:<5} {seconds:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
