"""The series of one pin tried on another release, by a three-way merge of each patch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from . import git as g
from . import series
from .pin import Pin


OLD_BASE, OLD_SERIES = "old-base", "old-series"
APPLIES, UPSTREAM, CONFLICTS = "applies", "already upstream", "conflicts"


@dataclass
class Outcome:
    """How a patch fared, and where it conflicts: ``FILE:LINE`` or what git said."""

    slug: str
    result: str
    where: list[str]


def _replace_files(tree: Path, files: dict[str, bytes], message: str) -> None:
    """A commit without a parent that has ``files`` and nothing else, checked out."""
    g.git(tree, "checkout", "--quiet", "--orphan", "main")
    g.git(tree, "rm", "-r", "--quiet", "--force", ".")
    for name, data in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    g.git(tree, "-c", "core.fsync=none", "add", "--force", "--all")
    g.git(tree, "commit", "--quiet", "-m", message)


def _conflicts(tree: Path, said: str) -> list[str]:
    where = []
    names = g.git(tree, "diff", "--name-only", "--diff-filter=U").splitlines()
    for name in names:
        path = tree / name
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        marked = [i for i, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")]
        where += [f"{name}:{i}" for i in marked]
        if not marked:
            match = re.search(rf"^CONFLICT .*{re.escape(name)}.*$", said, re.MULTILINE)
            where.append(match[0] if match else name)
    return where


def try_series(
    tree: Path, old: dict[str, bytes], new: dict[str, bytes], pin: Pin, version: str
) -> list[Outcome]:
    """Make ``tree`` with the Python files ``new`` and what applies of the series of ``pin``.

    ``old`` are the files that the series was made for.  A patch that conflicts is left
    out, and the next one tried.  The tags old-base and old-series hold the series as it
    was; the tag rnn-base is the new release.
    """
    series.make_tree(tree, old, pin)
    g.git(tree, "tag", OLD_BASE, series.BASE_TAG)
    g.git(tree, "tag", OLD_SERIES)
    g.git(tree, "branch", "--quiet", "--move", "old")
    _replace_files(tree, new, f"PyTorch {version}, Python files")
    g.git(tree, "tag", "--force", series.BASE_TAG)
    commits = g.git(tree, "rev-list", "--reverse", f"{OLD_BASE}..{OLD_SERIES}").split()
    outcomes = []
    for entry, commit in zip(series.load(pin), commits, strict=True):
        picked = g.run(tree, "cherry-pick", "--allow-empty", commit)
        if picked.returncode == 0:
            outcomes.append(Outcome(entry.slug, APPLIES, []))
            continue
        said = (picked.stdout + picked.stderr).decode(errors="replace")
        where = _conflicts(tree, said)
        g.git(tree, "cherry-pick", "--skip")
        result = CONFLICTS if where else UPSTREAM
        outcomes.append(Outcome(entry.slug, result, where))
    return outcomes
