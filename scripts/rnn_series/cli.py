"""The commands behind the shell scripts of this folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import environment, lint, port, series, submit, verify, wheel
from . import git as g
from . import source as checkout
from .console import Steps, UserError
from .pin import DEFAULT_PIN, load_pin, Pin, pin_names, ROOT


_WHEELS = ROOT / "build" / "wheels"
_DISK_BYTES = 3 << 30


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, prog=os.environ.get("RNN_SCRIPT", "scripts")
    )
    parser.add_argument(
        "--pin", default=DEFAULT_PIN, help="folder of patches/ (%(default)s)"
    )
    return parser


def _check_machine() -> None:
    for names, what in (
        (["git"], "git"),
        (["c++", "g++", "clang++"], "a C++ compiler"),
    ):
        if "c++" in names and os.environ.get("CXX"):
            names = shlex.split(os.environ["CXX"])[:1]
        if not any(shutil.which(n) for n in names):
            raise UserError(
                f"expected {what}, found none of {names} on PATH; install one"
            )
    free = shutil.disk_usage(ROOT).free
    if free < _DISK_BYTES:
        raise UserError(
            f"expected {_DISK_BYTES >> 30} GB of free disk at {ROOT}, found "
            f"{free / (1 << 30):.1f} GB; free some and run again"
        )


def _find_wheel(given: str | None, pin: Pin) -> Path:
    if given is None:
        return wheel.obtain(pin.version, _WHEELS)
    return _given_wheel(given)


def _given_wheel(given: str) -> Path:
    path = Path(given)
    if not path.is_file():
        raise UserError(f"expected a wheel at {path}, found no file; check --wheel")
    return path


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def _series_files(pin: Pin) -> list[Path]:
    files = [pin.folder / "pin.toml", pin.folder / "series"]
    for entry in series.load(pin):
        files.append(series.patch_path(pin, entry.slug))
        files += [p for p, name in entry.brought(pin) if name.startswith("torch/")]
    return files + sorted(Path(__file__).parent.glob("*.py"))


def _key(source: Path, pin: Pin) -> str:
    """Stands for everything that the packed wheel is made from."""
    parts = [_digest(source)]
    parts += [f"{p.relative_to(ROOT)} {_digest(p)}" for p in _series_files(pin)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _require_sound(pin: Pin) -> None:
    found = series.problems(pin)
    if found:
        raise UserError(
            f"expected a sound series in {pin.folder}, found: {'; '.join(found)}; mend that"
        )


def _apply(source: Path, pin: Pin) -> dict[str, bytes]:
    """The wheel's Python files with the series applied."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as aside:
        tree = Path(aside) / "tree"
        series.make_tree(tree, wheel.python_files(source), pin)
        names = g.git(tree, "ls-files", "torch").splitlines()
        return {name: (tree / name).read_bytes() for name in names}


def _changed(source: Path, files: dict[str, bytes]) -> dict[str, str]:
    """SHA-256 of each file that the series edits or adds."""
    old = wheel.python_files(source)
    return {
        name: hashlib.sha256(data).hexdigest()
        for name, data in files.items()
        if old.get(name) != data
    }


def _verify(python: Path, expected: dict) -> list[dict]:
    result = subprocess.run(
        # Isolated, so that the modules beside verify.py are not taken for others'.
        [str(python), "-I", str(Path(verify.__file__))],
        input=json.dumps(expected),
        capture_output=True,
        text=True,
        cwd=ROOT / "build",
    )
    found = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
    for row in found:
        if not row["holds"]:
            raise UserError(
                f"expected the check '{row['check']}' to hold, found {row['found']}; the "
                "build is not usable: remove build/venv and dist and run again"
            )
    if result.returncode or len(found) != len(verify.CHECKS):
        said = " ".join(result.stderr.split()[-40:])
        raise UserError(
            f"expected {len(verify.CHECKS)} checks to run, found {len(found)}: {said}; "
            "remove build/venv and run again"
        )
    return found


def build(argv: list[str]) -> int:
    parser = _parser(
        "Take the pinned PyTorch wheel, apply the patch series, pack dist/torch-*.whl, "
        "install it in a virtual environment and check it. A second run does only what "
        "is missing. With --source the series becomes commits in a checkout, and the "
        "wheel is built from it."
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--wheel", metavar="FILE", help="use this wheel of the pinned release"
    )
    start.add_argument(
        "--source",
        metavar="git[=URL]|DIR",
        help=f"clone {checkout.UPSTREAM}, or URL, in build/pytorch; or use the checkout DIR",
    )
    parser.add_argument(
        "--no-build", action="store_true", help="with --source, stop after the commits"
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="with --source, run the checkout's tests of recurrent layers in the end",
    )
    parser.add_argument(
        "--venv",
        metavar="DIR",
        help="(build/venv, for another pin than the default build/venv-PIN)",
    )
    args = parser.parse_args(argv)
    if (args.no_build or args.test) and not args.source:
        parser.error("--no-build and --test need --source")
    pin = load_pin(args.pin)
    usual = "venv" if pin.name == DEFAULT_PIN else f"venv-{pin.name}"
    venv = Path(args.venv or ROOT / "build" / usual).absolute()
    steps = Steps()
    (ROOT / "build").mkdir(exist_ok=True)
    with steps.step("check the machine and the series") as tell:
        _check_machine()
        _require_sound(pin)
        tell(f"{len(series.load(pin))} patches for PyTorch {pin.version}")
    if args.source:
        return _build_source(args, pin, venv, steps)
    with steps.step("find the pinned wheel") as tell:
        source = _find_wheel(args.wheel, pin)
        wheel.check_pin(source, pin)
        tell(f"{source.name}, commit {pin.commit[:12]}")
    key = _key(source, pin)
    target = ROOT / "dist" / wheel.packed_name(source, pin)
    summary_path = ROOT / "build" / f"{target.stem}.json"
    summary: dict = {}
    if target.is_file() and summary_path.is_file():
        summary = json.loads(summary_path.read_text())
    with steps.step("apply the series and pack the wheel") as tell:
        if summary.get("key") == key:
            tell(f"nothing to do, {target.name} is up to date")
        else:
            files = _apply(source, pin)
            wheel.pack(source, files, pin, target)
            summary = {
                "key": key,
                "version": target.name.split("-")[1],
                "commit": pin.commit,
                "files": _changed(source, files),
            }
            aside = summary_path.with_suffix(".part")
            aside.write_text(json.dumps(summary))
            aside.replace(summary_path)
            tell(f"{len(summary['files'])} files changed, dist/{target.name}")
    _install_and_verify(pin, venv, target, key, summary, steps)
    return 0


def _install_and_verify(
    pin: Pin, venv: Path, target: Path, key: str, expected: dict, steps: Steps
) -> None:
    with steps.step(f"install in {venv}") as tell:
        if environment.installed(venv) == key:
            tell("nothing to do, the wheel is installed")
        else:
            environment.install(venv, target, key)
            tell(target.name.split("-")[1])
    with steps.step("check the installation") as tell:
        found = _verify(environment.python_of(venv), expected)
        tell(f"{len(found)} checks hold")
    print("\napplied")
    for entry in series.load(pin):
        print(f"  {entry.slug}")
    print("verified")
    for row in found:
        print(f"  {row['check']}: {row['found']}")
    print(f"\n{steps.table()}\n\nnext: {environment.python_of(venv)} your_script.py")


def _build_source(args: argparse.Namespace, pin: Pin, venv: Path, steps: Steps) -> int:
    kind, _, url = args.source.partition("=")
    tree = ROOT / "build" / "pytorch" if kind == "git" else Path(args.source).resolve()
    if kind == "git":
        with steps.step(f"clone PyTorch {pin.version} to {tree}"):
            checkout.clone(tree, url or checkout.UPSTREAM, pin)
    with steps.step(f"make the commits of the series in {tree}") as tell:
        head, made = checkout.apply(tree, pin)
        branch = checkout.branch_name(pin)
        done = f"{len(series.load(pin))} commits on branch {branch}, at {head[:12]}"
        tell(done if made else f"nothing to do, {branch} holds the series")
    if args.no_build:
        print(f"\n{steps.table()}\n\nnext: the same command without --no-build")
        return 0
    python = environment.python_of(venv)
    with steps.step(f"prepare {venv} for the build") as tell:
        environment.prepare(venv)
        system = checkout.build_system(tree, python)
        environment.pip_install(venv, *system.requires)
        try:
            environment.pip_install(venv, *checkout.MKL)
            tell(f"{system.backend} and MKL")
        except UserError as e:
            tell(f"{system.backend}; without MKL, because {e}")
    version = wheel.local_version(f"{pin.version}+cpu", pin.build)
    env = checkout.build_environment(system, version, venv)
    with steps.step(f"build the wheel with {env['MAX_JOBS']} jobs") as tell:
        log = tree / checkout.LOG
        print(f"   the log is {log}", flush=True)
        target = checkout.build_wheel(tree, python, system, env, ROOT / "dist", tell)
    expected = {
        "version": version,
        "commit": head,
        "files": checkout.changed_files(tree, pin),
    }
    _install_and_verify(pin, venv, target, _digest(target), expected, steps)
    if args.test:
        with steps.step("run the tests in the checkout") as tell:
            environment.pip_install(venv, *checkout.TEST_TOOLS)
            tell(f"{checkout.run_tests(tree, pin, python)} files pass")
    return 0


def _state(tree: Path) -> tuple[str, str]:
    """The last commit of a work tree and its uncommitted changes."""
    return (
        g.git(tree, "rev-parse", "HEAD").strip(),
        g.git(tree, "status", "--porcelain").strip(),
    )


def worktree(argv: list[str]) -> int:
    parser = _parser(
        "Make a git work tree of the pinned wheel's Python files with each patch of the "
        "series as a commit. Edit and commit there, then run scripts/export_patches.sh."
    )
    parser.add_argument(
        "--wheel", metavar="FILE", help="use this wheel of the pinned release"
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default=str(ROOT / "build" / "worktree"),
        help="(%(default)s)",
    )
    args = parser.parse_args(argv)
    pin = load_pin(args.pin)
    tree = Path(args.folder).absolute()
    source = _find_wheel(args.wheel, pin)
    wheel.check_pin(source, pin)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as temporary:
        aside = Path(temporary) / "tree"
        head = series.make_tree(aside, wheel.python_files(source), pin)
        if tree.exists() and (not tree.is_dir() or any(tree.iterdir())):
            if (tree / ".git").exists() and _state(tree) == (head, ""):
                print(f"{tree}: nothing to do, the series is applied, at {head}")
                return 0
            raise UserError(
                f"expected {tree} to be absent or to hold the series as it is, found "
                "something else, which stays; export its commits and remove it, or name "
                "another folder"
            )
        if tree.exists():
            tree.rmdir()
        series.note_origin(aside, pin)
        aside.replace(tree)
    print(
        f"{tree}: PyTorch {pin.version}, {len(series.load(pin))} commits on top, at {head}"
    )
    return 0


def export(argv: list[str]) -> int:
    parser = _parser(
        "Turn the commits of a work tree back into patches/ and torch_overlay/."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default=str(ROOT / "build" / "worktree"),
        help="(%(default)s)",
    )
    args = parser.parse_args(argv)
    pin = load_pin(args.pin)
    tree = Path(args.folder).absolute()
    if not (tree / ".git").exists():
        raise UserError(
            f"expected a work tree at {tree}, found none; make one with scripts/worktree.sh"
        )
    entries, changed = series.export_in_place(tree, pin)
    print(f"{len(entries)} patches, {len(changed)} files changed")
    for name in changed:
        print(f"  {name}")
    return 0


def check(argv: list[str]) -> int:
    """Check the series: its files, that it applies, reproducibly, and exports exactly."""
    parser = _parser(
        "Check the patch series of every pin, or of --pin, against its wheel's Python "
        "files."
    )
    parser.set_defaults(pin=None)
    parser.add_argument(
        "--wheel", metavar="FILE", help="use this wheel of the pinned release"
    )
    args = parser.parse_args(argv)
    if args.wheel and not args.pin:
        args.pin = DEFAULT_PIN
    for name in [args.pin] if args.pin else pin_names():
        print(f"pin {name}", flush=True)
        _check_pin(load_pin(name), args.wheel)
    return 0


def _check_pin(pin: Pin, given: str | None) -> None:
    steps = Steps()
    with steps.step("files and headers of the series"):
        _require_sound(pin)
    with steps.step("find the pinned wheel") as tell:
        if given or pin.name == DEFAULT_PIN:
            source = _find_wheel(given, pin)
        else:
            source = wheel.obtain_python(pin.version, _WHEELS)
        wheel.check_pin(source, pin)
        tell(str(source))
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        aside = Path(temporary)
        files = wheel.python_files(source)
        with steps.step("apply the series, twice"):
            heads = {
                series.make_tree(aside / name, files, pin) for name in ("one", "two")
            }
            if len(heads) != 1:
                raise UserError(
                    f"expected the same commits each time, found {sorted(heads)}; "
                    "find what differs between two runs of scripts/worktree.sh"
                )
        with steps.step("export what was applied") as tell:
            out = aside / "out"
            patches = out / pin.folder.relative_to(ROOT)
            patches.mkdir(parents=True)
            series.export(aside / "one", pin, patches, out / "torch_overlay", out)
            written = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
            for name in written:
                if (out / name).read_bytes() != (ROOT / name).read_bytes():
                    raise UserError(
                        f"expected {name} as export writes it, found other bytes; run "
                        f"scripts/worktree.sh and scripts/export_patches.sh, both with "
                        f"--pin {pin.name}"
                    )
            tell(f"{len(written)} files equal, byte for byte")


def try_pin(argv: list[str]) -> int:
    parser = _parser(
        "Try the series on another release: report for each patch whether it applies, is "
        "already upstream, or conflicts and where. Exits with 2 if any conflicts."
    )
    release = parser.add_mutually_exclusive_group(required=True)
    release.add_argument("--wheel", metavar="FILE", help="a wheel of the release")
    release.add_argument("--version", metavar="VERSION", help="the release, by pip")
    parser.add_argument(
        "folder",
        nargs="?",
        help="where the work tree goes, absent so far (build/try-VERSION)",
    )
    args = parser.parse_args(argv)
    pin = load_pin(args.pin)
    _require_sound(pin)
    if args.wheel:
        new = _given_wheel(args.wheel)
    else:
        new = wheel.obtain_python(args.version, _WHEELS)
    version, commit = wheel.release(new)
    tree = Path(args.folder or ROOT / "build" / f"try-{version}").absolute()
    if tree.exists():
        raise UserError(
            f"expected {tree} to be absent, found it; remove it or name another folder"
        )
    old = wheel.obtain_python(pin.version, _WHEELS)
    wheel.check_pin(old, pin)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as temporary:
        aside = Path(temporary) / "tree"
        outcomes = port.try_series(
            aside, wheel.python_files(old), wheel.python_files(new), pin, version
        )
        aside.replace(tree)
    print(f"the series of {pin.name} on PyTorch {version}, commit {commit}")
    for outcome in outcomes:
        print(f"  {outcome.slug:<24} {outcome.result}")
        for place in outcome.where:
            print(f"      {place}")
    print(f"{tree} has what applies; CONTRIBUTING.md tells how to go on")
    return 2 if any(o.result == port.CONFLICTS for o in outcomes) else 0


COMMANDS = {
    "build": build,
    "worktree": worktree,
    "export": export,
    "check": check,
    "lint": lint.main,
    "submit": submit.main,
    "try_pin": try_pin,
}


def main(argv: list[str]) -> int:
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    from .console import run_main

    run_main(main)
