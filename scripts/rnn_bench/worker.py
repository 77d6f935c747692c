"""One contender in a process of its own, told by lines of JSON what to do.

The first line is the job. The answer is sent when the model is ready and its result lies in
the job's folder. Then every line {"seconds": S} is answered by the median time of a call.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .suite import Entry, SGEMM_SIZE


Call = Callable[[], Any]


class Unavailable(Exception):
    """The contender cannot run here; says why."""


@dataclass(frozen=True)
class Job:
    contender: str
    entry: Entry
    folder: Path
    threads: int
    dynamic: bool


def _torch(job: Job) -> tuple[Any, Any]:
    import torch

    from .models import build

    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    return build(job.entry)


def _arrays(result: Any) -> list[np.ndarray]:
    from .models import flat

    return [tensor.numpy() for tensor in flat(result)]


def _eager(job: Job) -> tuple[Call, Any]:
    model, x = _torch(job)
    return lambda: model(x), _arrays


def _stock(job: Job) -> tuple[Call, Any]:
    """torch.compile as without the series: the graph breaks at every recurrent layer."""
    model, x = _torch(job)
    import torch

    try:
        from torch._dynamo import rnn_capture
    except ImportError:
        pass  # This is a stock build.
    else:
        if not hasattr(rnn_capture, "reason_for_eager"):
            raise Unavailable(
                "rnn_capture.reason_for_eager is gone, see _stock in worker.py"
            )
        rnn_capture.reason_for_eager = lambda layer: "2.13.0 does so"
    compiled = torch.compile(model, dynamic=job.dynamic or None)
    return lambda: compiled(x), _arrays


def _compiled(job: Job, freezing: bool, template: bool = True) -> tuple[Call, Any]:
    model, x = _torch(job)
    import torch._dynamo.utils
    import torch._inductor.config

    torch._inductor.config.freezing = freezing
    torch._inductor.config.cpp.rnn_template = template
    # As most people call it: each of fullgraph=True and dynamic=False takes microseconds of
    # every call. With one shape the default is static as well.
    compiled = torch.compile(model, dynamic=job.dynamic or None)
    compiled(x)
    if breaks := torch._dynamo.utils.counters["graph_break"]:
        raise RuntimeError(f"expected one graph, found a break: {next(iter(breaks))}")
    return lambda: compiled(x), _arrays


def _aoti(job: Job) -> tuple[Call, Any]:
    model, x = _torch(job)
    import torch

    exported = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(job.folder / "aoti.pt2"),
        inductor_configs={"freezing": True},
    )
    run = torch._inductor.aoti_load_package(package)
    return lambda: run(x), _arrays


def _onnx_file(job: Job) -> tuple[str, np.ndarray]:
    path = job.folder / "model.onnx"
    if not path.exists():
        raise Unavailable("no ONNX file of this model")
    return str(path), np.load(job.folder / "input.npy")


def _onnxruntime(job: Job) -> tuple[Call, Any]:
    path, x = _onnx_file(job)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": x}), list


def _openvino(job: Job) -> tuple[Call, Any]:
    path, x = _onnx_file(job)
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = (
        openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    )

    def call() -> Any:
        return request.infer([x], share_inputs=True, share_outputs=True)

    return call, lambda result: list(result.values())


def _sgemm(job: Job) -> tuple[Call, Any]:
    """The machine's ceiling: one product of large square matrices."""
    import torch

    torch.set_num_threads(job.threads)
    a, b, c = (torch.rand(SGEMM_SIZE, SGEMM_SIZE) for _ in range(3))
    return lambda: torch.mm(a, b, out=c), lambda result: []


CONTENDERS: dict[str, Callable[[Job], tuple[Call, Any]]] = {
    "sgemm": _sgemm,
    "eager": _eager,
    "stock": _stock,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "compiled": lambda job: _compiled(job, freezing=False),
    "frozen": lambda job: _compiled(job, freezing=True),
    "onednn": lambda job: _compiled(job, freezing=True, template=False),
    "aoti": _aoti,
}


def _median(call: Call, seconds: float) -> float:
    """Warm up for a fifth of the time, then time single calls, one at least."""
    clock = time.perf_counter
    gc.disable()
    start = clock()
    while True:
        call()
        if clock() - start > seconds / 5:
            break
    times: list[float] = []
    start = before = clock()
    while not times or before - start < seconds * 4 / 5:
        call()
        now = clock()
        times.append(now - before)
        before = now
    gc.enable()
    return statistics.median(times)


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")

    row = json.loads(sys.stdin.readline())
    entry = Entry(**row.pop("entry"))
    job = Job(entry=entry, folder=Path(row.pop("folder")), **row)
    try:
        call, arrays = CONTENDERS[job.contender](job)
        results = arrays(call())
    except Unavailable as e:
        answer(status="skipped", reason=str(e))
        return
    except Exception as e:
        line = next((s for s in str(e).splitlines() if s.strip()), "")
        answer(status="failed", reason=f"{type(e).__name__}: {line[:300]}")
        return
    np.savez(job.folder / f"{job.contender}.npz", *results)
    answer(status="ok")
    for line in sys.stdin:
        answer(median=_median(call, json.loads(line)["seconds"]))


if __name__ == "__main__":
    main()
