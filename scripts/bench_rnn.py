"""Times recurrent layers of this build beside eager, stock torch.compile, ONNX Runtime and
OpenVINO, and writes JSON, a Markdown table and a chart.

How a figure comes about:

- Models, weights and inputs are those of bench_suite.json; the state starts at zero and is not
  passed in, gradients are off, shapes are static unless --dynamic. Every contender gives the
  output and the final states.
- Each contender is a process of its own. OpenMP, ONNX Runtime and TBB keep pools of threads
  that spin for a while after a call; in one process they would take the cores from whoever is
  timed next, and the libraries' settings would mix. All processes of an entry are alive at
  once, but only the one that is asked works. The others are blocked in a read, and a rest
  before every block lets their pools go to sleep: after its last call ONNX Runtime spins for
  40 ms, OpenMP for 10.
- glibc gives large blocks back to the system, until a process has freed a larger one. By that
  history alone eager takes 0.5 or 1.1 ms for the step of an LSTM of 256 units, so all processes
  start where it would end.
- Before timing, each result is compared with eager in float64 by ||out - ref|| / ||ref||, for
  each output. One that is further off than --limit is reported as wrong and not timed.
- A round gives every contender one block, in an order that is drawn anew; a block is a warm-up
  and then single calls. The figure of a block is the median of its calls, the figure of a
  contender the median of its blocks. Blocks are short and rounds are many, since a shared
  machine changes its pace within seconds; the quartiles of the ratio over the rounds tell the
  noise. With as many threads as cores, whatever else runs shows in the times.
- The product of two large matrices takes part as a contender: it is the sgemm ceiling that
  GFLOP/s are compared with. FLOP are those of the matrix products.
- "stock" is this build with the capture of the series switched off: the graph breaks at the
  layer, as in PyTorch 2.13.0 by default, and eager runs it. What 2.13.0 does with allow_rnn=True
  is not timed: it unrolls GRU and RNN over time, which takes over a minute to compile.
- ONNX Runtime and OpenVINO get the same hand-made ONNX graph, one LSTM, GRU or RNN node a layer
  (see onnx_graph.py for LSTM with projections), the same number of threads, else their defaults;
  OpenVINO is held to float32 and has its latency hint.
- "best peer" is the fastest of all that are not ours.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rnn_bench import report
from rnn_bench.suite import Entry, load_suite, SGEMM_SIZE
from rnn_series.console import run_main, UserError


SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
INSTALL = f"{sys.executable} -m pip install -r scripts/requirements-bench.txt"
NEEDS = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("onnx", "openvino")}
ANSWER_SECONDS = 600
# Slow models get fewer rounds than asked for, but these.
MIN_ROUNDS = 5
REST_SECONDS = 0.06
# Where glibc's own thresholds end once a process has freed a block of 32 MB.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class Progress:
    """A bar at the bottom of a terminal, else a line an entry."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.progress import Progress as Bar
            from rich.progress import TextColumn, TimeElapsedColumn

            # Refreshed between blocks only: a thread that draws would disturb the timing.
            self.bar = Bar(
                *Bar.get_default_columns(), TimeElapsedColumn(), auto_refresh=False
            )
            self.bar.columns = (*self.bar.columns, TextColumn("{task.fields[step]}"))
            self.task = self.bar.add_task("bench", total=total, step="")
            self.bar.start()

    def step(self, text: str, advance: int = 0) -> None:
        if self.bar:
            self.bar.update(self.task, advance=advance, step=text)
            self.bar.refresh()

    def line(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


class Worker:
    """A contender's process."""

    def __init__(self, name: str, entry: Entry, folder: Path, args: Any) -> None:
        threads = str(args.threads)
        self.errors = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-m", "rnn_bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={
                **os.environ,
                "PYTHONPATH": str(SCRIPTS),
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                **MALLOC,
            },
            text=True,
        )
        self.send(
            contender=name,
            entry=entry.as_json(),
            folder=str(folder),
            threads=args.threads,
            dynamic=args.dynamic,
        )

    def send(self, **words: Any) -> None:
        assert self.process.stdin
        # If it has ended, receive() says so.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            return {"status": "failed", "reason": f"no answer in {ANSWER_SECONDS} s"}
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._ended()

    def _ended(self) -> dict[str, Any]:
        code = self.process.wait()
        self.errors.seek(0)
        said = [line for line in self.errors.read().splitlines() if line.strip()]
        return {
            "status": "failed",
            "reason": f"its process ended with status {code}: {(said or [''])[-1][:300]}",
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            # What was not sent any more is of no use.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.errors.close()


def prepare(entry: Entry, folder: Path, with_onnx: bool) -> tuple[list[Any], str]:
    """Write the input and the ONNX graph; give the exact result and why there is no graph."""
    import numpy as np
    from rnn_bench.models import build, exact

    model, x = build(entry)
    results = exact(model, x)
    np.save(folder / "input.npy", x.numpy())
    missing = ""
    if with_onnx:
        from rnn_bench.onnx_graph import write_onnx

        try:
            write_onnx(entry, model, results, folder / "model.onnx")
        except NotImplementedError as e:
            missing = f"ONNX cannot express {e}"
    return [result.numpy() for result in results], missing


def error_of(path: Path, exact: list[Any]) -> float:
    """The largest relative error of the outputs in a file; inf if their shapes differ."""
    import numpy as np

    with np.load(path) as file:
        found = [file[name] for name in file.files]
    if [a.shape for a in found] != [a.shape for a in exact]:
        return float("inf")
    errors = [
        float(np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel()))
        for a, b in zip(found, exact)
    ]
    # max() would pass over a nan.
    return max(errors) if all(e == e for e in errors) else float("inf")


def measure(
    entry: Entry, names: list[str], args: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Run one entry: compare all contenders, then time those that are right."""
    row = entry.as_json() | {"shape": entry.shape, "group": entry.group}
    row |= {"flop": entry.flop, "sgemm_flop": 2 * SGEMM_SIZE**3}
    contenders: dict[str, dict[str, Any]] = {name: {} for name in names}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(dir=args.out) as temporary:
        folder = Path(temporary)
        progress.step(f"{entry.name}: exact result")
        exact, missing = prepare(entry, folder, any(name in NEEDS for name in names))
        try:
            progress.step(f"{entry.name}: set up {len(names)} contenders")
            for name in names:
                if missing and name in NEEDS:
                    contenders[name] = {"status": "skipped", "reason": missing}
                else:
                    workers[name] = Worker(name, entry, folder, args)
            for name in list(workers):
                told = workers[name].receive()
                contenders[name] = told
                if told["status"] == "ok" and name != "sgemm":
                    error = error_of(folder / f"{name}.npz", exact)
                    told["error"] = error if error < float("inf") else None
                    if not error <= args.limit:
                        told["status"] = "wrong"
                        told["reason"] = (
                            f"relative error {error:.1e} above {args.limit:.1e}"
                        )
                if told["status"] != "ok":
                    workers.pop(name).close()
            seconds = args.budget_seconds / args.rounds / max(1, len(workers))
            seconds = max(seconds - REST_SECONDS, 0.02)
            drawn = random.Random(0)
            start = time.monotonic()
            for number in range(args.rounds):
                spent = time.monotonic() - start
                if number >= MIN_ROUNDS and spent > args.budget_seconds:
                    break
                progress.step(f"{entry.name}: round {number + 1} of {args.rounds}")
                for name in drawn.sample(list(workers), len(workers)):
                    time.sleep(REST_SECONDS)
                    workers[name].send(seconds=seconds)
                    told = workers[name].receive()
                    if "median" not in told:
                        contenders[name] |= told
                        workers.pop(name).close()
                        continue
                    contenders[name].setdefault("rounds_ms", []).append(
                        told["median"] * 1e3
                    )
            progress.step(entry.name, advance=1)
        finally:
            for worker in workers.values():
                worker.close()
    for contender in contenders.values():
        if contender["status"] == "ok":
            contender["ms"] = statistics.median(contender["rounds_ms"])
    row["contenders"] = contenders
    report.add_ratios(row)
    return row


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold a lock file, if one is given."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Write beside the place and rename, so that an earlier file stays whole."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    aside.replace(path)


def machine() -> dict[str, Any]:
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = [line for line in lines if line.startswith("model name")][0]
        cpu = cpu.split(":", 1)[1].strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg()[0],
    }


def choose(args: argparse.Namespace) -> list[str]:
    """The contenders of a run; says in a line which peer is left out and why."""
    peers = []
    for name in args.peers:
        if name not in report.PEERS:
            raise UserError(
                f"expected peers out of {', '.join(report.PEERS)}, found {name!r}; "
                "mend --peers"
            )
        absent = [m for m in NEEDS.get(name, ()) if not importlib.util.find_spec(m)]
        if absent:
            print(
                f"skipping {report.LABELS[name]}: {' and '.join(absent)} not installed; "
                f"to have it run {INSTALL}",
                flush=True,
            )
        else:
            peers.append(name)
    optional = [name for name in ("onednn", "aoti") if getattr(args, name)]
    return ["sgemm", *peers, "compiled", "frozen", *optional]


def short(row: dict[str, Any]) -> str:
    parts = []
    for name, contender in row["contenders"].items():
        if name != "sgemm":
            ms = contender.get("ms")
            parts.append(f"{name} {f'{ms:.3f}' if ms else contender['status']}")
    ratio = row["best_peer_over_ours"]
    end = f"  {ratio:.2f} of {row['best_peer']}" if ratio else ""
    return f"{row['name']:<18} " + "  ".join(parts) + end


def parse(argv: list[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def positive(kind: Any) -> Any:
        def parsed(text: str) -> Any:
            value = kind(text)
            if not value > 0:
                raise ValueError
            return value

        parsed.__name__ = f"{kind.__name__} above 0"
        return parsed

    about, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--threads", type=positive(int), default=2, help="of every contender (2)")
    add("--entries", type=names, default=[], help="names, by commas (all)")
    add("--peers", type=names, default=list(report.PEERS), help="by commas (all)")
    add("--onednn", action="store_true", help="also frozen with the template off")
    add("--aoti", action="store_true", help="also as AOTInductor package")
    add("--dynamic", action="store_true", help="compile with dynamic shapes")
    add("--rounds", type=positive(int), default=15, help="of all contenders (15)")
    add(
        "--budget-seconds",
        type=positive(float),
        default=12.0,
        help=f"of timing an entry (12); {MIN_ROUNDS} rounds are made in any case",
    )
    add("--limit", type=positive(float), default=1e-5, help="relative error (1e-5)")
    add("--suite", type=Path, default=SCRIPTS / "bench_suite.json")
    add("--out", type=Path, default=ROOT / "build" / "bench")
    add("--lock", type=Path, help="hold this file's lock during each entry")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    entries = load_suite(args.suite, args.entries)
    if not importlib.util.find_spec("torch"):
        raise UserError(
            f"expected torch in {sys.executable}, found none; run scripts/bench_rnn.sh"
        )
    names = choose(args)
    args.out.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "onnxruntime", "openvino")
    data: dict[str, Any] = {
        "schema": 1,
        "machine": machine(),
        "settings": {
            name: getattr(args, name)
            for name in ("threads", "rounds", "budget_seconds", "limit", "dynamic")
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in packages
            if name == "torch" or name in names
        },
        "entries": [],
    }
    base = args.out / f"bench_rnn_{args.threads}t"
    start = time.monotonic()
    progress = Progress(len(entries))
    try:
        for entry in entries:
            with turn(args.lock):
                row = measure(entry, names, args, progress)
            data["entries"].append(row)
            data["summary"] = report.summarise(data["entries"])
            # After every entry, so that an interrupted run keeps what it has.
            write(base.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
            write(base.with_suffix(".md"), report.markdown(data))
            progress.line(short(row))
    finally:
        progress.close()
    if data["summary"]:
        try:
            report.chart(data, base.with_suffix(".png"))
        except ImportError:
            print(f"no chart: matplotlib not installed; to have it run {INSTALL}")
    print()
    print(base.with_suffix(".md").read_text())
    print(f"{base}.json, .md and .png, {time.monotonic() - start:.0f} s")
    bad = [
        f"{row['name']} ({row['contenders'][name]['status']})"
        for row in data["entries"]
        for name in names
        if name not in (*report.PEERS, "sgemm")
        and row["contenders"][name]["status"] != "ok"
    ]
    if bad:
        raise UserError(
            "expected this build to give the right result, found otherwise for "
            f"{', '.join(sorted(set(bad)))}; the reasons are in {base}.json"
        )
    return 0


if __name__ == "__main__":
    run_main(main)
