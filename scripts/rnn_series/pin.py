"""The pin: which PyTorch release a series applies to."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from .console import UserError


ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
DEFAULT_PIN = "v2.13.0"


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    commit: str
    build: int

    @property
    def folder(self) -> Path:
        return PATCHES / self.name

    def check(self, version: str, commit: str, what: str) -> None:
        """Raise unless ``what`` is of the pinned release and commit."""
        if version.split("+")[0] != self.version or commit != self.commit:
            raise UserError(
                f"expected PyTorch {self.version} at commit {self.commit}, found "
                f"{version} at {commit} in {what}; give a wheel of the pinned release"
            )


def pin_names() -> list[str]:
    """The folders of ``patches/``, the default pin first."""
    names = [p.parent.name for p in PATCHES.glob("*/pin.toml")]
    return sorted(names, key=lambda name: (name != DEFAULT_PIN, name))


def load_pin(name: str) -> Pin:
    """Read ``patches/NAME/pin.toml``, whose values are strings and numbers only."""
    path = PATCHES / name / "pin.toml"
    if not path.is_file():
        known = ", ".join(pin_names())
        raise UserError(
            f"expected a pin among {known}, found {name!r}; choose one of them"
        )
    pairs = re.findall(r"^(\w+) *= *(.+)$", path.read_text(), re.MULTILINE)
    try:
        return Pin(name=name, **{key: ast.literal_eval(value) for key, value in pairs})
    except (ValueError, SyntaxError, TypeError) as e:
        raise UserError(
            f"expected version, commit and build in {path}, found {e}; restore the file"
        ) from e
