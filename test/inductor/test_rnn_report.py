# Owner(s): ["module: inductor"]
"""What rnn_report and TORCH_LOGS=rnn say of recurrent layers."""

import contextlib
import io
import logging
import os
import tempfile

import torch
from torch import nn
from torch._inductor import config
from torch._inductor.rnn_report import main, rnn_report
from torch._inductor.test_case import run_tests, TestCase


class Layers(nn.Module):
    """Layers in containers, one of them never called."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.LSTM(4, 4, 2, bidirectional=True), nn.GRU(8, 4)])
        self.spare = nn.RNN(3, 4)

    def forward(self, x):
        for layer in self.body:
            x, _ = layer(x)
        return x


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x):
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4]))
        return self.layer(x)[0].data


FACTORIES = """
import torch

def gru():
    return torch.nn.GRU(4, 4), (torch.randn(5, 2, 4),)

def wrong():
    return torch.nn.GRU(4, 4)
"""


class TestRnnReport(TestCase):
    @contextlib.contextmanager
    def messages(self, module):
        """What TORCH_LOGS=rnn shows of a module of torch meanwhile."""
        lines = []
        torch._logging.set_logs(rnn=True)
        try:
            with self.assertLogs(f"torch.{module}.__rnn", logging.DEBUG) as logs:
                yield lines
        finally:
            torch._logging.set_logs()
        lines += [record.getMessage() for record in logs.records]

    def report(self, model, dtype=torch.float32):
        rows = rnn_report(model.to(dtype), (torch.randn(5, 2, 4, dtype=dtype),))
        return {row.name: (row.kernel, row.packed, row.reason) for row in rows}

    @torch.no_grad()
    def test_frozen_or_not(self):
        not_called = ("not called", False, "")
        for freezing in (False, True):
            reason = "" if freezing else "config.freezing is off"
            with config.patch(freezing=freezing):
                found = self.report(Layers())
            expected = ("C++ kernel", freezing, reason)
            self.assertEqual(
                found,
                {"body.0": expected, "body.1": expected, "spare": not_called},
            )

    @torch.no_grad()
    def test_other_kernels(self):
        with config.patch({"freezing": True, "cpp.rnn_template": False}):
            found = self.report(Layers())
        reason = "config.cpp.rnn_template is off"
        self.assertEqual(found["body.0"], ("oneDNN", True, reason))
        self.assertEqual(found["body.1"], ("ATen", False, reason))
        with config.patch(freezing=True):
            found = self.report(nn.GRU(4, 4), torch.float64)
        reason = "the C++ kernel is for float32, not torch.float64"
        self.assertEqual(found, {"": ("ATen", False, reason)})

    def test_gradients(self):
        self.assertEqual(
            self.report(nn.GRU(4, 4)), {"": ("training", False, "gradients are on")}
        )

    def test_left_to_eager(self):
        reason = "gradients are on and its weights are torch.bfloat16"
        with self.messages("_dynamo.rnn_capture") as lines:
            found = self.report(Layers(), torch.bfloat16)
        self.assertEqual(found["body.1"], ("eager", False, reason))
        self.assertIn(
            f"LSTM(4, 4, num_layers=2, bidirectional=True): left to eager, as {reason}",
            lines,
        )
        with torch.no_grad():
            kernel, _, reason = self.report(Packed())["layer"]
        self.assertEqual(kernel, "eager")
        self.assertIn("not in a graph", reason)

    @torch.no_grad()
    def test_log(self):
        with self.messages("_inductor.fx_passes.rnn_fusion") as lines:
            with config.patch(freezing=True, force_disable_caches=True):
                torch.compile(Layers())(torch.randn(5, 2, 4))
        self.assertEqual(
            lines,
            ["L['self'].body.0: C++ kernel, packed"] * 2
            + ["L['self'].body.1: C++ kernel, packed"],
        )

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "models.py")
            with open(path, "w") as f:
                f.write(FACTORIES)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                self.assertEqual(main([f"{path}:gru"]), 0)
                for target in (f"{path}:wrong", f"{path}:none", path, "no_module:f"):
                    self.assertEqual(main([target]), 2)
        table, _, counts = out.getvalue().partition("\n\n")
        self.assertEqual(
            table.splitlines()[1].split(None, 3)[:3], ["(the", "model)", "GRU"]
        )
        self.assertIn("C++ kernel  no      config.freezing is off", table)
        self.assertEqual(counts, "graphs: 1, graph breaks: 0\n")
        lines = err.getvalue().splitlines()
        self.assertEqual(len(lines), 4)
        self.assertIn("expected", lines[0])
        self.assertIn("found GRU", lines[0])
        self.assertIn("expected a function none", lines[1])
        self.assertIn("expected FILE.py:FACTORY", lines[2])
        self.assertIn("no_module", lines[3])


if __name__ == "__main__":
    run_tests()
