"""git, kept apart from the user's configuration, hooks and surrounding repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .console import UserError


IDENTITY = {"NAME": "RNN on CPU", "EMAIL": "rnn-cpu@localhost"}
ROOT_DATE = "2000-01-01T00:00:00Z"
_FLAGS = (
    "-c core.hooksPath=/dev/null -c commit.gpgSign=false -c core.autocrlf=false "
    "-c core.fileMode=false -c gc.auto=0 -c apply.whitespace=nowarn "
    "-c core.attributesFile=/dev/null"
).split()


def _environment(tree: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        # Without it git works on a repository around the tree and skips every file.
        GIT_CEILING_DIRECTORIES=str(tree.resolve().parent),
        GIT_AUTHOR_DATE=ROOT_DATE,
        GIT_COMMITTER_DATE=ROOT_DATE,
        LC_ALL="C",
    )
    for role in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{role}_{key}": value for key, value in IDENTITY.items()})
    return env


def run(
    tree: Path,
    *args: str,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in ``tree`` and give what it printed, whatever its exit code."""
    return subprocess.run(
        ["git", *_FLAGS, *args],
        cwd=tree,
        env={**_environment(tree), **(env or {})},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
    )


def git(
    tree: Path,
    *args: str,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """Run git in ``tree``; a failure is an error of one line."""
    result = run(tree, *args, stdin=stdin, env=env)
    if result.returncode:
        message = " ".join(result.stderr.decode(errors="replace").split())
        raise UserError(
            f"expected `git {args[0]}` to succeed in {tree}, found: {message}; "
            "mend that and run again"
        )
    return result.stdout.decode()
