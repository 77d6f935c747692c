"""The entries of the suite: shapes, and how many operations they take."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rnn_series.console import UserError


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# The machine's ceiling is measured by a product of two square matrices of this size.
SGEMM_SIZE = 1536


@dataclass(frozen=True)
class Entry:
    """One model. T steps, batch B, input I, hidden H; ``linear`` is described in the suite."""

    name: str
    kind: str
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0
    linear: int = 0
    source: str = ""

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Size of what one layer hands to the next."""
        return self.linear or (self.proj_size or self.H) * self.directions

    @property
    def flop(self) -> int:
        """Multiplications and additions of the matrix products of one call."""
        state = self.proj_size or self.H
        total = 0
        for layer in range(self.layers):
            size = self.output_size if layer else self.I
            one = GATES[self.kind] * self.H * (size + state) + self.proj_size * self.H
            total += self.directions * one + self.linear * self.H
        return 2 * self.T * self.B * total

    @property
    def group(self) -> str:
        if self.B == 1:
            return "B=1"
        return "B>=32" if self.B >= 32 else "1<B<32"

    @property
    def shape(self) -> str:
        text = f"{self.kind} {self.T},{self.B},{self.I},{self.H}"
        text += f" x{self.layers}" if self.layers > 1 else ""
        text += " bi" if self.bidirectional else ""
        text += f" proj {self.proj_size}" if self.proj_size else ""
        return text + (f" +Linear {self.linear}" if self.linear else "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _check(entry: Entry) -> str:
    """What is wrong with an entry, or an empty string."""
    sizes = (entry.T, entry.B, entry.I, entry.H, entry.layers)
    if entry.kind not in GATES:
        return f"kind {entry.kind!r}, known are {', '.join(GATES)}"
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return f"T, B, I, H, layers = {sizes}, all must be whole numbers above 0"
    if entry.proj_size and (entry.kind != "LSTM" or entry.proj_size >= entry.H):
        return f"proj_size {entry.proj_size}, only for LSTM and below H"
    if entry.linear and (
        entry.bidirectional or entry.proj_size or entry.kind != "LSTM"
    ):
        return "linear, only for a plain LSTM"
    return ""


def load_suite(path: Path, names: list[str]) -> list[Entry]:
    """The entries of a suite in its order; only ``names`` if there are any."""
    try:
        rows = json.loads(path.read_text())["entries"]
        entries = [Entry(**row) for row in rows]
    except FileNotFoundError:
        raise UserError(
            f"expected a suite at {path}, found nothing there; name one with --suite"
        ) from None
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"expected {path} to hold a list `entries` of models, found: {e}; "
            "compare it with scripts/bench_suite.json"
        ) from None
    for entry in entries:
        wrong = _check(entry)
        if wrong:
            raise UserError(
                f"expected entry {entry.name} of {path} to be a model, found {wrong}; "
                "mend the entry"
            )
    known = [entry.name for entry in entries]
    unknown = [name for name in names if name not in known]
    if unknown or not entries:
        raise UserError(
            f"expected entries of {path} ({', '.join(known)}), found "
            f"{', '.join(unknown) or 'none'}; choose from these with --entries"
        )
    return [entry for entry in entries if not names or entry.name in names]
