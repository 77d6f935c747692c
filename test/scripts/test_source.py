"""Tests of --source and of second pins: real git, real build backends, no PyTorch build."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zipfile
from pathlib import Path
from unittest import mock


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from rnn_series import git as g  # noqa: E402
from rnn_series import port, series, source, wheel  # noqa: E402
from rnn_series.console import UserError  # noqa: E402
from rnn_series.pin import DEFAULT_PIN, load_pin, Pin  # noqa: E402


PIN = load_pin(DEFAULT_PIN)
UPSTREAM_TEST = "test/inductor/test_mkldnn_pattern_matcher.py"


@functools.cache
def python_files() -> dict[str, bytes]:
    return wheel.python_files(wheel.obtain(PIN.version, ROOT / "build" / "wheels"))


@functools.cache
def edited_files() -> dict[str, bytes]:
    """Only those that the series edits, for quick trees."""
    names = set()
    for entry in series.load(PIN):
        text = series.patch_path(PIN, entry.slug).read_text()
        names |= set(re.findall(r"^diff --git a/(\S+) ", text, re.MULTILINE))
    return {name: python_files()[name] for name in names}


def commit_files(tree: Path, files: dict[str, bytes], *flags: str) -> str:
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    g.git(tree, "-c", "core.fsync=none", "add", "--force", "--all")
    flags = flags or ("--allow-empty", "-m", "files")
    g.git(tree, "commit", "--quiet", *flags)
    return g.git(tree, "rev-parse", "HEAD").strip()


def make_checkout(tree: Path, files: dict[str, bytes]) -> Pin:
    """A stand-in for upstream's repository, and a pin that names its commit."""
    tree.mkdir()
    g.git(tree, "init", "--quiet", "--initial-branch=main")
    others = {"README.md": b"upstream\n", UPSTREAM_TEST: b"upstream = True\n"}
    commit = commit_files(tree, files | others)
    return Pin(PIN.name, PIN.version, commit, PIN.build)


class FolderTestCase(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.tree = self.folder / "pytorch"

    def assert_refused(self, *words: str) -> contextlib.AbstractContextManager[object]:
        """One line that has ``words`` in this order."""
        return self.assertRaisesRegex(UserError, ".*".join(map(re.escape, words)))


class TestApply(FolderTestCase):
    def head(self) -> str:
        return g.git(self.tree, "rev-parse", "HEAD").strip()

    def test_same_trees_as_from_the_wheel(self) -> None:
        pin = make_checkout(self.tree, python_files())
        made, changed = source.apply(self.tree, pin)
        self.assertTrue(changed)
        self.assertEqual(self.head(), made)
        worktree = self.folder / "worktree"
        series.make_tree(worktree, python_files(), PIN)
        for name in ("HEAD:torch", "HEAD~3:torch"):
            trees = [g.git(t, "rev-parse", name) for t in (self.tree, worktree)]
            self.assertEqual(*trees)
        span = f"{pin.commit}..HEAD"
        self.assertEqual(
            g.git(self.tree, "log", "--format=%s%n%b", span),
            g.git(worktree, "log", "--format=%s%n%b", f"{series.BASE_TAG}..HEAD"),
        )
        self.assertEqual((self.tree / UPSTREAM_TEST).read_text(), "upstream = True\n")
        for entry in series.load(PIN):
            for path, name in entry.brought(PIN):
                self.assertEqual((self.tree / name).read_bytes(), path.read_bytes())

    def test_exports_exactly(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        source.apply(self.tree, pin)
        out = self.folder / "out"
        patches = out / PIN.folder.relative_to(ROOT)
        patches.mkdir(parents=True)
        series.export(self.tree, pin, patches, out / "torch_overlay", out)
        exported = [p for p in out.rglob("*") if p.is_file()]
        self.assertGreater(len(exported), len(series.load(PIN)))
        for path in exported:
            here = ROOT / path.relative_to(out)
            self.assertEqual(path.read_bytes(), here.read_bytes(), path)

    def test_tests_of_the_checkout(self) -> None:
        self.tree.mkdir()
        ours = [command[0] for command in source.test_commands(self.tree, PIN)]
        names = [p.name for p in (ROOT / "test" / "inductor").glob("test_*.py")]
        self.assertEqual(len(ours), len(names))
        self.assertNotIn(UPSTREAM_TEST, ours)
        name = "test/inductor/test_cpu_repro.py"
        for test in (*ours, name):
            (self.tree / test).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / test).write_text("print('ran')\n")
        self.assertEqual(
            source.run_tests(self.tree, PIN, Path(sys.executable)), len(names) + 1
        )
        text = "import sys\nsys.exit(sys.argv[1:] == ['-k', 'lstm'])\n"
        (self.tree / name).write_text(text)
        with self.assert_refused("to pass", name):
            source.run_tests(self.tree, PIN, Path(sys.executable))

    def test_second_run_does_nothing(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        made, _ = source.apply(self.tree, pin)
        self.assertEqual(source.apply(self.tree, pin), (made, False))
        files = source.changed_files(self.tree, pin)
        overlay = {p for e in series.load(PIN) for p in e.overlay}
        self.assertEqual(set(files), set(edited_files()) | overlay)

    def test_resumes_where_the_branch_was_made_and_not_checked_out(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        made, _ = source.apply(self.tree, pin)
        g.git(self.tree, "checkout", "--quiet", pin.commit)
        self.assertEqual(source.apply(self.tree, pin), (made, True))
        self.assertEqual(self.head(), made)

    def test_patch_that_does_not_apply_leaves_the_checkout(self) -> None:
        files = dict.fromkeys(edited_files(), b"other\n")
        pin = make_checkout(self.tree, files)
        with self.assert_refused("to apply", "does not apply"):
            source.apply(self.tree, pin)
        self.assertEqual(self.head(), pin.commit)
        self.assertEqual(g.git(self.tree, "status", "--porcelain"), "")
        self.assertEqual(len(g.git(self.tree, "worktree", "list").splitlines()), 1)

    def test_upstream_file_is_not_overwritten(self) -> None:
        name = "torch/_inductor/rnn_ops.py"
        pin = make_checkout(self.tree, edited_files() | {name: b"upstream\n"})
        with self.assert_refused(name, "to be new"):
            source.apply(self.tree, pin)
        self.assertEqual((self.tree / name).read_bytes(), b"upstream\n")

    def test_refused(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        other = Pin(pin.name, pin.version, "f" * 40, pin.build)
        with self.assert_refused("f" * 40, pin.commit, "git checkout"):
            source.apply(self.tree, other)
        (self.tree / "mine.py").write_text("")
        with self.assert_refused("no uncommitted changes", "mine.py", "git stash"):
            source.apply(self.tree, pin)
        (self.tree / "mine.py").unlink()
        with self.assert_refused("git checkout of PyTorch", "none"):
            source.apply(self.tree / "torch", pin)
        self.assertEqual(self.head(), pin.commit)

    def test_branch_of_somebody_else(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        g.git(self.tree, "checkout", "--quiet", "-b", source.branch_name(pin))
        mine = commit_files(self.tree, {"mine.py": b""})
        for where in (mine, pin.commit):
            g.git(self.tree, "checkout", "--quiet", where)
            with self.assert_refused("rnn-series/" if where != mine else "at commit"):
                source.apply(self.tree, pin)
        g.git(self.tree, "checkout", "--quiet", source.branch_name(pin))
        with self.assert_refused("which stays", "branch -m"):
            source.apply(self.tree, pin)
        self.assertEqual(self.head(), mine)

    def test_something_under_way(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        g.git(self.tree, "checkout", "--quiet", "-b", "side")
        commit_files(self.tree, {"README.md": b"side\n"})
        patch = g.run(self.tree, "format-patch", "-1", "--stdout").stdout
        g.git(self.tree, "checkout", "--quiet", "main")
        commit_files(self.tree, {"README.md": b"main\n"})
        for command, what in (
            (("rebase", "side"), "a rebase"),
            (("merge", "side"), "a merge"),
            (("cherry-pick", "side"), "a cherry-pick"),
            (("am", "-"), "an am"),
        ):
            with self.subTest(what):
                done = g.run(self.tree, *command, stdin=patch)
                self.assertNotEqual(done.returncode, 0)
                with self.assert_refused("nothing under way", what, "abort"):
                    source.apply(self.tree, pin)
                g.git(self.tree, command[0], "--abort")


class TestCommand(FolderTestCase):
    def run_script(self, *args: str) -> subprocess.CompletedProcess[str]:
        script = self.folder / "project" / "scripts" / "apply_and_build.sh"
        return subprocess.run(
            ["bash", str(script), *args], capture_output=True, text=True
        )

    def test_commits_in_a_checkout_and_in_a_clone(self) -> None:
        pin = make_checkout(self.tree, edited_files())
        for name in ("scripts", "patches", "torch_overlay", "test/inductor"):
            shutil.copytree(ROOT / name, self.folder / "project" / name)
        result = self.run_script("--source", str(self.tree), "--no-build")
        self.assertEqual(result.returncode, 1)
        for word in ("error: expected", PIN.commit, pin.commit):
            self.assertIn(word, result.stderr)
        path = self.folder / "project" / "patches" / PIN.name / "pin.toml"
        path.write_text(path.read_text().replace(PIN.commit, pin.commit))
        clone = f"git={self.tree.as_uri()}"
        for given, outcome in (
            (str(self.tree), f"{len(series.load(PIN))} commits on branch"),
            (str(self.tree), "nothing to do"),
            (clone, f"{len(series.load(PIN))} commits on branch"),
            (clone, "nothing to do"),
        ):
            result = self.run_script("--source", given, "--no-build")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(outcome, result.stdout)
        made = self.folder / "project" / "build" / "pytorch"
        heads = [g.git(t, "rev-parse", "HEAD") for t in (self.tree, made)]
        self.assertEqual(*heads)


class TestClone(FolderTestCase):
    def setUp(self) -> None:
        super().setUp()
        sub = self.folder / "sub"
        sub.mkdir()
        g.git(sub, "init", "--quiet", "--initial-branch=main")
        commit_files(sub, {"sub.txt": b"sub\n"})
        self.upstream = self.folder / "upstream"
        make_checkout(self.upstream, edited_files())
        allow = ("-c", "protocol.file.allow=always")
        g.git(
            self.upstream, *allow, "submodule", "--quiet", "add", sub.as_uri(), "third"
        )
        commit = commit_files(self.upstream, {})
        self.pin = Pin(PIN.name, PIN.version, commit, PIN.build)
        # The pin is not the tip of a branch, as in upstream's repository.
        commit_files(self.upstream, {"README.md": b"later\n"})

    def clone(self, allowed: str) -> None:
        config = {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "protocol.file.allow",
            "GIT_CONFIG_VALUE_0": allowed,
        }
        with (
            mock.patch.dict(os.environ, config),
            mock.patch.object(source, "_ATTEMPTS", 1),
        ):
            source.clone(self.tree, self.upstream.as_uri(), self.pin)

    def test_shallow_and_resumed(self) -> None:
        with self.assert_refused("git fetch", "what was fetched stays"):
            self.clone("never")
        # Git's default: not for submodules
        with self.assert_refused("git submodule update", "what was fetched stays"):
            self.clone("user")
        self.assertEqual((self.tree / "README.md").read_text(), "upstream\n")
        self.clone("always")
        self.assertEqual((self.tree / "third" / "sub.txt").read_text(), "sub\n")
        count = g.git(self.tree, "rev-list", "--count", "HEAD").strip()
        self.assertEqual(count, "1")
        made, _ = source.apply(self.tree, self.pin)
        # Again, on the branch that has the series
        self.clone("always")
        self.assertEqual(source.apply(self.tree, self.pin), (made, False))

    def test_other_clone_is_kept(self) -> None:
        self.clone("always")
        with self.assert_refused("clone of", "elsewhere", "move it away"):
            source.clone(self.tree, "file:///elsewhere", self.pin)
        other = self.folder / "other"
        other.mkdir()
        (other / "mine").write_text("work")
        with self.assert_refused(str(other), "something else", "move it away"):
            source.clone(other, self.upstream.as_uri(), self.pin)


# Two objects, of which the second waits as long as there is a file "hold".
CMAKE = """cmake_minimum_required(VERSION 3.18)
project(tiny LANGUAGES NONE)
message(STATUS "  USE_MKL               : OFF")
message(STATUS "  USE_MKLDNN            : ${USE_MKLDNN}")
set(here ${CMAKE_SOURCE_DIR})
add_custom_command(OUTPUT one COMMAND echo >> ${here}/ones COMMAND echo > one)
add_custom_command(OUTPUT two DEPENDS one COMMAND echo >> ${here}/twos
  COMMAND sh ${here}/wait.sh ${here}
  COMMAND echo > two)
add_custom_target(all_objects ALL DEPENDS two)
install(FILES ${CMAKE_BINARY_DIR}/two DESTINATION tiny)
"""
WAIT = "cd $1 && if test -e hold; then echo $$ > pid; exec sleep 99; fi\n"
SCIKIT = """[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "tiny"
version = "1"
"""
SETUPTOOLS = """[build-system]
requires = [
    "setuptools",  # it's needed
]
build-backend = "setuptools.build_meta:__legacy__"
"""
# As PyTorch's: configure when there is no cache, and build in the folder "build".
SETUP = """import os, subprocess, sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    if not os.path.exists("build/CMakeCache.txt"):
        value = os.environ["USE_MKLDNN"]
        subprocess.check_call(
            ["cmake", "-GNinja", "-S.", "-Bbuild", "-DUSE_MKLDNN=" + value])
    subprocess.check_call(["cmake", "--build", "build"])
setup(name="tiny", version=os.environ["PYTORCH_BUILD_VERSION"], py_modules=[])
"""
PROJECTS = {
    "scikit_build_core": {"pyproject.toml": SCIKIT},
    "setuptools": {"pyproject.toml": SETUPTOOLS, "setup.py": SETUP},
}
RUN = """import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rnn_series import console, source
def main(argv):
    tree, python = Path(sys.argv[2]), Path(sys.executable)
    system = source.build_system(tree, python)
    env = source.build_environment(system, "1.0+rnn1")
    source.build_wheel(tree, python, system, env, tree.parent / "dist")
    return 0
console.run_main(main)
"""


class TestBuild(FolderTestCase):
    def setUp(self) -> None:
        super().setUp()
        # cmake and ninja as pinned for CI
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        patched = mock.patch.dict(os.environ, PATH=path, TMPDIR=str(self.folder))
        patched.start()
        self.addCleanup(patched.stop)

    def make_project(self, backend: str, cmake: str = CMAKE) -> None:
        for folder in (self.tree, self.folder / "dist"):
            shutil.rmtree(folder, ignore_errors=True)
        self.tree.mkdir()
        for name, text in (
            PROJECTS[backend] | {"CMakeLists.txt": cmake, "wait.sh": WAIT}
        ).items():
            (self.tree / name).write_text(text)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(ROOT / "scripts"), str(self.tree)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def runs(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    def lines(self, name: str) -> int:
        return len((self.tree / name).read_text().splitlines())

    def test_interrupted_and_resumed(self) -> None:
        for backend in PROJECTS:
            with self.subTest(backend):
                self.interrupt_and_resume(backend)

    def interrupt_and_resume(self, backend: str) -> None:
        self.make_project(backend)
        (self.tree / "hold").write_text("")
        running = self.start()
        pid = self.tree / "pid"
        for _ in range(600):
            if (pid.is_file() and pid.read_text()) or running.poll() is not None:
                break
            time.sleep(0.1)
        if running.poll() is not None:
            self.fail(running.communicate()[1])
        with self.assert_refused("no other build", "found one running"):
            self.build()
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
        self.assertEqual(running.returncode, 130, said)
        self.assertEqual(said.count("\n"), 1)
        self.assertFalse(self.runs(int(pid.read_text())))
        self.assertEqual(list((self.folder / "dist").iterdir()), [])

        (self.tree / "hold").unlink()
        made = self.build()
        self.assertTrue(made.is_file())
        self.assertEqual((self.lines("ones"), self.lines("twos")), (1, 2))

    def build(self) -> Path:
        python = Path(sys.executable)
        system = source.build_system(self.tree, python)
        env = source.build_environment(system, "1.0+rnn1")
        out = self.folder / "dist"
        self.said: list[str] = []
        return source.build_wheel(self.tree, python, system, env, out, self.said.append)

    def test_wheel_by_either_backend(self) -> None:
        for backend in PROJECTS:
            with self.subTest(backend):
                self.make_project(backend)
                made = self.build()
                version = "1" if backend == "scikit_build_core" else "1.0+rnn1"
                self.assertEqual(made.name.split("-")[:2], ["tiny", version])
                self.assertIn("oneDNN on, without MKL", self.said[0])

    def test_onednn_off_is_refused_before_the_first_object(self) -> None:
        self.make_project("setuptools", CMAKE.replace("${USE_MKLDNN}", "OFF"))
        with self.assert_refused("USE_MKLDNN ON", "found OFF"):
            self.build()
        self.assertFalse((self.tree / "ones").exists())
        # Nor by a second run, which configures nothing anew
        with self.assert_refused("USE_MKLDNN ON", "found OFF"):
            self.build()

    def test_no_summary(self) -> None:
        self.make_project("setuptools", CMAKE.replace("USE_MKLDNN  ", "OTHER  "))
        with self.assert_refused("a configure summary", "found none"):
            self.build()

    def test_failing_build(self) -> None:
        self.make_project("setuptools", CMAKE.replace("echo > two", "false"))
        with self.assert_refused("to give a wheel", source.LOG):
            self.build()

    def test_build_folder_of_somebody_else(self) -> None:
        self.make_project("setuptools")
        (self.tree / "build").mkdir()
        (self.tree / "build" / "CMakeCache.txt").write_text("")
        with self.assert_refused("that this script made", "CMakeCache.txt", "away"):
            self.build()

    def test_other_backend(self) -> None:
        self.tree.mkdir()
        python = Path(sys.executable)
        with self.assert_refused("pyproject.toml", "no build backend"):
            source.build_system(self.tree, python)
        (self.tree / "pyproject.toml").write_text(SCIKIT.replace("scikit_", "x_"))
        with self.assert_refused("x_build_core.build"):
            source.build_system(self.tree, python)


class TestBuildEnvironment(FolderTestCase):
    system = source.BuildSystem("setuptools", [])

    def test_jobs_by_cores_and_memory(self) -> None:
        for cores, memory, expected in ((8, 4e9, 2), (2, 64e9, 2), (4, 1e9, 1)):
            with (
                mock.patch.object(os, "sched_getaffinity", lambda pid: range(cores)),
                mock.patch.object(source, "_memory", lambda: int(memory)),
            ):
                self.assertEqual(source.jobs(), expected)
        self.assertGreater(source._memory(), 1 << 20)

    def environment(self, **given: str) -> dict[str, str]:
        with mock.patch.dict(
            os.environ, {"PATH": str(self.folder), **given}, clear=True
        ):
            return source.build_environment(self.system, "2.0", self.folder / "venv")

    def test_launcher(self) -> None:
        names = ("CMAKE_C_COMPILER_LAUNCHER", "CMAKE_CXX_COMPILER_LAUNCHER")
        self.assertNotIn(names[0], self.environment())
        for tool in ("ccache", "sccache"):
            (self.folder / tool).write_text("")
            (self.folder / tool).chmod(0o755)
            for name in names:
                found = self.environment()[name]
                self.assertEqual(found, str(self.folder / tool))
        env = self.environment(CMAKE_CXX_COMPILER_LAUNCHER="distcc")
        self.assertEqual(env[names[1]], "distcc")

    def test_options(self) -> None:
        env = self.environment(MAX_JOBS="7", USE_CUDA="1", CMAKE_PREFIX_PATH="/x")
        self.assertEqual((env["MAX_JOBS"], env["USE_CUDA"]), ("7", "0"))
        self.assertEqual(env["CMAKE_PREFIX_PATH"], f"{self.folder / 'venv'}:/x")
        self.assertEqual(env["PYTORCH_BUILD_VERSION"], "2.0")


class TestOtherRelease(FolderTestCase):
    def try_on(self, new: dict[str, bytes]) -> list[port.Outcome]:
        tree = self.folder / f"try{len(list(self.folder.iterdir()))}"
        return port.try_series(tree, edited_files(), new, PIN, "9.0")

    def test_outcomes(self) -> None:
        new = dict(edited_files())
        slugs = [e.slug for e in series.load(PIN)]
        found = self.try_on(new)
        self.assertEqual(
            [(o.slug, o.result) for o in found], [(s, port.APPLIES) for s in slugs]
        )

        old = self.folder / "old"
        series.make_tree(old, edited_files(), PIN)
        # The first patch was merged, and a line that another edits is another now.
        first = g.git(old, "rev-list", "--reverse", "rnn-base..HEAD").split()[0]
        for name in g.git(old, "diff", "--name-only", f"{first}^", first).split():
            new[name] = g.run(old, "show", f"{first}:{name}").stdout
        name = "torch/_inductor/kernel/__init__.py"
        new[name] = b"from . import flex, mm\n"
        found = self.try_on(new)
        results = {o.slug: o for o in found}
        self.assertEqual(results[slugs[0]].result, port.UPSTREAM)
        conflict = results["rnn-layer-lowering"]
        self.assertEqual(conflict.result, port.CONFLICTS)
        self.assertEqual(conflict.where, [f"{name}:1"])
        self.assertEqual(results["rnn-capture"].result, port.APPLIES)

    def test_file_that_upstream_removed(self) -> None:
        new = dict(edited_files())
        name = "torch/_inductor/kernel/__init__.py"
        del new[name]
        results = {o.slug: o for o in self.try_on(new)}
        (where,) = results["rnn-layer-lowering"].where
        self.assertIn("modify/delete", where)
        self.assertIn(name, where)

    def test_file_of_a_pin_takes_the_place_of_the_shared_one(self) -> None:
        """Exported as the pin's own when it differs, and removed when it does not."""
        root = self.folder / "project"
        for name in ("patches", "torch_overlay", "test/inductor"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copytree(root / "patches" / PIN.name, root / "patches" / "v9")
        pin = Pin("v9", "9.0", PIN.commit, 1)
        # Brought by the last patch, so that amending it is enough
        name = series.load(PIN)[-1].tests[0]
        shared = root / name
        own = root / "patches" / "v9" / "overlay" / name
        before = shared.read_bytes()
        with (
            mock.patch.object(series, "ROOT", root),
            mock.patch.object(series, "OVERLAY", root / "torch_overlay"),
            mock.patch("rnn_series.pin.PATCHES", root / "patches"),
        ):
            for text in (before + b"# for v9\n", before):
                tree = self.folder / "tree"
                shutil.rmtree(tree, ignore_errors=True)
                series.make_tree(tree, edited_files(), pin)
                series.note_origin(tree, pin)
                commit_files(tree, {name: text}, "--amend", "--no-edit")
                series.export_in_place(tree, pin)
                self.assertEqual(shared.read_bytes(), before)
                self.assertEqual(own.is_file(), text != before)
                self.assertEqual(series.problems(pin), [])
                again = self.folder / "again"
                shutil.rmtree(again, ignore_errors=True)
                series.make_tree(again, edited_files(), pin)
                self.assertEqual((again / name).read_bytes(), text)


class _Parts(http.server.BaseHTTPRequestHandler):
    data = b""
    sent = 0
    in_parts = True

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match
        first, last = int(match[1]), int(match[2])
        part = self.data[first : last + 1] if self.in_parts else self.data
        self.send_response(206 if self.in_parts else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        type(self).sent += len(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


class TestPythonFilesOfARemoteWheel(FolderTestCase):
    def setUp(self) -> None:
        super().setUp()
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as z:
            z.writestr("torch/version.py", "__version__ = '9.0'\n")
            z.writestr("torch/lib/libtorch.so", os.urandom(8 << 20))
            z.writestr("torch/nn/x.py", "x = 1\n")
        _Parts.data, _Parts.sent, _Parts.in_parts = data.getvalue(), 0, True
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Parts)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}/torch.whl"

    def test_read_in_parts(self) -> None:
        target = self.folder / "light.whl"
        wheel.copy_python(self.url, target)
        files = {
            "torch/version.py": b"__version__ = '9.0'\n",
            "torch/nn/x.py": b"x = 1\n",
        }
        self.assertEqual(wheel.python_files(target), files)
        self.assertLess(_Parts.sent, 5 << 20)

    def test_server_without_parts(self) -> None:
        _Parts.in_parts = False
        with self.assert_refused("in parts", "--wheel FILE"):
            wheel.copy_python(self.url, self.folder / "light.whl")


if __name__ == "__main__":
    unittest.main()
