"""The series: its files on disk, applied as commits, and exported from commits again.

``patches/PIN/series`` lists the patches in order.  An indented line below a patch names
a file that is new in PyTorch and that the patch brings: ``overlay torch/...`` from
``torch_overlay/``, or ``test test/inductor/...`` from ``test/``.  A patch and the files
that it brings are one commit.

Pins share these files.  One that must differ for a pin is in ``patches/PIN/overlay/``, laid
out as in PyTorch's tree, and takes the place of the shared one there.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from . import git as g
from .console import UserError
from .pin import DEFAULT_PIN, Pin, ROOT


OVERLAY = ROOT / "torch_overlay"
# A test whose name upstream has already goes in under another one.
RENAMED_TESTS = {
    "test/inductor/test_mkldnn_pattern_matcher.py": (
        "test/inductor/test_mkldnn_pattern_matcher_rnn.py"
    )
}
_ORIGINAL_TESTS = {new: old for old, new in RENAMED_TESTS.items()}
BASE_TAG = "rnn-base"
# What ghstack writes into the message of a commit that it has sent.
TRAILERS = re.compile(
    r"^(?:ghstack-[\w-]+|Pull-Request|Pull Request resolved): .+$", re.MULTILINE
)


@dataclass
class Entry:
    slug: str
    overlay: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)

    def brought(self, pin: Pin) -> list[tuple[Path, str]]:
        """Each file that the entry brings: where it is, and its path in PyTorch."""
        own = own_overlay(pin)
        return [
            (own / p if (own / p).is_file() else shared(p), RENAMED_TESTS.get(p, p))
            for p in self.overlay + self.tests
        ]


def own_overlay(pin: Pin) -> Path:
    """The folder of the files that are other for this pin."""
    return pin.folder / "overlay"


def shared(name: str) -> Path:
    """Where a file that pins share is in this repository."""
    return ROOT / name if name.startswith("test/") else OVERLAY / name


def load(pin: Pin) -> list[Entry]:
    path = pin.folder / "series"
    entries: list[Entry] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if not line[0].isspace() and len(words) == 1:
            entries.append(Entry(words[0]))
        elif entries and len(words) == 2 and words[0] == "overlay":
            entries[-1].overlay.append(words[1])
        elif entries and len(words) == 2 and words[0] == "test":
            entries[-1].tests.append(words[1])
        else:
            raise UserError(
                f"expected a slug, or 'overlay PATH' or 'test PATH' indented below one, "
                f"found {line!r} at {path}:{number}; mend the line"
            )
    return entries


def dump(entries: list[Entry]) -> str:
    lines = [
        "# The patches in order. Below each: the files new in PyTorch that it brings.",
    ]
    for e in entries:
        lines.append(e.slug)
        lines += [f"    overlay {p}" for p in sorted(e.overlay)]
        lines += [f"    test {p}" for p in sorted(e.tests)]
    return "\n".join(lines) + "\n"


def patch_path(pin: Pin, slug: str) -> Path:
    return pin.folder / f"{slug}.patch"


def problems(pin: Pin) -> list[str]:
    """Everything that is wrong with the files of a series, a line each."""
    found = file_problems(pin)
    for path in sorted(pin.folder.glob("*.patch")):
        found += [f"{path.name}: {p}" for p in header_problems(path.read_text())]
    return found


def file_problems(pin: Pin) -> list[str]:
    """Patches, overlay files and tests that are not listed exactly once, or not there."""
    entries = load(pin)
    found: list[str] = []
    slugs = [e.slug for e in entries]
    on_disk = {p.stem for p in pin.folder.glob("*.patch")}
    claimed = [p for e in entries for p in e.overlay]
    claimed_tests = [p for e in entries for p in e.tests]
    own = _names_below(own_overlay(pin))
    tests = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "test/inductor").glob("*.py")
    }
    overlay = _names_below(OVERLAY)
    if pin.name != DEFAULT_PIN:
        # A later release may have some of the shared files already.
        overlay &= {*claimed}
        tests &= {*claimed_tests}
    overlay |= {p for p in own if not p.startswith("test/")}
    tests |= {p for p in own if p.startswith("test/")}
    for what, listed, present in (
        ("patch", slugs, on_disk),
        ("overlay file", claimed, overlay),
        ("test", claimed_tests, tests),
    ):
        found += [
            f"{what} {x} is listed twice" for x in {*listed} if listed.count(x) > 1
        ]
        found += [f"{what} {x} is listed, and not there" for x in {*listed} - present]
        found += [f"{what} {x} is there, and not listed" for x in present - {*listed}]
    return sorted(found)


def _names_below(folder: Path) -> set[str]:
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return {name for name in names if "__pycache__" not in name}


def header_problems(text: str) -> list[str]:
    head, separator, _ = text.partition("\n---\n")
    fields, _, body = head.partition("\n\n")
    subject = re.search(r"^Subject: (.*)$", fields, re.MULTILINE)
    found = []
    if not separator:
        found.append("expected a line '---' between message and diff")
    if not subject or not re.match(r"(\[[\w.-]+\])+ \S", subject[1]):
        found.append("expected a subject such as '[inductor][cpu] title'")
    if not re.search(r"^From: .+ <.+>$", fields, re.MULTILINE):
        found.append("expected a From line with name and address")
    if not re.search(r"^Date: .+$", fields, re.MULTILINE):
        found.append("expected a Date line")
    if "Test plan:" not in body:
        found.append("expected a paragraph 'Test plan:' in the message")
    if not re.search(r"pytorch/pytorch#\d+", body):
        found.append("expected an upstream reference pytorch/pytorch#N in the message")
    return found + message_problems(body)


def message_problems(body: str) -> list[str]:
    bad = {
        r"^diff --git ": "a line that git takes for the start of the diff",
        r"^---": "a line that ends the message in a patch",
        r"^cc\b|(?<![\w.])@\w": "a 'cc' line or a mention",
        rf"{TRAILERS.pattern}|^Differential Revision:": "a trailer of another tool",
        r"[^\x00-\x7f]": "a character beyond ASCII",
    }
    return [
        f"expected none in the message: {why}"
        for pattern, why in bad.items()
        if re.search(pattern, body, re.MULTILINE | re.IGNORECASE)
    ]


def without_trailers(message: str) -> str:
    """A message without what ghstack wrote into it."""
    return re.sub(r"\n{3,}", "\n\n", TRAILERS.sub("", message)).rstrip()


def make_tree(tree: Path, files: dict[str, bytes], pin: Pin) -> str:
    """Make a repository: ``files`` as the root commit, each entry as one commit on top.

    The same input gives the same commit hashes.  Returns the hash of the last commit.
    """
    tree.mkdir(parents=True)
    g.git(tree, "init", "--quiet", "--initial-branch=main")
    exclude = tree / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("__pycache__/\n")
    for name, data in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    # Thousands of objects that can be made anew: do not wait for the disk after each.
    g.git(tree, "-c", "core.fsync=none", "add", "--force", "--all")
    g.git(tree, "commit", "--quiet", "-m", f"PyTorch {pin.version}, Python files")
    g.git(tree, "tag", BASE_TAG)
    for entry in load(pin):
        apply_entry(tree, pin, entry)
    return g.git(tree, "rev-parse", "HEAD").strip()


def apply_entry(tree: Path, pin: Pin, entry: Entry) -> None:
    path = patch_path(pin, entry.slug)
    result = g.run(
        tree,
        *("am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date"),
        *("--keep-cr", "--empty=keep", str(path)),
    )
    if result.returncode:
        text = (result.stderr + result.stdout).decode(errors="replace")
        g.run(tree, "am", "--abort")
        failed = re.search(r"patch failed: (.+):(\d+)", text)
        missing = re.search(r"error: (.+): does not exist in index", text)
        if failed:
            where = f"the hunk at line {failed[2]} of {failed[1]} does not apply"
        elif missing:
            where = f"the file {missing[1]} does not exist"
        else:
            where = " ".join(text.split())[:300]
        raise UserError(
            f"expected {path.name} to apply to PyTorch {pin.version}, found that {where}; "
            "mend the patch in a work tree (scripts/worktree.sh) and export it"
        )
    names = []
    for source, name in entry.brought(pin):
        target = tree / name
        if target.exists():
            raise UserError(
                f"expected {name} to be new in PyTorch {pin.version}, found it there; "
                f"make it an edit in {path.name} instead"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        names.append(name)
    if names:
        g.git(tree, "add", "--force", "--", *names)
        date = g.git(tree, "log", "-1", "--format=%aI").strip()
        g.git(
            tree,
            *("commit", "--quiet", "--amend", "--no-edit", "--allow-empty"),
            env={"GIT_COMMITTER_DATE": date},
        )


def _slug(subject: str, known: dict[str, str]) -> str:
    """The slug of a patch: kept by subject, else made from it."""
    if subject in known:
        return known[subject]
    title = re.sub(r"^(\[[^]]*\])+", "", subject).lower()
    return "-".join(re.findall(r"[a-z0-9]+", title)[:6])


def _subject(pin: Pin, slug: str) -> str:
    match = re.search(
        r"^Subject: (.*)$", patch_path(pin, slug).read_text(), re.MULTILINE
    )
    return match[1] if match else ""


def export(
    tree: Path, pin: Pin, patches: Path, overlay: Path, root: Path
) -> list[Entry]:
    """Write the commits of ``tree`` above its base as patches, overlay files and tests.

    A file that differs from the one that pins share is written as the pin's own, unless
    the pin is the default one, whose files are the shared ones.
    """
    if g.git(tree, "status", "--porcelain").strip():
        raise UserError(
            f"expected a clean work tree, found changes in {tree}; commit them"
        )
    known = {
        _subject(pin, e.slug): e.slug
        for e in load(pin)
        if patch_path(pin, e.slug).is_file()
    }
    tagged = g.run(tree, "rev-parse", "--quiet", "--verify", BASE_TAG).returncode == 0
    # A checkout of PyTorch has no tag of ours.
    base = BASE_TAG if tagged else pin.commit
    base_files = set(g.git(tree, "ls-tree", "-r", "--name-only", base).splitlines())
    owner: dict[str, str] = {}
    entries: list[Entry] = []
    span = f"{base}..HEAD"
    if merges := g.git(tree, "rev-list", "--merges", span).split():
        raise UserError(
            f"expected a straight line of commits, found the merge {merges[0]}; rebase it "
            "away and export again"
        )
    for commit in g.git(tree, "rev-list", "--reverse", span).split():
        subject, body = g.git(tree, "log", "-1", "--format=%s%x00%b", commit).split(
            "\0"
        )
        body = without_trailers(body)
        entry = Entry(_slug(subject, known))
        if entry.slug in {e.slug for e in entries}:
            raise UserError(
                f"expected a title of its own for each commit, found two that become "
                f"{entry.slug}.patch; amend {subject!r} and export again"
            )
        for problem in message_problems(body):
            raise UserError(
                f"{problem} of {subject!r}; amend the commit and export again"
            )
        edited = []
        for name in g.git(
            tree, "diff", "--name-only", "--no-renames", f"{commit}^", commit
        ).splitlines():
            if name in base_files:
                edited.append(name)
                continue
            if name in owner:
                raise UserError(
                    f"expected each new file in one commit, found {name} in {owner[name]!r} "
                    f"and {subject!r}; fold the change into the first"
                )
            owner[name] = subject
            data = g.run(tree, "show", f"{commit}:{name}").stdout
            name = _ORIGINAL_TESTS.get(name, name)
            is_test = name.startswith("test/")
            (entry.tests if is_test else entry.overlay).append(name)
            target = (root if is_test else overlay) / name
            if pin.name != DEFAULT_PIN and not _is(shared(name), data):
                target = patches / own_overlay(pin).name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        header = g.git(
            tree,
            "log",
            "-1",
            "--format=From: %an <%ae>%nDate: %aD%nSubject: %s%n%n",
            commit,
        )
        diff = b""
        if edited:
            diff = g.run(
                tree,
                *("diff", "--full-index", "--no-renames", "--no-ext-diff"),
                *(f"{commit}^", commit, "--", *edited),
            ).stdout
        start = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
        text = f"{start}{header.rstrip()}\n\n{body}".rstrip() + "\n---\n\n"
        (patches / f"{entry.slug}.patch").write_bytes(text.encode() + diff)
        entries.append(entry)
    (patches / "series").write_text(dump(entries))
    return entries


def _is(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _note(tree: Path) -> Path:
    return tree / g.git(tree, "rev-parse", "--git-path", "rnn-exported.json").strip()


def note_origin(tree: Path, pin: Pin) -> None:
    """Note the files that ``tree`` was made from, to tell later edits of them apart."""
    paths = [pin.folder / "series"]
    for entry in load(pin):
        paths.append(patch_path(pin, entry.slug))
        paths += [source for source, _ in entry.brought(pin)]
    noted = {p.relative_to(ROOT).as_posix(): _digest(p) for p in paths}
    _note(tree).write_text(json.dumps(noted))


def export_in_place(tree: Path, pin: Pin) -> tuple[list[Entry], list[str]]:
    """Export into this repository; everything is written aside first, then moved.

    A file that was edited here since the tree was made stays if the tree has not
    changed it; if both have, nothing is written.  Returns the entries and the paths,
    relative to the repository, that changed.
    """
    note = _note(tree)
    noted: dict[str, str] = json.loads(note.read_text()) if note.is_file() else {}

    def edited_here(name: str) -> bool:
        return bool(noted) and _digest(ROOT / name) != noted.get(name, "")

    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as temporary:
        aside = Path(temporary)
        patches = aside / pin.folder.relative_to(ROOT)
        patches.mkdir(parents=True)
        entries = export(tree, pin, patches, aside / "torch_overlay", aside)
        exported = {
            p.relative_to(aside).as_posix(): p
            for p in sorted(aside.rglob("*"))
            if p.is_file()
        }
        digests = {name: _digest(path) for name, path in exported.items()}
        stale = [
            name
            for p in sorted(
                [*pin.folder.glob("*.patch"), *own_overlay(pin).rglob("*.py")]
            )
            if (name := p.relative_to(ROOT).as_posix()) not in exported
        ]
        changed = [
            name
            for name, digest in digests.items()
            if digest not in (_digest(ROOT / name), noted.get(name))
        ] + stale
        if clash := [name for name in changed if edited_here(name)]:
            raise UserError(
                f"expected {', '.join(clash)} as when {tree} was made, found edits made "
                "here since; commit them into the work tree or undo them, and export again"
            )
        for name in changed:
            if name in exported:
                (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
                exported[name].replace(ROOT / name)
            else:
                (ROOT / name).unlink()
        note.write_text(json.dumps(digests))
    return entries, changed
