"""Tests of scripts/: real git, the real wheel, and inputs that must be refused."""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from rnn_series import console, environment, series, wheel  # noqa: E402
from rnn_series.pin import DEFAULT_PIN, load_pin  # noqa: E402


PIN = load_pin(DEFAULT_PIN)


def source_wheel() -> Path:
    return wheel.obtain(PIN.version, ROOT / "build" / "wheels")


class Project:
    """A copy of the project in a folder of its own, whose scripts are run for real."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        for name in ("scripts", "patches", "torch_overlay", "test/inductor"):
            shutil.copytree(ROOT / name, self.root / name)
        self.patches = self.root / PIN.folder.relative_to(ROOT)
        self.tree = self.root / "build" / "worktree"

    def run(
        self, script: str, *args: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                shutil.which("bash") or "bash",
                str(self.root / "scripts" / script),
                *args,
            ],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.root,
        )

    def worktree(self, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("worktree.sh", "--wheel", str(source_wheel()), **env)

    def commit(self, message: str, *flags: str) -> None:
        git = ["git", "-C", str(self.tree)]
        identity = ["-c", "user.name=A B", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run(
            [*git, *identity, "commit", "--quiet", "-m", message, *flags], check=True
        )

    def head(self) -> str:
        return subprocess.run(
            ["git", "-C", str(self.tree), "rev-parse", "HEAD"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def files(self) -> dict[str, bytes]:
        return {
            p.relative_to(self.root).as_posix(): p.read_bytes()
            for name in ("patches", "torch_overlay", "test")
            for p in sorted((self.root / name).rglob("*"))
            if p.is_file()
        }


class ProjectTestCase(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.project = Project(self.folder)

    def assert_refused(
        self, result: subprocess.CompletedProcess[str], *words: str
    ) -> None:
        """Non-zero exit and one line that has ``words``."""
        self.assertNotEqual(result.returncode, 0, result.stdout)
        lines = result.stderr.strip().splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("error: expected"), lines[0])
        for word in words:
            self.assertIn(word, lines[0])

    def assert_works(self, result: subprocess.CompletedProcess[str]) -> None:
        self.assertEqual(result.returncode, 0, result.stderr)


MESSAGE = """[inductor] Say hello

Why.

Test plan: none

Related: pytorch/pytorch#103071"""


class TestWorktree(ProjectTestCase):
    def test_round_trip_is_exact(self) -> None:
        before = self.project.files()
        self.assert_works(self.project.worktree())
        result = self.project.run("export_patches.sh")
        self.assert_works(result)
        self.assertIn("0 files changed", result.stdout)
        self.assertEqual(self.project.files(), before)

    def test_new_commit_becomes_a_patch(self) -> None:
        self.assert_works(self.project.worktree())
        version = self.project.tree / "torch" / "_inductor" / "config.py"
        version.write_text(version.read_text() + "hello = True\n")
        new = self.project.tree / "torch" / "_inductor" / "hello.py"
        new.write_text("print('hello')\n")
        self.project.commit(MESSAGE)
        result = self.project.run("export_patches.sh")
        self.assert_works(result)
        patch = (self.project.patches / "say-hello.patch").read_text()
        self.assertIn("+hello = True", patch)
        self.assertNotIn("print", patch)
        overlay = self.project.root / "torch_overlay/torch/_inductor/hello.py"
        self.assertEqual(overlay.read_text(), "print('hello')\n")
        listed = (self.project.patches / "series").read_text()
        expected = "say-hello\n    overlay torch/_inductor/hello.py\n"
        self.assertTrue(listed.endswith(expected))
        shutil.rmtree(self.project.tree)
        self.assert_works(self.project.worktree())
        self.assertEqual(new.read_text(), "print('hello')\n")
        self.assertTrue(version.read_text().endswith("hello = True\n"))

    def test_a_file_has_one_owner(self) -> None:
        self.assert_works(self.project.worktree())
        overlay = self.project.tree / "torch" / "_inductor" / "kernel" / "rnn.py"
        overlay.write_text(overlay.read_text() + "# more\n")
        self.project.commit(MESSAGE)
        before = self.project.files()
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, "torch/_inductor/kernel/rnn.py", "fold the change")
        self.assertEqual(self.project.files(), before)

    def test_message_that_git_would_cut(self) -> None:
        self.assert_works(self.project.worktree())
        self.project.commit(
            "[x] t\n\n---\nlost\n", "--allow-empty", "--cleanup=verbatim"
        )
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, "ends the message", "'[x] t'")

    def test_uncommitted_change(self) -> None:
        self.assert_works(self.project.worktree())
        (self.project.tree / "torch" / "hello.py").write_text("")
        self.assert_refused(self.project.run("export_patches.sh"), "clean work tree")

    def test_existing_tree_is_kept(self) -> None:
        self.project.tree.mkdir(parents=True)
        (self.project.tree / "mine").write_text("work")
        self.assert_refused(self.project.worktree(), "which stays")
        self.assertEqual((self.project.tree / "mine").read_text(), "work")

    def test_edits_beside_the_tree_are_kept(self) -> None:
        self.assert_works(self.project.worktree())
        # Brought by the last patch, so that amending it is enough
        test = self.project.root / series.load(PIN)[-1].tests[0]
        test.write_text(test.read_text() + "# edited here\n")
        before = self.project.files()
        self.assert_works(self.project.run("export_patches.sh"))
        self.assertEqual(self.project.files(), before)
        there = self.project.tree / test.relative_to(self.project.root)
        there.write_text(there.read_text() + "# edited there\n")
        self.project.commit("", "--amend", "--no-edit", "--allow-empty-message")
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, test.name, "edits made here since")
        self.assertEqual(self.project.files(), before)

    def test_trailers_of_ghstack_are_dropped(self) -> None:
        self.assert_works(self.project.worktree())
        before = self.project.files()
        git = ["git", "-C", str(self.project.tree), "log", "-1", "--format=%B"]
        message = subprocess.run(git, check=True, capture_output=True, text=True).stdout
        trailers = (
            "ghstack-source-id: 12ab\nPull-Request: https://github.com/a/b/pull/1"
        )
        self.project.commit(f"{message.rstrip()}\n{trailers}", "--amend")
        self.assert_works(self.project.run("export_patches.sh"))
        self.assertEqual(self.project.files(), before)

    def test_two_commits_of_one_title(self) -> None:
        self.assert_works(self.project.worktree())
        for _ in range(2):
            self.project.commit(MESSAGE, "--allow-empty")
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, "say-hello.patch")

    def test_merge(self) -> None:
        self.assert_works(self.project.worktree())
        git = ["git", "-C", str(self.project.tree)]
        subprocess.run([*git, "checkout", "--quiet", "-b", "side", "HEAD^"], check=True)
        self.project.commit(MESSAGE, "--allow-empty")
        identity = ["-c", "user.name=A B", "-c", "user.email=a@b.c"]
        subprocess.run(
            [*git, *identity, "merge", "--quiet", "-m", "m", "main"], check=True
        )
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, "the merge", "rebase")

    def test_second_run_does_nothing(self) -> None:
        self.assert_works(self.project.worktree())
        head = self.project.head()
        result = self.project.worktree()
        self.assert_works(result)
        self.assertIn("nothing to do", result.stdout)
        self.project.commit("[x] mine", "--allow-empty")
        self.assert_refused(self.project.worktree(), "which stays")
        self.assertNotEqual(self.project.head(), head)

    def test_no_tree_to_export(self) -> None:
        result = self.project.run("export_patches.sh")
        self.assert_refused(result, "scripts/worktree.sh")

    def test_user_configuration_does_not_matter(self) -> None:
        """Signing, hooks and whitespace repair on, inside another repository."""
        self.assert_works(self.project.worktree())
        head = self.project.head()
        shutil.rmtree(self.project.tree)
        subprocess.run(["git", "init", "--quiet", str(self.folder)], check=True)
        hooks = self.folder / "hooks"
        hooks.mkdir()
        for name in ("pre-commit", "applypatch-msg", "pre-applypatch", "commit-msg"):
            (hooks / name).write_text("#!/bin/sh\nexit 1\n")
            (hooks / name).chmod(0o755)
        attributes = self.folder / ".config" / "git" / "attributes"
        attributes.parent.mkdir(parents=True)
        attributes.write_text("*.py text eol=crlf\n")
        (self.folder / ".gitconfig").write_text(
            "[commit]\n\tgpgSign = true\n[apply]\n\twhitespace = error-all\n"
            f"[core]\n\thooksPath = {hooks}\n\tautocrlf = true\n"
            "[user]\n\tuseConfigOnly = true\n[am]\n\tkeepcr = false\n"
        )
        self.assert_works(self.project.worktree(HOME=str(self.folder)))
        self.assertEqual(self.project.head(), head)


class TestRefused(ProjectTestCase):
    def test_patch_that_does_not_apply(self) -> None:
        patch = self.project.patches / "rnn-dropout.patch"
        text = patch.read_text()
        patch.write_text(text.replace("-        dropout =", "-        no_such ="))
        self.assertNotEqual(patch.read_text(), text)
        result = self.project.worktree()
        file = "torch/_decomp/decompositions.py"
        self.assert_refused(result, "rnn-dropout.patch", "the hunk at line", file)
        self.assertFalse(self.project.tree.exists())

    def test_patch_of_a_missing_file(self) -> None:
        patch = self.project.patches / "rnn-dropout.patch"
        patch.write_text(patch.read_text().replace("_decomp/", "_no/"))
        self.assert_refused(self.project.worktree(), "torch/_no/decompositions.py")

    def test_overlay_file_that_exists(self) -> None:
        name = "torch/_inductor/kernel/bmm.py"
        (self.project.root / "torch_overlay" / name).write_text("")
        with (self.project.patches / "series").open("a") as f:
            f.write(f"    overlay {name}\n")
        self.assert_refused(self.project.worktree(), name, "to be new")

    def test_series_and_files_disagree(self) -> None:
        listed = self.project.patches / "series"
        (self.project.patches / "stray.patch").write_text("")
        (self.project.patches / "rnn-dropout.patch").unlink()
        listed.write_text(
            listed.read_text().replace(
                "    overlay torch/_inductor/kernel/rnn.py\n", ""
            )
        )
        self.assert_refused(
            self.project.run("check_series.sh"),
            "patch stray is there, and not listed",
            "patch rnn-dropout is listed, and not there",
            "overlay file torch/_inductor/kernel/rnn.py is there, and not listed",
        )

    def test_series_line_of_another_form(self) -> None:
        with (self.project.patches / "series").open("a") as f:
            f.write("one two\n")
        result = self.project.run("check_series.sh")
        self.assert_refused(result, "'one two'", "series:")

    def test_no_such_pin(self) -> None:
        result = self.project.run("apply_and_build.sh", "--pin", "v1")
        self.assert_refused(result, PIN.name, "'v1'")

    def fake_wheel(self, version: str, commit: str) -> Path:
        path = self.folder / f"torch-{version}-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(path, "w") as z:
            z.writestr(
                "torch/version.py",
                f"__version__ = '{version}'\ngit_version = '{commit}'\n",
            )
        return path

    def test_wheel_of_another_pin(self) -> None:
        for version, commit in (("2.12.0", PIN.commit), (PIN.version, "f" * 40)):
            path = self.fake_wheel(version, commit)
            result = self.project.run("apply_and_build.sh", "--wheel", str(path))
            self.assert_refused(result, PIN.version, PIN.commit, version, commit)
        self.assertFalse((self.project.root / "dist").exists())

    def test_wheel_for_another_python(self) -> None:
        path = self.fake_wheel(PIN.version, PIN.commit)
        for name in (path.name.replace("-cp311-", "-cp39-"), "torch.whl"):
            other = path.rename(self.folder / name)
            result = self.project.run("apply_and_build.sh", "--wheel", str(other))
            self.assert_refused(result, name, "for this Python")
            path = other.rename(path)

    def test_not_a_wheel(self) -> None:
        path = self.folder / "torch.whl"
        for content in (None, b"not a zip"):
            if content is not None:
                path.write_bytes(content)
            result = self.project.run("apply_and_build.sh", "--wheel", str(path))
            self.assert_refused(result, str(path), "--wheel")
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("other.txt", "")
        result = self.project.run("apply_and_build.sh", "--wheel", str(path))
        self.assert_refused(result, "no torch/version.py")

    def test_pip_finds_nothing(self) -> None:
        result = self.project.run(
            "apply_and_build.sh",
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS="",
            PIP_CONFIG_FILE=os.devnull,
        )
        self.assert_refused(result, "torch 2.13.0", "--wheel FILE")

    def tools(self, *names: str) -> str:
        folder = self.folder / "bin"
        folder.mkdir()
        for name in ("dirname", "basename", *names):
            found = shutil.which(name)
            assert found, name
            (folder / name).symlink_to(found)
        return str(folder)

    def test_no_compiler(self) -> None:
        result = self.project.run(
            "apply_and_build.sh",
            PATH=self.tools("git"),
            RNN_PYTHON=sys.executable,
            CXX="",
        )
        self.assert_refused(result, "C++ compiler")

    def test_no_python(self) -> None:
        result = self.project.run(
            "apply_and_build.sh", PATH=self.tools(), RNN_PYTHON=""
        )
        self.assert_refused(result, "Python 3.10")

    def test_environment_of_somebody_else(self) -> None:
        other = self.folder / "venv"
        other.mkdir()
        (other / "mine").write_text("work")
        with self.assertRaisesRegex(console.UserError, "--venv DIR"):
            environment.prepare(other)
        self.assertEqual([p.name for p in other.iterdir()], ["mine"])


class TestConsole(unittest.TestCase):
    def exit_of(self, error: BaseException) -> tuple[int, str]:
        def main(argv: list[str]) -> int:
            raise error

        said = io.StringIO()
        with self.assertRaises(SystemExit) as stopped, contextlib.redirect_stderr(said):
            console.run_main(main)
        assert isinstance(stopped.exception.code, int)
        return stopped.exception.code, said.getvalue()

    def test_disk_full(self) -> None:
        full = OSError(errno.ENOSPC, "No space left on device", "dist/x.whl")
        status, said = self.exit_of(full)
        self.assertEqual(status, 1)
        self.assertEqual(len(said.splitlines()), 1)
        self.assertIn("dist/x.whl", said)

    def test_other_error_of_a_file(self) -> None:
        status, said = self.exit_of(PermissionError(errno.EACCES, "Denied", "dist"))
        self.assertEqual(status, 1)
        self.assertEqual(len(said.splitlines()), 1)
        self.assertIn("Denied at dist", said)

    def test_told_to_end(self) -> None:
        def main(argv: list[str]) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

        before = signal.getsignal(signal.SIGTERM)
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        with self.assertRaises(SystemExit) as stopped:
            with contextlib.redirect_stderr(io.StringIO()):
                console.run_main(main)
        self.assertEqual(stopped.exception.code, 130)

    def test_interrupted(self) -> None:
        status, said = self.exit_of(KeyboardInterrupt())
        self.assertEqual(status, 130)
        self.assertEqual(len(said.splitlines()), 1)

    def test_interrupted_environment_is_finished(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            venv = Path(folder) / "venv"
            (venv / "bin").mkdir(parents=True)
            (venv / "rnn-series.txt").write_text("")
            environment.prepare(venv)
            self.assertEqual(environment.installed(venv), "")
            self.assertTrue(environment.python_of(venv).exists())


class TestHeaders(unittest.TestCase):
    good = (PIN.folder / "rnn-dropout.patch").read_text()

    def test_good(self) -> None:
        self.assertEqual(series.header_problems(self.good), [])

    def test_bad(self) -> None:
        for old, new in (
            ("Subject: [decomp] ", "Subject: "),
            ("From: ", "Form: "),
            ("Date: ", "Data: "),
            ("Test plan:", "Tests:"),
            ("pytorch/pytorch#103071", "the tracker"),
            ("\nTest plan:", "\ncc somebody\nTest plan:"),
            ("Test plan:", "Ask @somebody. Test plan:"),
            ("\nTest plan:", "\nghstack-source-id: 1\n\nTest plan:"),
            ("\nTest plan:", "\nPull-Request: https://x/1\n\nTest plan:"),
            ("eager is", "eager \u2013 is"),
        ):
            bad = self.good.replace(old, new, 1)
            self.assertNotEqual(bad, self.good, old)
            self.assertEqual(len(series.header_problems(bad)), 1, (old, new))


class TestWheel(unittest.TestCase):
    folder: Path
    source: Path
    packed: Path
    files: dict[str, bytes]

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        cls.source = source_wheel()
        cls.files = wheel.python_files(cls.source)
        cls.files["torch/nn/__init__.py"] += b"# edited\n"
        cls.files["torch/new.py"] = b"new = True\n"
        cls.packed = cls.folder / wheel.packed_name(cls.source, PIN)
        wheel.pack(cls.source, cls.files, PIN, cls.packed)

    def test_name_and_metadata(self) -> None:
        name, version, _, tags = parse_wheel_filename(self.packed.name)
        self.assertEqual(name, "torch")
        self.assertEqual(version.base_version, PIN.version)
        assert version.local is not None
        self.assertTrue(version.local.endswith(f"rnn{PIN.build}"))
        self.assertEqual(tags, parse_wheel_filename(self.source.name)[3])
        with zipfile.ZipFile(self.packed) as z:
            metadata = z.read(f"torch-{version}.dist-info/METADATA").decode()
            self.assertEqual(metadata.count(f"\nVersion: {version}\n"), 1)
            said = z.read("torch/version.py").decode()
            self.assertIn(f"__version__ = '{version}'", said)

    def test_record_is_right(self) -> None:
        with zipfile.ZipFile(self.packed) as z:
            (name,) = (n for n in z.namelist() if n.endswith(".dist-info/RECORD"))
            rows = {r[0]: r[1:] for r in csv.reader(io.StringIO(z.read(name).decode()))}
            self.assertEqual(rows.pop(name), ["", ""])
            self.assertEqual(set(rows), set(z.namelist()) - {name})
            for member, (digest, size) in rows.items():
                data = z.read(member)  # also checks the member's CRC
                found = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
                self.assertEqual(
                    digest, "sha256=" + found.rstrip(b"=").decode(), member
                )
                self.assertEqual(int(size), len(data), member)

    def test_only_what_was_meant_differs(self) -> None:
        with zipfile.ZipFile(self.source) as old, zipfile.ZipFile(self.packed) as new:
            before = {i.filename: i for i in old.infolist() if not i.is_dir()}
            after = {i.filename: i for i in new.infolist()}
            changed = {
                n for n in after if n not in before or before[n].CRC != after[n].CRC
            }
            outside = {n for n in changed if ".dist-info/" not in n}
            self.assertEqual(
                outside, {"torch/nn/__init__.py", "torch/new.py", "torch/version.py"}
            )
            self.assertEqual(
                [n for n in before if n not in after and ".dist-info/" not in n], []
            )
            for name in ("torch/bin/torch_shm_manager",):
                mode = after[name].external_attr
                self.assertEqual(mode, before[name].external_attr)

    def test_reproducible(self) -> None:
        again = self.folder / "again" / self.packed.name
        wheel.pack(self.source, self.files, PIN, again)
        self.assertEqual(
            hashlib.sha256(again.read_bytes()).digest(),
            hashlib.sha256(self.packed.read_bytes()).digest(),
        )
        self.assertEqual([p.name for p in again.parent.iterdir()], [again.name])


class TestBuild(unittest.TestCase):
    def test_second_run_does_nothing(self) -> None:
        """On the build that CI/run.sh made, or one that is made here."""
        script = ROOT / "scripts" / "apply_and_build.sh"
        subprocess.run([str(script)], check=True, capture_output=True)
        result = subprocess.run([str(script)], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("is up to date", result.stdout)
        self.assertIn("the wheel is installed", result.stdout)
        self.assertIn("4 checks hold", result.stdout)


if __name__ == "__main__":
    unittest.main()
