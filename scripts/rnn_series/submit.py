"""Send the series upstream: replayed on the current main, one pull request a patch."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import git as g
from . import series, source
from .console import Steps, UserError
from .pin import DEFAULT_PIN, load_pin, Pin, ROOT


TOOLS = ROOT / "build" / "ci" / "bin"


def _records_path(pin: Pin) -> Path:
    return pin.folder / "pull_requests"


def load_records(pin: Pin) -> dict[str, list[str]]:
    """ghstack's trailers for each patch that was sent, by slug."""
    path = _records_path(pin)
    records: dict[str, list[str]] = {}
    slug = ""
    for line in path.read_text().splitlines() if path.is_file() else []:
        if not line.startswith(" "):
            slug = line.split("#")[0].strip()
        elif slug and series.TRAILERS.fullmatch(line.strip()):
            records.setdefault(slug, []).append(line.strip())
        else:
            raise UserError(
                f"expected a slug, or a trailer of ghstack indented below one, found "
                f"{line!r} in {path}; restore the file"
            )
    return records


def _save_records(pin: Pin, records: dict[str, list[str]]) -> None:
    lines = ["# The pull request of each patch, written by scripts/submit_stack.sh."]
    for slug, trailers in records.items():
        lines += [slug, *(f"    {t}" for t in trailers)]
    path = _records_path(pin)
    aside = path.with_suffix(".part")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(path)


def _fetch(checkout: Path, remote: str, branch: str) -> str:
    """The commit that the remote's branch is at now; fetched as the user's git does."""
    ref = f"refs/remotes/{remote}/{branch}"
    result = subprocess.run(
        ["git", "fetch", "--quiet", remote, f"+refs/heads/{branch}:{ref}"],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        said = " ".join(result.stderr.split())
        raise UserError(
            f"expected to fetch {branch} of {remote} in {checkout}, found: {said}; mend "
            "that, or give --remote"
        )
    return g.git(checkout, "rev-parse", ref).strip()


def _check_base(checkout: Path, tip: str, main: str) -> None:
    result = g.run(checkout, "merge-base", "--is-ancestor", tip, "HEAD")
    if result.returncode:
        head = g.git(checkout, "rev-parse", "--short", "HEAD").strip()
        behind = g.git(checkout, "rev-list", "--count", f"HEAD..{tip}").strip()
        raise UserError(
            f"expected {checkout} on {main} at {tip[:12]}, found {head}, which lacks "
            f"{behind} of its commits; run `git -C {checkout} checkout {main}`"
        )


@contextlib.contextmanager
def _replayed(checkout: Path, tip: str, pin: Pin) -> Iterator[Path]:
    """A temporary work tree of the checkout with the series on ``tip``.

    Each commit has the trailers by which ghstack finds its pull request again.
    """
    records = load_records(pin)
    with source.beside(checkout, tip) as tree:
        for entry in series.load(pin):
            series.apply_entry(tree, pin, entry)
            if trailers := records.get(entry.slug):
                message = g.git(tree, "log", "-1", "--format=%B").rstrip()
                g.git(
                    tree,
                    *("commit", "--quiet", "--amend", "--allow-empty"),
                    *("--cleanup=verbatim", "-F", "-"),
                    stdin="\n".join([message, "", *trailers, ""]).encode(),
                )
        yield tree


def _commits(tree: Path, tip: str) -> list[str]:
    return g.git(tree, "rev-list", "--reverse", f"{tip}..HEAD").split()


def _subjects(tree: Path, tip: str) -> list[str]:
    span = f"{tip}..HEAD"
    return g.git(tree, "log", "--reverse", "--format=%s", span).splitlines()


def _check_commits(checkout: Path, tree: Path, tip: str, pin: Pin) -> None:
    """What is sent is exactly the series, and so is what the checkout has on main."""
    wanted, made = len(series.load(pin)), len(_commits(tree, tip))
    if made != wanted:
        raise UserError(
            f"expected {wanted} commits, one for each patch, found {made}; mend the series"
        )
    mine = _subjects(checkout, tip)
    if not mine:
        return
    trees = [g.git(t, "rev-parse", "HEAD^{tree}") for t in (checkout, tree)]
    if mine != _subjects(tree, tip) or trees[0] != trees[1]:
        raise UserError(
            f"expected {checkout} to have no commits on main, or the {wanted} of the series "
            f"as in {pin.folder}, found {len(mine)} that differ; export them, or check out "
            "main there"
        )


def _lint() -> None:
    program = TOOLS / "lintrunner"
    if not program.exists():
        raise UserError(f"expected {program}, found none; run scripts/lint.sh init")
    result = subprocess.run(
        [str(program), "--all-files", "--output=oneline"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        said = " ".join((result.stdout or result.stderr).split())[:300]
        raise UserError(
            f"expected no lint, found: {said}; run {program} --all-files and mend it"
        )


def _send(tree: Path) -> None:
    program = os.environ.get("GHSTACK", str(TOOLS / "ghstack"))
    try:
        result = subprocess.run([program, "submit"], cwd=tree)
    except FileNotFoundError as e:
        raise UserError(
            f"expected ghstack at {program}, found none; run scripts/lint.sh init"
        ) from e
    if result.returncode:
        raise UserError(
            f"expected `ghstack submit` to succeed, found exit code {result.returncode}; "
            "see its words above, close what it may have opened, and run again"
        )


def _record(tree: Path, tip: str, pin: Pin) -> dict[str, list[str]]:
    """Keep the trailers that ghstack wrote into the commits."""
    entries, commits = series.load(pin), _commits(tree, tip)
    records = {}
    for entry, commit in zip(entries, commits):
        message = g.git(tree, "log", "-1", "--format=%B", commit)
        records[entry.slug] = series.TRAILERS.findall(message)
    lacking = [slug for slug, found in records.items() if not _link(found)]
    if len(commits) != len(entries) or lacking:
        raise UserError(
            f"expected a pull request for each patch, found none for {lacking or commits}; "
            "see what ghstack printed above"
        )
    _save_records(pin, records)
    return records


def _link(trailers: list[str]) -> str:
    links = [t.split(": ", 1)[1] for t in trailers if t.startswith("Pull-Request: ")]
    return links[0] if links else ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=os.environ.get("RNN_SCRIPT", "submit_stack.sh"),
        description="Replay the series on the current main of PyTorch and show what "
        "would be sent; with --yes, send it by ghstack, one pull request a patch.",
    )
    parser.add_argument(
        "--pin", default=DEFAULT_PIN, help="folder of patches/ (%(default)s)"
    )
    parser.add_argument(
        "--checkout", required=True, metavar="DIR", help="a git checkout of PyTorch"
    )
    parser.add_argument("--remote", default="origin", help="(%(default)s)")
    parser.add_argument("--branch", default="main", help="(%(default)s)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run", action="store_true", help="send nothing; this is the default"
    )
    mode.add_argument("--yes", action="store_true", help="send it")
    args = parser.parse_args(argv)
    pin = load_pin(args.pin)
    checkout = Path(args.checkout).absolute()
    main_name = f"{args.remote}/{args.branch}"
    steps = Steps()
    with steps.step(f"check {checkout}"):
        source.check(checkout)
    with steps.step(f"fetch {main_name}") as tell:
        tip = _fetch(checkout, args.remote, args.branch)
        _check_base(checkout, tip, main_name)
        tell(tip)
    with steps.step("lint"):
        _lint()
    with contextlib.ExitStack() as stack:
        with steps.step(f"replay the series on {main_name}") as tell:
            tree = stack.enter_context(_replayed(checkout, tip, pin))
            _check_commits(checkout, tree, tip, pin)
            subjects = _subjects(tree, tip)
            tell(f"{len(subjects)} commits")
        records = load_records(pin)
        print(f"\n{'sending' if args.yes else 'would send'} to {main_name}")
        for entry, subject in zip(series.load(pin), subjects):
            print(f"  {subject}")
            print(f"      {_link(records.get(entry.slug, [])) or 'a new pull request'}")
        if not args.yes:
            print("\nnothing was sent; --yes sends it")
            return 0
        with steps.step("ghstack submit"):
            _send(tree)
        records = _record(tree, tip, pin)
    print(f"\nsent; {_records_path(pin).relative_to(ROOT)} has the pull requests")
    for slug, trailers in records.items():
        print(f"  {slug}: {_link(trailers)}")
    return 0
