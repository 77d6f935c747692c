"""Tests of scripts/bench_rnn.py: a real run of a tiny model, and what it is told wrong."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock


ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "venv" / "bin" / "python"
sys.path.insert(0, str(ROOT / "scripts"))

import bench_rnn  # noqa: E402
from rnn_bench import report  # noqa: E402
from rnn_bench.suite import Entry, load_suite  # noqa: E402


TINY = {"name": "tiny", "kind": "GRU", "T": 3, "B": 1, "I": 4, "H": 5}


def run(scripts: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PYTHON), "-B", str(scripts / "bench_rnn.py"), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


class RunTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.suite = self.folder / "suite.json"
        self.suite.write_text(json.dumps({"entries": [TINY]}))

    def test_right_ones_are_timed_and_a_wrong_one_is_not(self) -> None:
        scripts = self.folder / "scripts"
        shutil.copytree(ROOT / "scripts", scripts)
        worker = scripts / "rnn_bench" / "worker.py"
        right = worker.read_text()
        wrong = right.replace("lambda: model(x), ", "lambda: model(x + 1e-3), ")
        self.assertNotEqual(right, wrong)
        worker.write_text(wrong)
        out = self.folder / "out"
        result = run(
            scripts,
            *("--suite", str(self.suite), "--out", str(out), "--peers", "eager,stock"),
            *("--threads", "1", "--rounds", "1", "--budget-seconds", "0.5"),
        )
        self.assertEqual(result.returncode, 0, result.stderr)

        data = json.loads((out / "bench_rnn_1t.json").read_text())
        self.assertEqual(data["schema"], 1)
        self.assertEqual(data["settings"]["threads"], 1)
        self.assertIn("torch", data["versions"])
        (row,) = data["entries"]
        self.assertEqual({name: row[name] for name in TINY}, TINY)
        contenders = row["contenders"]
        self.assertEqual(
            list(contenders), ["sgemm", "eager", "stock", "compiled", "frozen"]
        )
        self.assertEqual(contenders["eager"]["status"], "wrong")
        self.assertGreater(contenders["eager"]["error"], 1e-5)
        self.assertNotIn("ms", contenders["eager"])
        for name in ("stock", "compiled", "frozen"):
            self.assertEqual(contenders[name]["status"], "ok", contenders[name])
            self.assertLess(contenders[name]["error"], 1e-6)
            self.assertGreater(contenders[name]["ms"], 0)
            self.assertEqual(len(contenders[name]["rounds_ms"]), 1)
        self.assertEqual(row["best_peer"], "stock")
        ratio = contenders["stock"]["ms"] / contenders["frozen"]["ms"]
        self.assertAlmostEqual(row["best_peer_over_ours"], ratio)
        self.assertEqual(data["summary"]["all"]["worst"], "tiny")
        table = (out / "bench_rnn_1t.md").read_text()
        self.assertIn("- tiny, eager: wrong, relative error", table)
        self.assertEqual({p.suffix for p in out.iterdir()} - {".png"}, {".json", ".md"})

    def test_bad_input_is_one_line(self) -> None:
        broken = self.folder / "broken.json"
        broken.write_text('{"entries": [{"name": "tiny"}]}')
        minus = self.folder / "minus.json"
        minus.write_text(json.dumps({"entries": [TINY | {"T": -1}]}))
        for args, said in (
            (["--suite", str(self.folder / "none.json")], "found nothing there"),
            (["--suite", str(broken)], "to hold a list `entries` of models"),
            (["--suite", str(minus)], "entry tiny"),
            (["--suite", str(self.suite), "--entries", "tiny,huge"], "found huge"),
            (["--suite", str(self.suite), "--peers", "cudnn"], "found 'cudnn'"),
        ):
            with self.subTest(said):
                result = run(ROOT / "scripts", *args)
                self.assertEqual(result.returncode, 1)
                self.assertEqual(result.stdout, "")
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertIn(said, result.stderr)


class PartsTest(unittest.TestCase):
    def test_missing_peer_is_left_out_in_one_line(self) -> None:
        said = io.StringIO()
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            contextlib.redirect_stdout(said),
        ):
            names = bench_rnn.choose(bench_rnn.parse(["--peers", "eager,openvino"]))
        self.assertEqual(names, ["sgemm", "eager", "compiled", "frozen"])
        self.assertEqual(len(said.getvalue().splitlines()), 1)
        self.assertIn("requirements-bench.txt", said.getvalue())

    def test_flop_of_the_suite(self) -> None:
        entries = {
            e.name: e for e in load_suite(bench_rnn.SCRIPTS / "bench_suite.json", [])
        }
        for name, flop in (
            ("tts_angular_layer", 2 * 50 * 64 * 4 * 768 * (256 + 768)),
            ("rnnt_proj", 2 * 100 * 8 * (4 * 1024 * (640 + 640) + 640 * 1024)),
            ("gru_bi_batch", 2 * 64 * 32 * 2 * 3 * 256 * (512 + 768)),
            (
                "tts_angular",
                2 * 3200 * (3072 * (40 + 2 * 256 + 3 * 768) + 3 * 256 * 768),
            ),
        ):
            self.assertEqual(entries[name].flop, flop, name)

    def test_summary(self) -> None:
        rows: list[dict[str, Any]] = []
        for name, batch, ours, peer in (("a", 1, 1.0, 4.0), ("b", 64, 2.0, 1.0)):
            entry = Entry(name, "RNN", 1, batch, 1, 1)
            times = {"sgemm": 1.0, "eager": 8.0, "openvino": peer, "frozen": ours}
            row = {"name": name, "group": entry.group, "flop": 1e6, "sgemm_flop": 4e6}
            row["contenders"] = {
                n: {"ms": t, "rounds_ms": [t, t, 2 * t if n == "frozen" else t]}
                for n, t in times.items()
            }
            report.add_ratios(row)
            rows.append(row)
        self.assertEqual([r["best_peer_over_ours"] for r in rows], [4.0, 0.5])
        self.assertEqual(rows[0]["best_peer_over_ours_quartiles"], [2.0, 4.0])
        self.assertEqual([r["percent_of_sgemm"] for r in rows], [25.0, 12.5])
        summary = report.summarise(rows)
        self.assertEqual(list(summary), ["all", "B=1", "B>=32"])
        self.assertAlmostEqual(summary["all"]["geomean_best_peer_over_ours"], 2**0.5)
        self.assertAlmostEqual(summary["all"]["geomean_eager_over_ours"], 32**0.5)
        self.assertEqual(summary["all"]["worst"], "b")


if __name__ == "__main__":
    unittest.main()
