"""The linters of .lintrunner.toml: each prints lintrunner's messages, a line of JSON each."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import git as g
from . import series, wheel
from .console import UserError
from .pin import DEFAULT_PIN, load_pin, Pin, pin_names, ROOT


CACHE = ROOT / "build" / "lint"
# As upstream's mypy.ini, and strict about definitions without types.  What is wrong in
# upstream's own files is not reported.
_OVERLAY_MYPY = """[mypy]
python_version = 3.10
allow_redefinition = true
check_untyped_defs = true
disallow_untyped_decorators = true
disallow_untyped_defs = true
enable_error_code = possibly-undefined
follow_imports = silent
ignore_missing_imports = true
local_partial_types = true
warn_redundant_casts = true
"""


@dataclass
class Message:
    """The fields that lintrunner reads; with ``replacement`` it can mend the file."""

    path: str | None
    description: str
    name: str
    line: int | None = None
    char: int | None = None
    original: str | None = None
    replacement: str | None = None
    severity: str = "error"


def _tool(name: str, *args: str, stdin: str | None = None, cwd: Path = ROOT) -> str:
    """Standard output of a tool of ``build/ci``, whose exit code tells what it found."""
    path = ROOT / "build" / "ci" / "bin" / name
    if not path.exists():
        raise UserError(f"expected {path}, found none; run `scripts/lint.sh init`")
    result = subprocess.run(
        [str(path), *args], cwd=cwd, input=stdin, capture_output=True, text=True
    )
    if result.returncode not in (0, 1):
        said = " ".join((result.stderr or result.stdout).split()[:60])
        raise UserError(f"expected {name} to run, found: {said}; mend that")
    return result.stdout


def _pins() -> list[Pin]:
    return [load_pin(name) for name in pin_names()]


def _source(pin: Pin) -> Path:
    path = wheel.obtain(pin.version, ROOT / "build" / "wheels")
    wheel.check_pin(path, pin)
    return path


def patch_series(paths: list[Path]) -> Iterator[Message]:
    for pin in _pins():
        for problem in series.file_problems(pin):
            yield Message(str(pin.folder / "series"), problem, "series")


def patch_header(paths: list[Path]) -> Iterator[Message]:
    for path in paths:
        for problem in series.header_problems(path.read_text()):
            yield Message(str(path), problem, "header")


def patch_format(paths: list[Path]) -> Iterator[Message]:
    """Only the default pin: scripts/check_series.sh does this for any."""
    pin = load_pin(DEFAULT_PIN)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        tree, out = Path(temporary) / "tree", Path(temporary) / "out"
        patches = out / pin.folder.relative_to(ROOT)
        patches.mkdir(parents=True)
        series.make_tree(tree, wheel.python_files(_source(pin)), pin)
        series.export(tree, pin, patches, out / "torch_overlay", out)
        for exported in sorted(p for p in out.rglob("*") if p.is_file()):
            path = ROOT / exported.relative_to(out)
            original = path.read_text() if path.is_file() else ""
            replacement = exported.read_text()
            if original != replacement:
                yield Message(
                    str(path),
                    "expected the file as export writes it; run `lintrunner -a`",
                    "format",
                    original=original,
                    replacement=replacement,
                )


def ruff(paths: list[Path]) -> Iterator[Message]:
    names = [str(p) for p in paths]
    mendable = set()
    found = json.loads(
        _tool("ruff", "check", "--force-exclude", "--output-format=json", *names)
    )
    for row in found:
        if (row["fix"] or {}).get("applicability") == "safe":
            mendable.add(row["filename"])
        else:
            at = row["location"]
            text = f"{row['message']} ({row['code']})"
            yield Message(
                row["filename"], text, row["code"] or "syntax", at["row"], at["column"]
            )
    unformatted = _tool("ruff", "format", "--force-exclude", "--check", *names)
    for line in unformatted.splitlines():
        if line.startswith("Would reformat: "):
            mendable.add(str(ROOT / line.removeprefix("Would reformat: ")))
    for name in sorted(mendable):
        original = Path(name).read_text()
        here = ("--stdin-filename", name, "-")
        fixed = _tool("ruff", "check", "--fix-only", "--quiet", *here, stdin=original)
        yield Message(
            name,
            "expected the file as ruff writes it; run `lintrunner -a`",
            "format",
            original=original,
            replacement=_tool("ruff", "format", "--quiet", *here, stdin=fixed),
        )


def _mypy(*args: str, cwd: Path = ROOT) -> Iterator[Message]:
    """Errors that mypy finds in ``cwd``."""
    for line in _tool("mypy", "--output=json", *args, cwd=cwd).splitlines():
        if line[:1] == "{" and (row := json.loads(line))["severity"] == "error":
            yield Message(
                str(cwd / row["file"]),
                f"{row['message']} [{row['code']}]",
                row["code"] or "mypy",
                row["line"],
                row["column"],
            )


def _patched_torch(pin: Pin) -> Path:
    """The patched PyTorch's Python files and type stubs, kept for mypy's cache."""
    tree = CACHE / pin.name
    source = _source(pin)
    files = wheel.python_files(source)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        aside = Path(temporary) / "tree"
        series.make_tree(aside, files, pin)
        names = g.git(aside, "ls-files", "torch").splitlines()
        files = {name: (aside / name).read_bytes() for name in names}
    files |= wheel.python_files(source, ".pyi")
    for path in sorted(tree.rglob("*.py*")):
        if path.relative_to(tree).as_posix() not in files:
            path.unlink()
    for name, data in files.items():
        path = tree / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return tree


def mypy(paths: list[Path]) -> Iterator[Message]:
    CACHE.mkdir(parents=True, exist_ok=True)
    yield from _mypy("--cache-dir", str(CACHE / "mypy-scripts"))
    pin = load_pin(DEFAULT_PIN)
    tree = _patched_torch(pin)
    config = CACHE / "mypy.ini"
    config.write_text(_OVERLAY_MYPY)
    names = [p for e in series.load(pin) for p in e.overlay if p.endswith(".py")]
    options = ("--config-file", str(config), "--cache-dir", str(CACHE / "mypy-torch"))
    for message in _mypy(*options, *names, cwd=tree):
        name = Path(message.path or "").relative_to(tree).as_posix()
        if name in names:
            message.path = str(series.OVERLAY / name)
            yield message


def shellcheck(paths: list[Path]) -> Iterator[Message]:
    for row in json.loads(
        _tool("shellcheck", "-x", "--format=json", *(str(p) for p in paths))
    ):
        name = f"SC{row['code']}"
        text = f"{row['message']} ({name})"
        yield Message(str(ROOT / row["file"]), text, name, row["line"], row["column"])


LINTERS: dict[str, Callable[[list[Path]], Iterator[Message]]] = {
    "PATCHSERIES": patch_series,
    "PATCHHEADER": patch_header,
    "PATCHFORMAT": patch_format,
    "RUFF": ruff,
    "MYPY": mypy,
    "SHELLCHECK": shellcheck,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/lint.sh",
        description="Run one linter for lintrunner, or fetch what the linters need.",
        fromfile_prefix_chars="@",
    )
    parser.add_argument("linter", choices=["init", *LINTERS])
    parser.add_argument("paths", nargs="*", type=Path)
    args = parser.parse_args(argv)
    if args.linter == "init":
        _source(load_pin(DEFAULT_PIN))
        return 0
    try:
        for message in LINTERS[args.linter](args.paths):
            print(json.dumps({"code": args.linter, **asdict(message)}), flush=True)
    except UserError as e:
        failed = Message(None, str(e), "failed")
        print(json.dumps({"code": args.linter, **asdict(failed)}))
    return 0
