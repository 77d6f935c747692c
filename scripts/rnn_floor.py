"""Prints how near the compiled recurrent layers are to what the machine can do.

The floor of a layer is the time of its product with the input at the machine's sgemm rate,
and for each step the longer of the product with the state at that rate, and of reading the
recurrent weights once, shared among the threads, from the cache that holds a thread's share.
Both rates are measured here first.  "kernel" is Inductor's code alone: what torch.compile
does around it in each call is left out, "call" has it.  Layers run one after the other, so
their floors add up.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._inductor.config
from rnn_bench.models import build, exact, flat
from rnn_bench.suite import Entry, GATES, load_suite, SGEMM_SIZE
from torch._inductor.output_code import CompiledFxGraph


SUITE = Path(__file__).with_name("bench_suite.json")
READ = r"""
#include <omp.h>
#include <cstdlib>
#include <cstring>
#ifdef __AVX512F__
constexpr long BYTES = 64;
#else
constexpr long BYTES = 32;
#endif
typedef float Vec __attribute__((vector_size(BYTES)));

// Seconds in which every thread reads its own `bytes` once
extern "C" double seconds_to_read(long bytes, int threads, long repeats) {
  double seconds = 0;
#pragma omp parallel num_threads(threads)
  {
    char* data = static_cast<char*>(std::aligned_alloc(64, bytes));
    std::memset(data, 0, bytes);
    Vec sums[8] = {};
    for (int warm = 1; warm >= 0; warm--) {
#pragma omp barrier
      const double start = omp_get_wtime();
      for (long r = 0; r < repeats; r++) {
        for (long i = 0; i < bytes; i += 8 * BYTES) {
          // A use of each load, as in the kernel
#pragma GCC unroll 8
          for (int j = 0; j < 8; j++) sums[j] += *reinterpret_cast<Vec*>(data + i + j * BYTES);
        }
        asm volatile("" ::"r"(data) : "memory");
      }
#pragma omp barrier
      if (omp_get_thread_num() == 0) seconds = (omp_get_wtime() - start) / repeats;
    }
    for (const Vec& sum : sums) asm volatile("" ::"m"(sum));
    std::free(data);
  }
  return seconds;
}
"""
SIZES_KB = (16, 128, 256, 512, 1024, 2048, 4096, 8192)


def best(call: Callable[[], object], seconds: float) -> float:
    """The lower quartile of single calls, in seconds."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 8 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.quantiles(taken, n=4)[0]


def read_rates(threads: int) -> dict[int, float]:
    """Bytes a second that each of the threads reads, by the size of what it reads."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "read.cpp"), Path(folder, "read.so")
        source.write_text(READ)
        flags = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        measure = ctypes.CDLL(str(library)).seconds_to_read
    measure.restype = ctypes.c_double
    measure.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_long]
    rates = {}
    for size in (kb << 10 for kb in SIZES_KB):
        repeats = max(4, (32 << 20) // size)
        rates[size] = size / min(measure(size, threads, repeats) for _ in range(12))
    return rates


def layers(entry: Entry) -> Iterator[tuple[float, float, float]]:
    """Of each layer: FLOP of the input's product, of a step, bytes of recurrent weights."""
    state = entry.proj_size or entry.H
    for layer in range(entry.layers):
        size = entry.output_size if layer else entry.I
        wide = entry.directions * GATES[entry.kind] * entry.H
        recurrent = wide * state + entry.directions * entry.proj_size * entry.H
        rows = 2 * entry.T * entry.B
        yield (
            rows * (wide * size + entry.linear * entry.H),
            2 * entry.B * recurrent,
            4 * recurrent,
        )


def floor(entry: Entry, threads: int, flops: float, rates: dict[int, float]) -> float:
    total = 0.0
    for input_flop, step_flop, weight_bytes in layers(entry):
        share = weight_bytes / threads
        rate = rates[max((s for s in rates if s <= share), default=min(rates))]
        total += input_flop / flops + entry.T * max(step_flop / flops, share / rate)
    return total


def measure(entry: Entry, seconds: float) -> tuple[float, float]:
    """Seconds of Inductor's code alone, and of the call of the compiled model."""
    torch._dynamo.reset()
    model, x = build(entry)
    graphs = []
    original = CompiledFxGraph.__call__

    def record(self, inputs):
        graphs.append((self, list(inputs)))
        return original(self, inputs)

    CompiledFxGraph.__call__ = record  # type: ignore[method-assign]
    try:
        compiled = torch.compile(model, fullgraph=True)
        result = flat(compiled(x))
    finally:
        CompiledFxGraph.__call__ = original  # type: ignore[method-assign]
    for ours, wide in zip(result, exact(model, x), strict=True):
        torch.testing.assert_close(ours, wide.float(), rtol=1e-4, atol=1e-5)
    ((graph, inputs),) = graphs
    kernel = graph.current_callable
    assert kernel is not None
    alone = best(lambda: kernel(list(inputs)), seconds)
    return alone, best(lambda: compiled(x), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--entries", default="", help="names, with commas (all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch._inductor.config.freezing = True
    a, b = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE)
    flops = 2 * SGEMM_SIZE**3 / best(lambda: a @ b, 2)
    rates = read_rates(args.threads)
    print(
        f"{args.threads} threads, sgemm {flops / 1e9:.0f} GFLOP/s; a thread reads, GB/s:"
    )
    print("  " + ", ".join(f"{s >> 10} KB {r / 1e9:.0f}" for s, r in rates.items()))
    print(f"{'':<18}{'floor ms':>10}{'kernel':>10}{'call':>10}{'floor / kernel':>16}")
    for entry in load_suite(SUITE, [n for n in args.entries.split(",") if n]):
        least = floor(entry, args.threads, flops, rates)
        alone, call = measure(entry, args.seconds)
        print(
            f"{entry.name:<18}{least * 1e3:10.4f}{alone * 1e3:10.4f}{call * 1e3:10.4f}"
            f"{least / alone:16.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
