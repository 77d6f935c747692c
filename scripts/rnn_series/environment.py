"""The virtual environment that the wheel is installed in."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

from .console import UserError


_MARKER = "rnn-series.txt"


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def installed(folder: Path) -> str:
    """The key of the wheel that the environment has, or an empty string."""
    marker = folder / _MARKER
    usable = marker.is_file() and python_of(folder).exists()
    return marker.read_text().strip() if usable else ""


def prepare(folder: Path) -> None:
    """Make the environment, or finish one that was interrupted; never touch another's."""
    marker = folder / _MARKER
    if folder.exists() and not marker.exists():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UserError(
                f"expected {folder} to be absent or made by this script, found something "
                "else there; move it away or choose another place with --venv DIR"
            )
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text("")
    if not python_of(folder).exists() or not list(
        folder.glob("lib/*/site-packages/pip")
    ):
        venv.create(folder, with_pip=True)


def pip_install(folder: Path, *args: str) -> None:
    result = subprocess.run(
        [str(python_of(folder)), "-m", "pip", "install", "--quiet"]
        + ["--disable-pip-version-check", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        said = " ".join(result.stderr.split()[-40:])
        raise UserError(
            f"expected pip to install {' '.join(args)} in {folder}, found: {said}; "
            "check the network and pip's configuration and run again"
        )


def install(folder: Path, wheel: Path, key: str) -> None:
    """Install ``wheel`` and note ``key`` once that is complete."""
    prepare(folder)
    pip_install(folder, "--force-reinstall", "--no-deps", str(wheel))
    pip_install(folder, str(wheel), "numpy")
    (folder / _MARKER).write_text(key + "\n")
