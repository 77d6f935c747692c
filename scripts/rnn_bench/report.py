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
    "onednn": "ours, without the template",
    "aoti": "ours, AOTInductor",
}
_FASTER, _SLOWER = "#5fae7f", "#d98a72"
_MARKERS = {
    "eager": ("o", "#222222"),
    "stock": ("x", "#8a5a00"),
    "onnxruntime": ("^", "#1f5fa8"),
    "openvino": ("s", "#7a3fa0"),
}
GROUPS = ("B=1", "1<B<32", "B>=32")


def _ms(row: dict[str, Any], name: str) -> float | None:
    return row["contenders"].get(name, {}).get("ms")


def _quartiles(row: dict[str, Any], peer: str) -> list[float] | None:
    """First and third quartile of the ratio in single rounds, which tell the noise."""
    peers, ours = (row["contenders"][name]["rounds_ms"] for name in (peer, OURS))
    if len(ours) < 2:
        return None
    first, _, third = statistics.quantiles([p / o for p, o in zip(peers, ours)], n=4)
    return [first, third]


def add_ratios(row: dict[str, Any]) -> None:
    """Add to an entry what follows from its times; None where a time is missing."""
    ours, eager, sgemm = (_ms(row, name) for name in (OURS, "eager", "sgemm"))
    peers = {name: ms for name in PEERS if (ms := _ms(row, name)) is not None}
    best = min(peers, key=lambda name: peers[name], default=None)
    row["best_peer"] = best
    row["best_peer_over_ours"] = peers[best] / ours if best and ours else None
    row["best_peer_over_ours_quartiles"] = (
        _quartiles(row, best) if best and ours else None
    )
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


def _ratio(row: dict[str, Any]) -> str:
    text = _number(row["best_peer_over_ours"])
    if row["best_peer_over_ours_quartiles"]:
        text += " ({}-{})".format(*map(_number, row["best_peer_over_ours_quartiles"]))
    return text


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
            + [_ratio(row), _number(row["eager_over_ours"])]
            + [_number(row["gflops"]), _number(row["percent_of_sgemm"], " %")]
        )
    head = ["entry", "T,B,I,H", *(LABELS[name] for name in names)]
    lines = [
        f"Milliseconds a call, float32, {settings['threads']} thread(s), {machine['cpu']} "
        f"({machine['capability']}), median of up to {settings['rounds']} interleaved rounds; zero "
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
    figure, axes = pyplot.subplots(
        figsize=(10, 1.5 + 0.34 * len(rows)), layout="constrained"
    )
    places = list(range(len(rows)))
    speeds = [row["best_peer_over_ours"] for row in rows]
    colours = [_FASTER if speed >= 1 else _SLOWER for speed in speeds]
    # From 1 outwards: to the right is faster than the best peer, to the left slower.
    axes.barh(places, [s - 1 for s in speeds], left=1, color=colours, height=0.62)
    for name, (marker, colour) in _MARKERS.items():
        points = [
            (row["best_peer_over_ours"] * _ms(row, OURS) / ms, place)
            for place, row in zip(places, rows)
            if (ms := _ms(row, name)) is not None
        ]
        if points:
            x, y = zip(*points)
            axes.scatter(
                x, y, s=30, marker=marker, c=colour, label=LABELS[name], zorder=3
            )
    for place, speed, colour in zip(places, speeds, colours):
        # In a column of its own, right of the axes, where no marker can cover it.
        axes.annotate(
            f"{speed:.2f}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            weight="bold",
        )
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_yticks(places, [f"{row['name']}  {row['shape']}" for row in rows])
    axes.set_xscale("log")
    ticks = [t for n in range(-3, 3) for t in (10.0**n, 2 * 10.0**n, 5 * 10.0**n)]
    low, high = axes.get_xlim()
    axes.set_xticks([t for t in ticks if low <= t <= high])
    # Room for the markers at the best peer.
    axes.set_xlim(low, max(high, 1.1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.set_xlabel(
        "speed, best peer = 1; bars and numbers: this build, compiled, frozen"
    )
    mean = data["summary"]["all"]["geomean_best_peer_over_ours"]
    axes.set_title(
        f"{data['machine']['cpu']}, {data['settings']['threads']} thread(s), float32: "
        f"geometric mean {mean:.2f}"
    )
    figure.legend(loc="outside lower center", ncols=len(_MARKERS), frameon=False)
    # Renamed when it is whole, like the other files.
    aside = path.with_name(path.name + ".part")
    figure.savefig(aside, dpi=130, format="png")
    aside.replace(path)
    pyplot.close(figure)
