"""The linters of .lintrunner.toml, run by lintrunner on a series that each must refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import unittest
from pathlib import Path
from typing import Any

from test_rnn_series import ProjectTestCase, ROOT, source_wheel


class TestLint(ProjectTestCase):
    def setUp(self) -> None:
        super().setUp()
        source_wheel()
        root = self.project.root
        for name in (".lintrunner.toml", "pyproject.toml", ".gitignore"):
            shutil.copy(ROOT / name, root)
        for name in ("CI", "test/scripts"):
            shutil.copytree(ROOT / name, root / name)
        (root / "build").mkdir()
        # Shared, with the caches of mypy
        for name in ("ci", "wheels", "lint"):
            (ROOT / "build" / name).mkdir(exist_ok=True)
            (root / "build" / name).symlink_to(ROOT / "build" / name)
        git = ["git", "-C", str(root)]
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "add", "--all"], check=True)
        self.first = self.project.patches / "rnn-dropout.patch"

    def lintrunner(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "build" / "ci" / "bin" / "lintrunner"), *args],
            cwd=self.project.root,
            capture_output=True,
            text=True,
        )

    def found(self, *linters: str) -> list[dict[str, Any]]:
        result = self.lintrunner(
            "--take", ",".join(linters), "--all-files", "--output=json"
        )
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(result.returncode, int(bool(rows)), result.stderr)
        return rows

    def assert_found(self, linter: str, path: Path, *words: str) -> None:
        rows = self.found(linter)
        self.assertEqual(len(rows), 1, rows)
        self.assertEqual(rows[0]["code"], linter)
        self.assertEqual(Path(rows[0]["path"]).resolve(), path.resolve())
        for word in words:
            self.assertIn(word, rows[0]["description"])

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1))

    def test_sound(self) -> None:
        quick = ("PATCHSERIES", "PATCHHEADER", "PATCHFORMAT", "RUFF", "SHELLCHECK")
        self.assertEqual(self.found(*quick), [])

    def test_series(self) -> None:
        listed = self.project.patches / "series"
        name = "torch/_inductor/kernel/rnn.py"
        self.edit(listed, f"overlay {name}\n", f"overlay {name}\n    overlay {name}\n")
        self.assert_found("PATCHSERIES", listed, f"{name} is listed twice")

    def test_header(self) -> None:
        self.edit(self.first, "Test plan:", "Tests:")
        self.assert_found("PATCHHEADER", self.first, "'Test plan:'")

    def test_format_is_mended(self) -> None:
        good = self.first.read_bytes()
        self.edit(self.first, "\n---\n\n", "\n---\n a note that git drops\n\n")
        self.assert_found("PATCHFORMAT", self.first, "as export writes it")
        self.lintrunner("--take", "PATCHFORMAT", "--all-files", "-a")
        self.assertEqual(self.first.read_bytes(), good)
        self.assertEqual(self.found("PATCHFORMAT"), [])

    def test_patch_that_does_not_apply(self) -> None:
        self.edit(self.first, "-        dropout =", "-        no_such =")
        (row,) = self.found("PATCHFORMAT")
        self.assertIn("the hunk at line", row["description"])

    def test_ruff_is_mended(self) -> None:
        path = self.project.root / "scripts/rnn_series/pin.py"
        good = path.read_bytes()
        self.edit(path, "import ast\n", "import  ast, os\n")
        self.assert_found("RUFF", path, "as ruff writes it")
        self.lintrunner("--take", "RUFF", "--all-files", "-a")
        self.assertEqual(path.read_bytes(), good)
        other = self.project.root / "scripts" / "training_step.py"
        other.write_text(other.read_text() + "no_such\n")
        self.assertIn("F821", [row["name"] for row in self.found("RUFF")])

    def test_shellcheck(self) -> None:
        path = self.project.root / "scripts/worktree.sh"
        path.write_text(path.read_text() + "cd $1\n")
        names = {row["name"] for row in self.found("SHELLCHECK")}
        self.assertIn("SC2086", names)

    def test_mypy(self) -> None:
        overlay = self.project.root / "torch_overlay/torch/_dynamo/rnn_capture.py"
        script = self.project.root / "scripts/rnn_series/pin.py"
        overlay.write_text(
            overlay.read_text() + '_WRONG: int = config.allow_rnn + ""\n'
        )
        script.write_text(script.read_text() + '_WRONG: int = ""\n')
        rows = self.found("MYPY")
        paths = {Path(row["path"]).resolve() for row in rows}
        self.assertEqual(paths, {overlay.resolve(), script.resolve()}, rows)

    def test_tools_that_are_not_there(self) -> None:
        (self.project.root / "build" / "ci").unlink()
        (row,) = self.found("SHELLCHECK")
        self.assertIn("run `scripts/lint.sh init`", row["description"])


if __name__ == "__main__":
    unittest.main()
