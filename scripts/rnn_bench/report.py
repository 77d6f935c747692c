"""What is made of the times: ratios, the Markdown table, the chart."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any


OURS = "frozen"
# What is raced against; the best of those that ran is an entry's best peer.
PEERS = ("eager", "stock", "onnxruntime", "openvino")
LABELS = {
    "eager": "eager",
    "stock": "stock compile",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "compiled": "ours, not frozen",
    "frozen": "ours, frozen",
    "aoti": "ours, AOTInductor",
}
GROUPS = ("B=1", "1<B<32", "B>=32")


def _ms(row: dict[str, Any], name: str) -> float | None:
    return row["contenders"].get(name, {}).get("ms")


def add_ratios(row: dict[str, Any]) -> None:
    """Add to an entry what follows from its times; None where a time is missing."""
    ours, eager, sgemm = (_ms(row, name) for name in (OURS, "eager", "sgemm"))
    peers = {name: ms for name in PEERS if (ms := _ms(row, name)) is not None}
    best = min(peers, key=lambda name: peers[name], default=None)
    row["best_peer"] = best
    row["best_peer_over_ours"] = peers[best] / ours if best and ours else None
    row["eager_over_ours"] = eager / ours if eager and ours else None
    row["sgemm_gflops"] = row["sgemm_flop"] / sgemm / 1e6 if sgemm else None
    row["gflops"] = row["flop"] / ours / 1e6 if ours else None
    row["percent_of_sgemm"] = (
        100 * row["gflops"] / row["sgemm_gflops"] if ours and sgemm else None
    )


def _group(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    rows = [row for row in rows if row["best_peer_over_ours"]]
    if not rows:
        return None

    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if row[key]]
        return statistics.geometric_mean(values) if values else None

    worst = min(rows, key=lambda row: row["best_peer_over_ours"])
    percents = [r["percent_of_sgemm"] for r in rows if r["percent_of_sgemm"]]
    return {
        "entries": len(rows),
        "geomean_best_peer_over_ours": mean("best_peer_over_ours"),
        "geomean_eager_over_ours": mean("eager_over_ours"),
        "worst": worst["name"],
        "worst_best_peer_over_ours": worst["best_peer_over_ours"],
        "lowest_percent_of_sgemm": min(percents, default=None),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and the worst entry, of all and of each group."""
    groups = {"all": rows} | {
        group: [row for row in rows if row["group"] == group] for group in GROUPS
    }
    found = {name: _group(members) for name, members in groups.items()}
    return {name: group for name, group in found.items() if group}


def _number(value: float | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f}{suffix}"


def _cell(row: dict[str, Any], name: str) -> str:
    contender = row["contenders"].get(name)
    if contender is None:
        return "-"
    return _number(contender["ms"]) if "ms" in contender else contender["status"]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown(data: dict[str, Any]) -> str:
    """The tables and how they were measured."""
    settings, machine = data["settings"], data["machine"]
    names = [n for n in LABELS if any(n in r["contenders"] for r in data["entries"])]
    rows = []
    for row in data["entries"]:
        rows.append(
            [row["name"], row["shape"]]
            + [_cell(row, name) for name in names]
            + [_number(row["best_peer_over_ours"]), _number(row["eager_over_ours"])]
            + [_number(row["gflops"]), _number(row["percent_of_sgemm"], " %")]
        )
    head = ["entry", "T,B,I,H", *(LABELS[name] for name in names)]
    lines = [
        f"Milliseconds a call, float32, {settings['threads']} thread(s), {machine['cpu']} "
        f"({machine['capability']}), median of {settings['rounds']} interleaved rounds; zero "
        f"initial state, no_grad, {'dynamic' if settings['dynamic'] else 'static'} shapes. "
        + ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        + ".",
        "",
        *_table(
            [*head, "best peer / ours", "eager / ours", "GFLOP/s", "of sgemm"], rows
        ),
        "",
    ]
    rows = [
        [name, str(group["entries"])]
        + [_number(group["geomean_best_peer_over_ours"])]
        + [_number(group["geomean_eager_over_ours"])]
        + [f"{group['worst']} {_number(group['worst_best_peer_over_ours'])}"]
        + [_number(group["lowest_percent_of_sgemm"], " %")]
        for name, group in data["summary"].items()
    ]
    head = ["group", "entries", "geomean best peer / ours", "geomean eager / ours"]
    lines += _table([*head, "worst entry", "lowest of sgemm"], rows)
    notes = [
        f"- {row['name']}, {LABELS.get(name, name)}: {c['status']}, {c['reason']}"
        for row in data["entries"]
        for name, c in row["contenders"].items()
        if "reason" in c
    ]
    return "\n".join(lines + ([""] + notes if notes else [])) + "\n"


def chart(data: dict[str, Any], path: Path) -> None:
    """Draw each contender's speed relative to the best peer of its entry.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in data["entries"] if row["best_peer_over_ours"]][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.36 * len(rows)))
    speeds = [row["best_peer_over_ours"] for row in rows]
    places = list(range(len(rows)))
    colours = ["#2a7f4f" if speed >= 1 else "#b5462f" for speed in speeds]
    # From 1 outwards: to the right is faster than the best peer, to the left slower.
    axes.barh(places, [s - 1 for s in speeds], left=1, color=colours, height=0.6)
    for place, speed in zip(places, speeds):
        side, shift = ("left", 5) if speed >= 1 else ("right", -5)
        axes.annotate(
            f"{speed:.2f}",
            (speed, place),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
        )
    markers = {"eager": "o", "stock": "x", "onnxruntime": "^", "openvino": "s"}
    for name, marker in markers.items():
        points = [
            (_ms(row, row["best_peer"]) / ms, place)  # type: ignore[operator]
            for place, row in zip(places, rows)
            if (ms := _ms(row, name)) is not None
        ]
        if points:
            style = {"marker": marker, "s": 26, "zorder": 3, "linewidths": 1}
            colour = {"c": "#444444"} if marker == "x" else {"edgecolors": "#444444"}
            face = {} if marker == "x" else {"facecolors": "none"}
            x, y = zip(*points)
            axes.scatter(x, y, label=LABELS[name], **style, **colour, **face)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_yticks(places, [f"{row['name']}  {row['shape']}" for row in rows])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    mean = data["summary"]["all"]["geomean_best_peer_over_ours"]
    axes.set_xlabel("speed, best peer = 1 (bars: this build, compiled and frozen)")
    axes.set_title(
        f"{data['settings']['threads']} thread(s), float32, {data['machine']['cpu']}: "
        f"geometric mean {mean:.2f}",
        fontsize=10,
    )
    axes.legend(
        fontsize=8,
        ncol=4,
        loc="lower center",
        bbox_to_anchor=(0.4, -0.02),
        frameon=False,
    )
    axes.legend_.set_bbox_to_anchor((0.5, 1.0), transform=axes.transAxes)
    figure.savefig(path, dpi=130, bbox_inches="tight", format="png")
    pyplot.close(figure)
