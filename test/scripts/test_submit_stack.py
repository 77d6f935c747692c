"""scripts/submit_stack.sh, end to end: real git, real ghstack, its own fake of GitHub."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

from test_rnn_series import PIN, ProjectTestCase, ROOT, source_wheel


sys.path.insert(0, str(ROOT / "scripts"))

from rnn_series import series, wheel


# Stands for ghstack's program: all of it but the connection to GitHub is the real one,
# and what the fake GitHub holds is kept between runs.
GHSTACK = """#!{python}
import asyncio, pathlib, pickle, sys
import ghstack.cli, ghstack.github_fake, ghstack.github_real, ghstack.shell

saved = pathlib.Path({saved!r})
fake = ghstack.github_fake.FakeGitHubEndpoint(ghstack.shell.Shell(cwd={upstream!r}))
state = fake.state
if saved.exists():
    vars(state).update(pickle.loads(saved.read_bytes()))
else:
    repo = state.repository("pytorch", "pytorch")
    repo.defaultBranchRef = asyncio.run(repo._make_ref_async(state, "main"))
async def close():
    pass
fake.aclose = close
ghstack.github_real.RealGitHubEndpoint = lambda **_: fake
try:
    ghstack.cli.main(sys.argv[1:], standalone_mode=False)
finally:
    kept = {{k: v for k, v in vars(state).items() if k != "upstream_sh"}}
    saved.write_bytes(pickle.dumps(kept))
"""
# The linters that take long have tests of their own.
LINTERS = """[[linter]]
code = 'PATCHSERIES'
include_patterns = ['patches/**']
command = ['scripts/lint.sh', 'PATCHSERIES', '@{{PATHSFILE}}']
[[linter]]
code = 'PATCHHEADER'
include_patterns = ['patches/**/*.patch']
command = ['scripts/lint.sh', 'PATCHHEADER', '@{{PATHSFILE}}']
"""


class TestSubmit(ProjectTestCase):
    def setUp(self) -> None:
        super().setUp()
        root = self.project.root
        (root / "build").mkdir()
        (root / "build" / "ci").symlink_to(ROOT / "build" / "ci")
        (root / ".lintrunner.toml").write_text(LINTERS)
        self.home = self.folder / "home"
        self.home.mkdir()
        (self.home / ".ghstackrc").write_text(
            "[ghstack]\ngithub_url = github.com\ngithub_oauth = none\n"
            "github_username = tester\nremote_name = origin\n"
        )
        (self.home / ".gitconfig").write_text(
            "[user]\n\tname = T\n\temail = t@example.com\n[init]\n\tdefaultBranch = main\n"
        )
        self.upstream = self.folder / "github.com" / "pytorch" / "pytorch.git"
        self.checkout = self.folder / "pytorch"
        self.saved = self.folder / "github.pickle"
        program = self.folder / "ghstack"
        program.write_text(
            GHSTACK.format(
                python=ROOT / "build" / "ci" / "bin" / "python",
                saved=str(self.saved),
                upstream=str(self.upstream),
            )
        )
        program.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.env |= {"HOME": str(self.home), "GIT_CONFIG_NOSYSTEM": "1"}
        self.env |= {"GHSTACK": str(program)}
        self.make_upstream()
        self.git(root, "init", "--quiet")
        self.git(root, "add", "--all")
        self.git(root, "commit", "--quiet", "-m", "project")

    def git(self, folder: Path, *args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args],
            check=True,
            env=self.env,
            capture_output=True,
            text=True,
        ).stdout

    def make_upstream(self) -> None:
        """A remote and a checkout whose main has the files that the series edits."""
        edited = {
            name
            for path in PIN.folder.glob("*.patch")
            for name in re.findall(r"^--- a/(.+)$", path.read_text(), re.MULTILINE)
        }
        files = wheel.python_files(source_wheel())
        self.upstream.mkdir(parents=True)
        self.git(self.upstream, "init", "--quiet", "--bare")
        self.git(self.folder, "clone", "--quiet", str(self.upstream), "pytorch")
        for name in edited:
            path = self.checkout / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        self.commit_main("base")

    def commit_main(self, message: str) -> None:
        self.git(self.checkout, "add", "--all")
        self.git(self.checkout, "commit", "--quiet", "--allow-empty", "-m", message)
        self.git(self.checkout, "push", "--quiet", "origin", "HEAD:main")

    def submit(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": self.env["HOME"], "GHSTACK": self.env["GHSTACK"]}
        where = ("--checkout", str(self.checkout))
        return self.project.run(
            "submit_stack.sh", *where, *args, **env, GIT_CONFIG_NOSYSTEM="1"
        )

    def sent(self) -> list[Any]:
        """The pull requests that GitHub has, in order."""
        if not self.saved.exists():
            return []
        requests = pickle.loads(self.saved.read_bytes())["pull_requests"].values()
        return sorted(requests, key=lambda r: r.number)

    def heads(self) -> list[str]:
        return [
            self.git(self.upstream, "rev-parse", r.headRefName) for r in self.sent()
        ]

    def diffs(self) -> list[str]:
        """What each pull request changes."""
        return [
            self.git(self.upstream, "diff", f"{r.baseRefName}...{r.headRefName}")
            for r in self.sent()
        ]

    def test_send_and_update(self) -> None:
        entries = series.load(PIN)
        subjects = [
            re.findall(r"^Subject: (.*)$", (p).read_text(), re.MULTILINE)[0]
            for p in (series.patch_path(PIN, e.slug) for e in entries)
        ]
        before = self.project.files()
        head = self.git(self.checkout, "rev-parse", "HEAD")

        shown = self.submit()
        self.assert_works(shown)
        self.assertEqual(self.sent(), [])
        self.assertEqual(shown.stdout.count("a new pull request"), len(entries))
        self.assertEqual(self.project.files(), before)

        self.assert_works(self.submit("--yes"))
        self.assertEqual([r.title for r in self.sent()], subjects)
        heads = self.heads()
        # Each is on top of the one before: its base holds the other's files.
        for below, above in zip(self.sent(), self.sent()[1:]):
            trees = [
                self.git(self.upstream, "rev-parse", f"{ref}^{{tree}}")
                for ref in (below.headRefName, above.baseRefName)
            ]
            self.assertEqual(*trees)
        for entry, request in zip(entries, self.sent()):
            orig = request.headRefName.replace("/head", "/orig")
            message = self.git(self.upstream, "log", "-1", "--format=%b", orig)
            self.assertIn(f"Pull-Request: {request.url}", message)
            patch = series.patch_path(PIN, entry.slug).read_text()
            self.assertIn(f"\n\n{series.without_trailers(message)}\n---\n", patch)
        numbers = [str(r.number) for r in self.sent()]
        record = (self.project.patches / "pull_requests").read_text()
        self.assertEqual(re.findall(r"/pull/(\d+)$", record, re.MULTILINE), numbers)
        # The checkout and the patches are as they were.
        self.assertEqual(self.git(self.checkout, "rev-parse", "HEAD"), head)
        self.assertEqual(self.git(self.checkout, "worktree", "list").count("\n"), 1)
        after = self.project.files()
        after.pop(
            (self.project.patches / "pull_requests")
            .relative_to(self.project.root)
            .as_posix()
        )
        self.assertEqual(after, before)

        self.assert_works(self.submit("--yes"))
        self.assertEqual(self.heads(), heads)
        self.assertEqual([str(r.number) for r in self.sent()], numbers)

        # Amended: the last patch, and one with others on top, whose heads then move
        # with it while what they change stays.
        for i in (len(entries) - 1, 2):
            heads, diffs = self.heads(), self.diffs()
            (shared, _), *_ = entries[i].brought(PIN)
            path = self.project.root / shared.relative_to(ROOT)
            path.write_text(path.read_text() + "# amended\n")
            self.assertIn(self.sent()[i].url, self.submit().stdout)
            self.assert_works(self.submit("--yes"))
            self.assertEqual([str(r.number) for r in self.sent()], numbers)
            self.assertEqual(self.heads()[:i], heads[:i])
            changed = [a != b for a, b in zip(diffs, self.diffs())]
            self.assertEqual(changed, [j == i for j in range(len(entries))])

    def test_stale_base(self) -> None:
        self.commit_main("newer")
        self.git(self.checkout, "checkout", "--quiet", "--detach", "HEAD^")
        result = self.submit("--yes")
        self.assert_refused(result, "lacks 1 of its commits", "checkout origin/main")
        self.assertEqual(self.sent(), [])

    def test_checkout_that_is_not_ready(self) -> None:
        (self.checkout / "mine.py").write_text("")
        self.assert_refused(self.submit("--yes"), "no uncommitted changes", "mine.py")
        self.git(self.checkout, "add", "--all")
        self.git(self.checkout, "commit", "--quiet", "-m", "mine")
        self.assert_refused(self.submit("--yes"), "no commits on main", "1 that differ")
        (self.checkout / ".git" / "rebase-apply").mkdir()
        self.assert_refused(self.submit("--yes"), "an am or a rebase", "abort")
        self.checkout = self.folder
        self.assert_refused(self.submit("--yes"), "a git checkout", "its top folder")
        self.checkout = self.folder / "pytorch"
        self.assertEqual(self.sent(), [])

    def test_mention_is_not_sent(self) -> None:
        patch = self.project.patches / "rnn-dropout.patch"
        patch.write_text(
            patch.read_text().replace("\nTest plan:", "\ncc @somebody\n\nTest plan:")
        )
        self.assert_refused(self.submit("--yes"), "no lint", "a mention")
        self.assertEqual(self.sent(), [])


if __name__ == "__main__":
    unittest.main()
