"""A checkout of PyTorch: obtained, checked, given the series as commits, and built."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from . import git as g
from . import series
from .console import UserError
from .pin import Pin, ROOT


UPSTREAM = "https://github.com/pytorch/pytorch.git"
_ATTEMPTS = 3
# What is under way when one of these exists in the git folder.
_UNDER_WAY = {
    "rebase-apply": "an am or a rebase",
    "rebase-merge": "a rebase",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisection",
}
_OPTIONS = {"USE_MKLDNN": "1", "USE_CUDA": "0", "BUILD_TEST": "0"}
_UPSTREAM_TESTS = (
    ["test/inductor/test_mkldnn_pattern_matcher.py"],
    ["test/inductor/test_cpu_repro.py", "-k", "lstm"],
)
# What the tests import beside PyTorch
TEST_TOOLS = ("expecttest", "hypothesis", "pytest")
MKL = ("mkl-static", "mkl-include")
_BYTES_A_JOB = 1.8e9
_PROGRESS_SECONDS = 30.0
# The build folder is PyTorch's own; its output is kept there, so that it goes with it.
LOG = "build/rnn-series.log"
_SUMMARY = re.compile(r"--\s+(USE_MKLDNN|USE_MKL)\s+:\s*(\w+)")
_OFF = ("OFF", "0", "FALSE", "NO", "N")
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")


def branch_name(pin: Pin) -> str:
    return f"rnn-series/{pin.name}"


def _fetch(tree: Path, *args: str) -> None:
    """Run git with the user's configuration (proxy, credentials) and show its progress."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(5 * attempt)
        # A surrounding git command, such as a hook, must not choose the repository.
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
        }
        result = subprocess.run(
            ["git", *args], cwd=tree, stdin=subprocess.DEVNULL, env=env
        )
        if result.returncode == 0:
            return
    raise UserError(
        f"expected `git {' '.join(args)}` to succeed in {tree}, found exit code "
        f"{result.returncode} {_ATTEMPTS} times; see what git said above, and run the "
        "same command again: what was fetched stays"
    )


def _has(tree: Path, commit: str) -> bool:
    name = f"{commit}^{{commit}}"
    return g.run(tree, "rev-parse", "--quiet", "--verify", name).returncode == 0


def clone(tree: Path, url: str, pin: Pin) -> None:
    """Make or finish a shallow clone of ``url`` at the pinned commit, with submodules."""
    tree.mkdir(parents=True, exist_ok=True)
    if not (tree / ".git").exists():
        if any(tree.iterdir()):
            raise UserError(
                f"expected {tree} to be absent or a clone, found something else there; "
                "move it away"
            )
        g.git(tree, "init", "--quiet", "--initial-branch=main")
    if g.run(tree, "remote", "get-url", "origin").returncode:
        g.git(tree, "remote", "add", "origin", url)
    found = g.git(tree, "remote", "get-url", "origin").strip()
    if found != url:
        raise UserError(
            f"expected a clone of {url} at {tree}, found one of {found}; move it away or "
            "name it by --source DIR"
        )
    if not _has(tree, pin.commit):
        _fetch(tree, "fetch", "--progress", "--depth=1", "origin", pin.commit)
    # A fetch that was cut off leaves no HEAD; a checkout that was, a lock and old files.
    if g.run(tree, "rev-parse", "--quiet", "--verify", "HEAD").returncode:
        (tree / ".git" / "index.lock").unlink(missing_ok=True)
        g.git(tree, "reset", "--quiet", "--hard", pin.commit)
    _fetch(
        tree,
        *("submodule", "update", "--init", "--recursive", "--depth=1"),
        *("--jobs=4", "--progress"),
    )


def check(tree: Path) -> None:
    """Raise unless ``tree`` is the top of a checkout with nothing uncommitted."""
    if not (tree / ".git").exists():
        raise UserError(
            f"expected a git checkout of PyTorch at {tree}, found none; give the path of "
            "its top folder"
        )
    for name, what in _UNDER_WAY.items():
        if Path(tree, g.git(tree, "rev-parse", "--git-path", name).strip()).exists():
            raise UserError(
                f"expected {tree} with nothing under way, found {what}; finish or abort "
                "it and run again"
            )
    if changes := g.git(tree, "status", "--porcelain").splitlines():
        names = ", ".join(line[3:] for line in changes[:3])
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"expected no uncommitted changes in {tree}, found {names}{more}; commit them, "
            "or put them aside with `git stash --include-untracked`"
        )


@contextmanager
def beside(tree: Path, commit: str) -> Iterator[Path]:
    """A temporary work tree of the checkout at ``commit``.

    Commits are made there, so that an interruption leaves the checkout as it was.
    """
    (ROOT / "build").mkdir(exist_ok=True)
    g.git(tree, "worktree", "prune")
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        aside = Path(temporary) / "tree"
        g.git(tree, "worktree", "add", "--quiet", "--detach", str(aside), commit)
        try:
            yield aside
        finally:
            g.run(tree, "worktree", "remove", "--force", str(aside))


def apply(tree: Path, pin: Pin) -> tuple[str, bool]:
    """Put the checkout on a branch that has the series on top of the pinned commit.

    Returns the last commit, and whether there was anything to do.
    """
    check(tree)
    branch = branch_name(pin)
    head = g.git(tree, "rev-parse", "HEAD").strip()
    current = g.run(tree, "symbolic-ref", "--short", "HEAD").stdout.decode().strip()
    if head != pin.commit and current != branch:
        raise UserError(
            f"expected {tree} at commit {pin.commit} (PyTorch {pin.version}), found "
            f"{head}; run `git checkout {pin.commit}` there and then "
            "`git submodule update --init --recursive`"
        )
    with beside(tree, pin.commit) as aside:
        for entry in series.load(pin):
            series.apply_entry(aside, pin, entry)
        made = g.git(aside, "rev-parse", "HEAD").strip()
    ref = f"refs/heads/{branch}"
    there = g.run(tree, "rev-parse", "--quiet", "--verify", ref).stdout.decode().strip()
    if there not in ("", made, pin.commit):
        raise UserError(
            f"expected no branch {branch} in {tree} or the series as it is ({made[:12]}), "
            f"found {there[:12]}, which stays; rename it with `git branch -m {branch} NAME`"
        )
    if head == made and current == branch:
        return made, False
    # -B: the branch may have been made by a run that was interrupted here.
    g.git(tree, "checkout", "--quiet", "-B", branch, made)
    return made, True


def changed_files(tree: Path, pin: Pin) -> dict[str, str]:
    """SHA-256 of each file below torch/ that the series edits or adds."""
    names = g.git(
        tree, "diff", "--name-only", "--no-renames", pin.commit, "HEAD", "--", "torch"
    ).splitlines()
    return {n: hashlib.sha256((tree / n).read_bytes()).hexdigest() for n in names}


def test_commands(tree: Path, pin: Pin) -> list[list[str]]:
    """The tests of the series and upstream's of the same code, where the checkout has them."""
    ours = [series.RENAMED_TESTS.get(p, p) for e in series.load(pin) for p in e.tests]
    upstream = [command for command in _UPSTREAM_TESTS if (tree / command[0]).is_file()]
    return [[name] for name in ours] + upstream


def run_tests(tree: Path, pin: Pin, python: Path) -> int:
    """Run them as upstream does, and give how many files there were; raise if any fails."""
    commands = test_commands(tree, pin)
    failed = []
    for command in commands:
        print(f"   {' '.join(command)}", flush=True)
        if subprocess.run([str(python), *command], cwd=tree).returncode:
            failed.append(command[0])
    if failed:
        raise UserError(
            f"expected the tests to pass, found failures in {', '.join(failed)}; see their "
            "output above"
        )
    return len(commands)


@dataclass
class BuildSystem:
    backend: str
    requires: list[str]


_READ_TOML = """
import json, sys
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
print(json.dumps(tomllib.load(sys.stdin.buffer)["build-system"]))
"""


def build_system(tree: Path, python: Path) -> BuildSystem:
    """What the checkout's pyproject.toml names; ``python`` reads it and needs pip."""
    path = tree / "pyproject.toml"
    text = path.read_bytes() if path.is_file() else b""
    result = subprocess.run(
        [str(python), "-c", _READ_TOML], input=text, capture_output=True
    )
    found = json.loads(result.stdout) if result.returncode == 0 else {}
    backend = found.get("build-backend", "no build backend").split(":")[0]
    if backend.split(".")[0] not in ("setuptools", "scikit_build_core"):
        raise UserError(
            f"expected {path} to name setuptools or scikit-build-core, found {backend}; "
            "this script cannot build that"
        )
    return BuildSystem(backend.split(".")[0], found["requires"])


def _memory() -> int:
    """Bytes of memory that are free for the build."""
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    free = int(match[1]) * 1024 if match else 0
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (value := limit.read_text().strip()).isdigit():
        free = min(free, int(value))
    return free


def jobs() -> int:
    """As many as there are cores, and as memory allows."""
    return max(1, min(len(os.sched_getaffinity(0)), int(_memory() / _BYTES_A_JOB)))


def build_environment(
    system: BuildSystem, version: str, prefix: Path | None = None
) -> dict[str, str]:
    """The user's environment and what the build needs; the user's own settings stay.

    ``prefix`` is where MKL's headers and libraries may be.
    """
    env = dict(os.environ)
    env.update(_OPTIONS)
    env.update(PYTORCH_BUILD_VERSION=version, PYTORCH_BUILD_NUMBER="1")
    env.setdefault("MAX_JOBS", str(jobs()))
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", env["MAX_JOBS"])
    if launcher := shutil.which("sccache") or shutil.which("ccache"):
        for language in ("C", "CXX"):
            env.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", launcher)
    if prefix:
        found = env.get("CMAKE_PREFIX_PATH")
        env["CMAKE_PREFIX_PATH"] = os.pathsep.join(filter(None, [str(prefix), found]))
    if system.backend == "scikit_build_core":
        options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
        env["CMAKE_ARGS"] = " ".join([env.get("CMAKE_ARGS", ""), *options]).strip()
    return env


class _Watch:
    """Follows the output of a build: its configure summary and its progress."""

    def __init__(self, said_before: str) -> None:
        self.summary: dict[str, str] = {}
        self.start = self.shown = time.monotonic()
        for line in said_before.splitlines():
            self._read(line)
        self.first = self.total = -1

    def _read(self, line: str) -> None:
        if match := _SUMMARY.search(line):
            self.summary[match[1]] = match[2].upper()

    def line(self, line: str) -> None:
        """Raise if the summary says that oneDNN is off, or compiling began without one."""
        self._read(line)
        onednn = self.summary.get("USE_MKLDNN")
        if onednn in _OFF:
            raise UserError(
                f"expected the configure summary to say USE_MKLDNN ON, found {onednn}; "
                "remove the checkout's build folder and run again"
            )
        if not (match := _NINJA.search(line)):
            return
        if onednn is None:
            raise UserError(
                "expected a configure summary with USE_MKLDNN before the first object, "
                "found none; remove the checkout's build folder and run again"
            )
        now = time.monotonic()
        done, total = int(match[1]), int(match[2])
        if total != self.total:
            self.first, self.total, self.start = done, total, now
        if now - self.shown >= _PROGRESS_SECONDS:
            self.shown = now
            left = ""
            minutes = (now - self.start) / 60
            if done > self.first:
                rest = minutes / (done - self.first) * (total - done)
                left = f", {rest:.0f} min more at this pace"
            print(f"   {done} of {total}, {minutes:.0f} min{left}", flush=True)


@contextmanager
def _log(tree: Path) -> Iterator[tuple[TextIO, str]]:
    """The build's log, opened for one build at a time, and what it says already."""
    path = tree / LOG
    cache = tree / "build" / "CMakeCache.txt"
    if cache.exists() and not path.exists():
        raise UserError(
            f"expected a build folder in {tree} that this script made, or none, found "
            f"{cache}; move {cache.parent} away and run again"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"expected no other build in {tree}, found one running, and two would "
                "spoil each other; wait for it or end it"
            ) from None
        log.seek(0)
        # A summary without its build folder is of no use.
        yield log, log.read() if cache.exists() else ""


def build_wheel(
    tree: Path,
    python: Path,
    system: BuildSystem,
    env: dict[str, str],
    out: Path,
    tell: Callable[[str], None] = print,
) -> Path:
    """Build the checkout's wheel with its own backend, and give its path in ``out``.

    An interrupted build goes on where it was.  Raises ``UserError`` if it fails or if
    the configure summary does not say that oneDNN is on.
    """
    command = [str(python), "-m", "pip", "wheel", ".", "--no-deps", "--verbose"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    if system.backend == "scikit_build_core":
        # Its default is a temporary folder, from which nothing could be resumed.
        command.append("--config-settings=build-dir=build")
    out.mkdir(parents=True, exist_ok=True)
    with _log(tree) as (log, before), tempfile.TemporaryDirectory(dir=out) as aside:
        watch, start = _Watch(before), log.tell()
        process = subprocess.Popen(
            [*command, "--wheel-dir", aside],
            cwd=tree,
            env={**env, "TMPDIR": aside},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                watch.line(line)
            status = process.wait()
        finally:
            if process.poll() is None:
                # ninja ends its compilers and removes what they were writing. The end of
                # the output says that it did.
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        wheels = list(Path(aside).glob("*.whl"))
        if status or len(wheels) != 1 or "USE_MKLDNN" not in watch.summary:
            log.seek(start)
            failed = (
                s for s in log if re.search(r"(?i)error: |cmake error|FAILED: ", s)
            )
            said = " ".join(next(failed, "no error named").split())[:300]
            raise UserError(
                f"expected the build of {tree} to give a wheel, found exit code {status}, "
                f"{len(wheels)} wheels, {said}; see {tree / LOG} and run again"
            )
        target = out / wheels[0].name
        wheels[0].replace(target)
        mkl = watch.summary.get("USE_MKL", "OFF")
        without = ", without MKL: Inductor packs no float32 linears"
        tell(f"{target.name}, oneDNN on{without if mkl in _OFF else ', MKL on'}")
        return target
