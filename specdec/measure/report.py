"""From rows to a summary, a table and plots. The numbers come from `stats`; this file arranges them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specdec.checked import first_mistake
from specdec.files import read_json_object, writing
from specdec.measure import stats
from specdec.measure.stats import RequestStats
from specdec.params import PLAIN
from specdec.policy.cost import CostTable
from specdec.rejection import Verifier

SHOWN_POSITIONS = 4


def summarize(
    run: dict[str, RequestStats],
    plain: dict[str, RequestStats],
    category_of: dict[str, str],
    verify_s: Callable[[float], float] | None,
) -> dict[str, Any]:
    """Numbers of the whole run and of every category; of a composed method, of its parts too (`proposers`).

    run, plain: statistics by request id, of the method and of decoding without speculation (may be empty);
    verify_s: measured seconds of a forward of n tokens per row.
    """

    def numbers(ids: list[str]) -> dict[str, Any]:
        own = [run[i] for i in ids]
        base = [plain[i] for i in ids if i in plain]
        result = stats.pool(own)
        if parts := stats.by_proposer(own):
            result["proposers"] = parts
        result["mean_acceptance_length_over_requests"] = stats.mean_over_requests(own, "mean_acceptance_length")
        result["tokens_per_step_over_requests"] = stats.mean_over_requests(own, "tokens_per_step")
        result["decode_tokens_per_s"] = stats.decode_tokens_per_s(own)
        result["time_to_first_token_s"] = float(np.mean([s.time_to_first_token_s for s in own]))
        steps = result["num_steps"]
        result["draft_s_per_step"] = stats.row_share_seconds(own, "draft_s") / steps if steps else None
        result["verify_s_per_step"] = stats.row_share_seconds(own, "verify_s") / steps if steps else None
        result["speedup_ideal"] = result["tokens_per_step"]
        result["baseline_tokens_per_s"] = baseline = stats.decode_tokens_per_s(base) if len(base) == len(own) else None
        found = stats.speedup(own, base) if baseline else None
        result["speedup"] = found["ratio"] if found else None
        result["speedup_interval"] = [found["low"], found["high"]] if found and found["low"] is not None else None
        result["speedup_cpu"] = found["cpu_ratio"] if found else None
        result["wall_over_cpu"], result["baseline_wall_over_cpu"] = stats.wall_over_cpu(own), stats.wall_over_cpu(base)
        result["speedup_model"] = result["efficiency"] = None
        if verify_s is not None:
            # a plain step as it was in this run, next to the method's own, where there is one
            step_s = float(np.mean([t for s in base for t in s.verify_s])) if baseline else verify_s(1)
            result["speedup_model"] = model = stats.predicted_speedup(own, lambda n: verify_s(n) / verify_s(1), step_s)
            result["efficiency"] = result["speedup"] / model if result["speedup"] and model else None
        return result

    by_category: dict[str, list[str]] = defaultdict(list)
    for name in run:
        by_category[category_of[name]].append(name)
    return {"overall": numbers(list(run)), "categories": {name: numbers(ids) for name, ids in by_category.items()}}


def busy_reasons(summary: dict[str, Any], name: str, has_own_cpu: bool) -> list[str]:
    """Why the times of a summary are not to be trusted, in words; empty if nothing speaks against them.

    name: of the method; has_own_cpu: the work was done by this process's CPU time, and not by a device or by other processes.
    """
    overall = summary["overall"]
    parts = {**summary["categories"], "all": overall}
    speedups = {part: (n["speedup"], n["speedup_ideal"]) for part, n in parts.items()}
    shares = {name: overall["wall_over_cpu"], PLAIN: overall["baseline_wall_over_cpu"]} if has_own_cpu else {}
    return stats.busy_reasons(speedups, shares)


def busy_note(reasons: list[str], cpu_ratio: float | None) -> str:
    """A line that says so, and what CPU time has to say instead."""
    by_cpu = "" if cpu_ratio is None else f"; by CPU time the speedup is {cpu_ratio:.2f}"
    return f"note: the machine was busy with other work ({'; '.join(reasons)}), so wall times mislead{by_cpu}"


def speedup_line(overall: dict[str, Any]) -> str | None:
    """The speedup with what it can be trusted to, in a line; None where nothing was compared."""
    if overall["speedup"] is None:
        return None
    interval = "too few requests for an interval"
    if overall["speedup_interval"]:
        interval = "95 % interval {:.2f} to {:.2f} over requests".format(*overall["speedup_interval"])
    return f"speedup {overall['speedup']:.2f} ({interval}), by CPU time {overall['speedup_cpu']:.2f}"


def lossless_verdict(
    verifier: Verifier, greedy: bool, answered: dict[str, list[int]], plain: dict[str, list[int]] | None
) -> tuple[str, str]:
    """By what right the output is called the target's own: in a few characters, and in words. Checked token for token where
    that can be: when greedy, or under `match`, and decoded plainly too (`plain`)."""
    if not verifier.lossless:
        return "NO", f"NO, {verifier.name} does not keep the target's law"
    if plain is None or not (greedy or verifier.name == "match"):
        return "in law", f"yes, in law ({verifier.name})"
    same = sum(answered[name] == plain[name] for name in answered)
    verdict = "yes" if same == len(answered) else "NOT TOKEN FOR TOKEN"
    return f"{same}/{len(answered)}", f"{verdict}, {same} of {len(answered)} outputs equal plain decoding"


@contextlib.contextmanager
def progress(total: int, visible: bool = True, **done: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr for each name, `done` of `total` through; yields a function that advances the named one by one."""
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        places = {name: bars.add_task(name, total=total, completed=count) for name, count in done.items()}
        yield lambda name: bars.advance(places[name])


@contextlib.contextmanager
def one_bar(label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on stderr; yields a function that advances it by one, and says words behind it if some are given. total None: it
    is not known how much there is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        place = bars.add_task(label, total=total, said="")

        def advance(count: int = 1, said: str | None = None) -> None:
            bars.advance(place, count)
            if said is not None:
                bars.update(place, said=said)

        try:
            yield advance
        except ValueError:  # what could not begin ends with one line, and no empty bar above it
            bars.update(place, visible=bool(bars.tasks[0].completed))
            raise


@contextlib.contextmanager
def steps(total: int, visible: bool = True) -> Iterator[tuple[Callable[[int], None], Callable[[dict[str, Any]], None]]]:
    """A bar on stderr over the optimiser steps; yields a function that advances it, and one that shows a row of metrics."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        place = bars.add_task("", total=total)
        latest: dict[str, str] = {}

        def show_row(row: dict[str, Any]) -> None:
            for key, label in (("loss", "loss"), ("val_loss", "val"), ("mean_acceptance_length", "accepts")):
                if row.get(key) is not None:
                    latest[label] = f"{label} {row[key]:.3f}"
            bars.update(place, description="  ".join(latest.values()))

        yield lambda count: bars.advance(place, count), show_row


def plot_training(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Four panels over the optimiser steps: losses, accuracy by unrolled step, measured acceptance, learning rate and
    gradient."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    figure.suptitle(title)

    def line(axis: Any, key: str, label: str, index: int | None = None, **style: Any) -> None:
        found = [(row["step"], row[key] if index is None else row[key][index]) for row in rows if row.get(key)
                 and (index is None or len(row[key]) > index)]  # fmt: skip
        if found:
            axis.plot(*zip(*found, strict=True), label=label, **style)

    depth = max((len(row["val_accuracy"]) for row in rows if row.get("val_accuracy")), default=0)
    for axis, key, title in (
        (axes[0, 0], "step_loss", "Loss per supervised token, by unrolled step"),
        (axes[0, 1], "accuracy", "Accuracy by unrolled step, teacher-forced"),
    ):
        for k in range(depth):
            line(axis, f"val_{key}", f"step {k + 1}, held out", k, marker="o", color=f"C{k}")
            line(axis, key, f"step {k + 1}, training", k, linewidth=1, color=f"C{k}", alpha=0.5)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    axis = axes[1, 0]
    line(axis, "mean_acceptance_length", "mean acceptance length", marker="o", color="black")
    measured = [row for row in rows if row.get("acceptance_rate_per_position")]
    axis.set_title("Decoding held-out prompts with the engine")
    axis.set_ylabel("mean acceptance length")
    if measured:
        axis.set_ylim(1, max(2.0, 1.1 * max(row["mean_acceptance_length"] for row in measured)))
        other = axis.twinx()
        for k in range(len(measured[0]["acceptance_rate_per_position"])):
            line(other, "acceptance_rate_per_position", f"accepted at position {k + 1}", k, linestyle="--", color=f"C{k}")
        other.set_ylim(0, 1)
        other.set_ylabel("share of drafts (dashed)")
        other.legend(fontsize=8, loc="upper right")
    axis = axes[1, 1]
    line(axis, "lr", "learning rate", color="C0")
    axis.set_title("Learning rate; gradient norm before clipping")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    other = axis.twinx()
    line(other, "grad_norm", "gradient norm", color="C1", linewidth=0.8)
    if other.lines:
        other.set_ylim(bottom=0)
        other.legend(fontsize=8, loc="upper right")
    for axis in axes.flat:
        axis.set_xlabel("optimiser step")
        if axis.lines:
            loc = {0: "upper right", 1: "upper left", 2: "upper left", 3: "lower left"}[list(axes.flat).index(axis)]
            axis.legend(fontsize=8, loc=loc, ncols=2 if axis in axes[0] else 1)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def table(summary: dict[str, Any], title: str) -> Table:
    """Per category and overall: what a reader compares."""
    grid = Table(title=title, title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("category", no_wrap=True)
    for name in (
        "requests",
        "mean acceptance length",
        "tokens/step",
        "acceptance per position",
        "steps with draft",
        "tokens/s",
        PLAIN,
        "speedup",
        *(["by CPU time"] if summary["busy"] else []),
        "model",
        "efficiency",
    ):
        grid.add_column(name, justify="left" if "position" in name else "right", no_wrap="position" in name)
    lines = [*summary["categories"].items(), ("all", summary["overall"])]
    for place, (name, n) in enumerate(lines):
        rates = n["acceptance_rate_per_position"]
        shown = " ".join(f"{rate:.2f}" for rate in rates[:SHOWN_POSITIONS]) + (" ..." if len(rates) > SHOWN_POSITIONS else "")
        grid.add_row(
            name,
            str(n["num_requests"]),
            _number(n["mean_acceptance_length"]),
            _number(n["tokens_per_step"]),
            shown or "-",
            f"{n['num_drafts'] / n['num_steps']:.0%}" if n["num_steps"] else "-",
            _number(n["decode_tokens_per_s"], 1),
            _number(n["baseline_tokens_per_s"], 1),
            _number(n["speedup"], 2, "x"),
            *([_number(n["speedup_cpu"], 2, "x")] if summary["busy"] else []),
            _number(n["speedup_model"], 2, "x"),
            _number(n["efficiency"]),
            end_section=place == len(lines) - 2,
            style="bold" if name == "all" else None,
        )
    grid.caption = (
        "mean acceptance length: steps with a draft, bonus token included; tokens/step: every step. Per position: of all "
        "drafts, shorter ones too. tokens/s and speedup: prefill excluded; none: without speculation, in turn with it. model: "
        "what acceptance and measured forward times predict; efficiency: speedup / model."
    )
    return grid


def proposer_table(summary: dict[str, Any]) -> Table:
    """Of a composed method: who drafted how often, how well, and what came of it."""
    grid = Table(title="by proposer, all categories", title_justify="left", header_style="bold")
    grid.add_column("proposer", no_wrap=True)
    for name in ("steps", "drafts", "mean acceptance length", "accepted / drafted", "share of output"):
        grid.add_column(name, justify="right")
    for name, n in summary["overall"]["proposers"].items():
        grid.add_row(
            name,
            str(n["num_steps"]),
            str(n["num_drafts"]),
            _number(n["mean_acceptance_length"]),
            f"{n['num_accepted_tokens']} / {n['num_draft_tokens']}",
            "-" if n["output_share"] is None else f"{n['output_share']:.0%}",
        )
    return grid


def show(*parts: Any) -> None:
    """Print for people; wide enough for a table when the output is a file."""
    console = Console(highlight=False, markup=False)  # what users wrote may look like markup
    if not console.is_terminal:
        console.width = max(console.width, 160)
    for part in parts:
        console.print(part)


def _pyplot() -> Any:
    """matplotlib without a screen, taking users' words as words ($ is no formula)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt

    return plt


def plot_run(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Four panels: tokens per step, acceptance per position, tokens emitted per step, speedup against its predictions."""
    plt = _pyplot()
    categories = {**summary["categories"], "all": summary["overall"]}
    names = list(categories)
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    figure.suptitle(title)
    place = np.arange(len(names))

    axis = axes[0, 0]
    pooled = [np.nan if categories[n]["tokens_per_step"] is None else categories[n]["tokens_per_step"] for n in names]
    axis.bar(place, pooled, color="tab:blue", label="all steps together, as in the table")
    for x, n in zip(place, names, strict=True):
        mean = categories[n]["tokens_per_step_over_requests"]
        if mean and mean["num_requests"] >= 8:  # the interval of fewer says nothing
            bounds = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            label = "mean over requests, 95 %" if n == "all" else None
            axis.errorbar(x, mean["mean"], yerr=bounds, fmt="o", color="black", capsize=3, markersize=4, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, names, rotation=30, ha="right")
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left")
    axis.set_title("Tokens per step")

    axis = axes[0, 1]
    for name in names:
        rates = categories[name]["acceptance_rate_per_position"]
        if rates:
            style = {"color": "black", "linewidth": 2.5} if name == "all" else {"linewidth": 1.2}
            axis.plot(np.arange(1, len(rates) + 1), rates, marker="o", markersize=3, label=name, **style)
    axis.set_ylim(0, 1.02)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("draft position")
    axis.set_title("Share of all drafts (shorter ones too) accepted up to each position")
    if axis.lines:
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, "no drafts", transform=axis.transAxes, ha="center")

    axis = axes[1, 0]
    histogram = np.array(summary["overall"]["acceptance_histogram"])
    no_draft, accepted = histogram[0].sum(), histogram[1:].sum(0)
    total = max(histogram.sum(), 1)
    axis.bar(["no draft", *map(str, range(len(accepted)))], np.array([no_draft, *accepted]) / total, color="tab:green")
    if len(accepted) > 12:
        axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel("draft tokens accepted")
    axis.set_title("Share of steps, all categories")

    axis = axes[1, 1]
    bars = [("speedup", "measured"), ("speedup_model", "model"), ("speedup_ideal", "ideal: drafts and verification free")]
    for k, (key, label) in enumerate(bars):
        heights = [np.nan if categories[n][key] is None else categories[n][key] for n in names]
        axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=label)
    for x, n in zip(place, names, strict=True):
        if interval := categories[n]["speedup_interval"]:
            middle = [x - 0.27], [categories[n]["speedup"]]
            bounds = [[max(middle[1][0] - interval[0], 0)], [max(interval[1] - middle[1][0], 0)]]
            axis.errorbar(*middle, yerr=bounds, color="black", capsize=3, label="95 % over requests" if n == "all" else None)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, names, rotation=30, ha="right")
    axis.set_title("Speedup over decoding without speculation")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)

    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


class _Numbers(BaseModel):
    """What is read of the numbers of a category, or of all requests; there are more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    mean_acceptance_length: float | None = None
    acceptance_rate_per_position: list[float | None] | None = None
    tokens_per_step: float | None = None
    decode_tokens_per_s: float | None = None
    draft_s_per_step: float | None = None
    verify_s_per_step: float | None = None
    speedup: float | None = None
    speedup_interval: list[float] | None = Field(None, min_length=2, max_length=2)
    speedup_cpu: float | None = None
    speedup_model: float | None = None
    efficiency: float | None = None


class _Summary(BaseModel):
    """What is read of a summary.json of eval/run.py; there is more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    target: str = ""
    dtype: str = ""
    prompts: str = ""
    sampling: dict[str, Any] = {}
    seed: int = 0
    method: str = ""
    speculative_config: dict[str, Any] = {}
    num_speculative_tokens: int = 0
    rejection: str = ""
    lossless: bool = True
    lossless_short: str = ""
    lossless_verdict: str = ""
    max_batch_size: int = 1
    max_model_len: int | None = None
    prefill_chunk_size: int = 1
    environment: dict[str, Any] = {}
    busy: list[str] = []
    overall: _Numbers = _Numbers()
    categories: dict[str, _Numbers] = {}


class _Row(BaseModel):
    """What is read of a row of requests.jsonl; there is more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str
    category: str
    num_prompt_tokens: int
    output_token_ids: list[int]
    sampling: dict[str, Any]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    trimmed: list[int]
    batch_size: list[int]
    draft_s: list[float]
    verify_s: list[float]
    wall_s: list[float]
    cpu_s: list[float]
    proposer: list[str]
    queue_s: float
    time_to_first_token_s: float
    prefill_s: float
    prefill_cpu_s: float
    decode_s: float

    @model_validator(mode="after")
    def _steps(self) -> _Row:
        steps = ("drafted", "accepted", "emitted", "trimmed", "batch_size", "draft_s", "verify_s", "wall_s", "cpu_s")
        if len({len(getattr(self, key)) for key in steps}) > 1 or len(self.proposer) not in (0, len(self.drafted)):
            raise ValueError(f"its lists ({', '.join(steps)}) are not of one length")
        return self


def check_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Raise ValueError, one line with the row's number, for a row that eval/run.py did not write: one that lacks a key, or has
    a value of another type."""
    for number, row in enumerate(rows, 1):
        _hold(_Row, row, f"{path}, line {number}", "move the file away, or mend the line")


def read_summary(directory: Path, fix: str, keys: Iterable[str] = ("overall",), numbers: Iterable[str] = ()) -> dict[str, Any]:
    """The summary.json of a finished run of eval/run.py. keys: those that must be there; numbers: those that must be there
    overall and in every category. Raises ValueError, one line that ends with `fix`, for one that is not there, not whole, or
    of other types than are written."""
    path = directory / "summary.json"
    summary = read_json_object(path, fix)
    _hold(_Summary, summary, path, fix)
    parts = {"overall": summary.get("overall", {}), **{f"categories.{k}": v for k, v in summary.get("categories", {}).items()}}
    lacking = [key for key in keys if key not in summary]
    lacking += [f"{part}.{key}" for part, own in parts.items() for key in numbers if key not in own]
    if lacking:
        raise ValueError(f"{path} lacks {lacking[0]!r}; {fix}")
    return summary


def check_numbers(row: dict[str, Any], where: str) -> None:
    """Raise ValueError, one line that begins with `where`, for a row of metrics whose numbers are none."""
    _hold(_Numbers, row, where, "it was altered")


def _hold(record: type[BaseModel], values: dict[str, Any], where: Path | str, fix: str) -> None:
    try:
        record.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_mistake(error)}; {fix}") from None


def compare_table(runs: dict[str, dict[str, Any]]) -> Table:
    """One line per run. by position: share of drafts whose n-th token was accepted; draft: seconds of drafting over those of
    verifying; 95 %: interval of the speedup over requests; by CPU time: the speedup by the process's CPU time."""
    grid = Table(title="runs", title_justify="left", header_style="bold")
    grid.add_column("run", no_wrap=True)
    grid.add_column("method")
    names = ["K", "mean acceptance length", "by position", "tokens/step", "tokens/s", "draft", "speedup", "95 %"]
    names += ["by CPU time", "model", "efficiency"]
    several = len({summary["rejection"] for summary in runs.values()}) > 1
    for name in (*names, *(["rejection"] if several else []), "lossless"):
        grid.add_column(name, justify="right")
    for name, summary in runs.items():
        n = summary["overall"]
        by_position = " ".join(f"{rate:.2f}" for rate in n["acceptance_rate_per_position"] or [])
        draft_s, verify_s = n["draft_s_per_step"], n["verify_s_per_step"]
        interval = n["speedup_interval"]
        cells = (
            str(summary["num_speculative_tokens"]),
            _number(n["mean_acceptance_length"]),
            by_position or "-",
            _number(n["tokens_per_step"]),
            _number(n["decode_tokens_per_s"], 1),
            _number(draft_s / verify_s if draft_s is not None and verify_s else None),
            _number(n["speedup"], 2, "x"),
            f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-",
            _number(n["speedup_cpu"], 2, "x"),
            _number(n["speedup_model"], 2, "x"),
            _number(n["efficiency"]),
        )
        scheme = [summary["rejection"]] if several else []
        grid.add_row(name, summary["method"], *cells, *scheme, summary["lossless_short"])
    return grid


def category_table(runs: dict[str, dict[str, Any]]) -> Table:
    """Mean acceptance length and tokens per step of every category, a line per run."""
    grid = Table(title="mean acceptance length | tokens/step", title_justify="left", header_style="bold")
    grid.add_column("run", no_wrap=True)
    names = list(dict.fromkeys(c for summary in runs.values() for c in summary["categories"]))
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for label, summary in runs.items():
        own = [summary["categories"].get(name) for name in names]
        keys = ("mean_acceptance_length", "tokens_per_step")
        grid.add_row(label, *("-" if n is None else " | ".join(_number(n[key]) for key in keys) for n in own))
    return grid


def plot_compare(runs: dict[str, dict[str, Any]], path: Path) -> Path:
    """Tokens per step and speedup, by category, a bar per run."""
    plt = _pyplot()
    names = [*dict.fromkeys(c for summary in runs.values() for c in summary["categories"]), "all"]
    figure, axes = plt.subplots(2, 1, figsize=(max(9, 1.4 * len(names)), 8), constrained_layout=True)
    place, width = np.arange(len(names)), 0.8 / len(runs)
    for axis, key, title in (
        (axes[0], "tokens_per_step", "Tokens per step (pooled)"),
        (axes[1], "speedup", "Speedup over decoding without speculation, same run"),
    ):
        for k, (label, summary) in enumerate(runs.items()):
            parts = {**summary["categories"], "all": summary["overall"]}
            heights = [parts[n][key] if n in parts and parts[n][key] is not None else np.nan for n in names]
            axis.bar(place + (k - (len(runs) - 1) / 2) * width, heights, width, label=label)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(place, names, rotation=20, ha="right")
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(runs), 5), fontsize=9)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Directory -> the least of its path that tells it from the others."""
    names = list(names)
    for parts in range(1, 10):
        short = {name: "/".join(Path(name).parts[-parts:]) for name in names}
        if len(set(short.values())) == len(names):
            return short
    return {name: name for name in names}


def bench_tables(results: dict[str, Any]) -> list[Table]:
    """The benchmark's three tables."""
    machine = results["environment"]
    where = f"{machine['processor']}, torch {machine['torch']}, transformers {machine['transformers']}"
    speed = Table(title=f"tokens/s, batch 1, prefill included ({where})", title_justify="left", header_style="bold")
    heads = ("dtype", "threads", "ours", "tokens/s", "theirs", "tokens/s ")
    for name in (*heads, "ratio (median)", "10 to 90 %", "by CPU time", "ratio (pooled)"):
        speed.add_column(name, justify="left" if name in ("dtype", "ours", "theirs") else "right")
    for line in results["speed"]:
        speed.add_row(
            line["dtype"],
            str(line["threads"]),
            line["ours"],
            _number(line["ours_tokens_per_s"], 1),
            line["theirs"],
            _number(line["theirs_tokens_per_s"], 1),
            _number(line["ratio"]),
            "{:.2f} to {:.2f}".format(*line["ratio_range"]),
            _number(line["cpu_ratio"]),
            _number(line["pooled_ratio"]),
        )
    batch = Table(title="batches, and time outside forwards", title_justify="left", header_style="bold")
    for name in ("dtype", "threads", "method", "batch size", "tokens/s", "outside forwards"):
        batch.add_column(name, justify="left" if name in ("dtype", "method") else "right")
    for line in results["batch"]:
        batch.add_row(
            line["dtype"],
            str(line["threads"]),
            line["method"],
            str(line["batch_size"]),
            _number(line["tokens_per_s"], 1),
            _number(100 * line["outside_forwards"], 1, " %"),
        )
    trie = Table(title="suffix trie, one thread", title_justify="left", header_style="bold")
    for name in ("cached tokens", "update, us/token", "propose, us", "bytes/token"):
        trie.add_column(name, justify="right")
    for line in results["suffix"]:
        trie.add_row(
            f"{line['cached_tokens']:,}",
            _number(line["update_us"], 1),
            _number(line["propose_us"], 1),
            _number(line["bytes_per_token"], 0),
        )
    return [speed, batch, trie]


# ---------------------------------------------------------------- costs


def cost_tables(table: CostTable) -> list[Table]:
    """Milliseconds of verifying, by tokens of each row, and of drafting, by length, for every batch size."""
    grids = []
    where = f"{table.about['target']}, {table.about['dtype']}, {table.about['device']}, context {table.about['context']}"
    for title, seconds, offset in (
        (f"verifying, ms, by tokens of each row ({where})", table.verify_s, 1),
        (f"drafting, ms, by draft tokens of each row ({table.about['method']})", table.draft_s, 0),
    ):
        grid = Table(title=title, title_justify="left", header_style="bold")
        grid.add_column("batch size", justify="right")
        for k in table.draft_lengths:
            grid.add_column(str(k + offset), justify="right")
        for rows, line in zip(table.batch_sizes, seconds, strict=True):
            grid.add_row(str(rows), *(_number(1e3 * s, 1) for s in line))
        grids.append(grid)
    return grids


def schedule_table(table: CostTable, rates: np.ndarray) -> Table:
    """rates: [rows, k] predicted tokens per second (`cost.tokens_per_s`); the best of a line is marked."""
    title = "predicted tokens/s, all rows together, by draft tokens (* best)"
    grid = Table(title=title, title_justify="left", header_style="bold")
    grid.add_column("batch size", justify="right")
    for k in range(rates.shape[1]):
        grid.add_column(str(k), justify="right")
    for rows in table.batch_sizes:
        own = rates[rows - 1]
        grid.add_row(str(rows), *(f"{rate:.1f}{'*' if k == own.argmax() else ' '}" for k, rate in enumerate(own)))
    return grid


def plot_cost(table: CostTable, title: str, path: Path) -> Path:
    """Verify seconds against tokens, and draft seconds against k, a line per batch size."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    figure.suptitle(title)
    lengths = np.array(table.draft_lengths)
    for axis, seconds, x, label, said in (
        (axes[0], table.verify_s, lengths + 1, "tokens of each row", "Verifying a step"),
        (axes[1], table.draft_s, lengths, "draft tokens of each row", "Drafting for a step"),
    ):
        for place, (rows, line) in enumerate(zip(table.batch_sizes, seconds, strict=True)):
            colour = plt.get_cmap("viridis")(place / max(len(table.batch_sizes), 2))
            axis.plot(x, 1e3 * np.array(line), marker="o", markersize=4, color=colour, label=f"batch size {rows}")
        axis.set_xlabel(label)
        axis.set_ylabel("milliseconds")
        axis.set_title(said)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# ---------------------------------------------------------------- under load


def _seconds(numbers: dict[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """median / 99th percentile."""
    if numbers is None:
        return "-"
    values = scale * numbers["median"], scale * numbers["p99"]
    return " / ".join(f"{value:.{digits if value < 100 else 0}f}" for value in values)


def _log(axis: Any, which: str) -> None:
    """A logarithmic axis with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    getattr(axis, f"set_{which}scale")("log")
    own = getattr(axis, f"{which}axis")
    own.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (own.set_major_formatter, own.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis=which, which="minor", labelsize=8)


def load_table(summary: dict[str, Any], title: str) -> Table:
    """A line per phase of the request rate, and one for all."""
    grid = Table(title=title, title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("phase", no_wrap=True)
    for name in (
        "requests",
        "came /s",
        "served /s",
        "tokens/s",
        "first token, s",
        "between, ms",
        "per token, ms",
        "whole, s",
        "batch",
        "MAL",
        "wasted",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    lines = [*summary["phases"].items(), ("all", summary["overall"])]
    for place, (name, n) in enumerate(lines):
        grid.add_row(
            name,
            str(n["num_requests"]),
            _number(n["offered_requests_per_s"]),
            _number(n["requests_per_s"]),
            _number(n["output_tokens_per_s"], 1),
            _seconds(n["time_to_first_token_s"]),
            _seconds(n["inter_token_s"], 1e3, 1),
            _seconds(n["time_per_output_token_s"], 1e3, 1),
            _seconds(n["end_to_end_s"]),
            _number(n["mean_batch_size"]),
            _number(n["mean_acceptance_length"]),
            "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}",
            end_section=place == len(lines) - 2,
            style="bold" if name == "all" else None,
        )
    grid.caption = (
        "a / b: median / 99th percentile. came, served: requests per second. Everything is measured from when a request was "
        "due, waiting included. between: from a request's tokens to its next ones, which come in pieces, one per step; per "
        "token: of each request, over its tokens. A phase has the requests that arrived in it, and the tokens and requests "
        "that came out meanwhile. batch: mean rows of a step; MAL: mean acceptance length; wasted: drafted tokens that did "
        "not stand."
    )
    return grid


def plot_load(
    served: list[stats.RequestTiming], turns: Iterable[dict[str, Any]], edges: list[float], title: str, path: Path
) -> Path:
    """Four panels over the run: latencies by arrival, requests waiting and running, gaps between tokens, share of steps by
    batch size. edges: where the request rate changes."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), constrained_layout=True)
    figure.suptitle(title)

    axis = axes[0, 0]
    at = [one.arrival_s for one in served]
    axis.scatter(at, [one.end_to_end for one in served], s=14, color="C0", label="whole answer")
    axis.scatter(at, [one.time_to_first_token for one in served], s=14, color="C1", label="first token")
    _log(axis, "y")
    axis.set_ylabel("seconds")
    axis.set_xlabel("arrival, s")
    axis.set_title("Latency from arrival")
    axis.legend(fontsize=8)

    axis = axes[0, 1]
    lines = list(turns)
    if lines:
        time_at = [0.0, *(line["at_s"] for line in lines)]
        axis.step(time_at, [0, *(line["waiting"] for line in lines)], where="post", color="C3", label="waiting", linewidth=1)
        axis.step(time_at, [0, *(line["running"] for line in lines)], where="post", color="C2", label="running", linewidth=1)
        axis.legend(fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_title("Requests in the engine")
    for axis in axes[0]:
        axis.set_xlim(0, 1.02 * max(one.finished_s for one in served))
        for edge in edges:
            axis.axvline(edge, color="black", linewidth=0.8, linestyle=":")

    axis = axes[1, 0]
    gaps = np.sort([1e3 * gap for one in served for gap in one.stats.wall_s])
    per_token = np.sort([1e3 * t for one in served if (t := one.time_per_output_token) is not None])
    for values, label, colour in ((gaps, "between pieces, one per step", "C4"), (per_token, "per token, of a request", "C5")):
        if len(values):
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label, color=colour)
    if len(gaps):
        _log(axis, "x")
        axis.legend(fontsize=8)
    axis.set_xlabel("milliseconds")
    axis.set_ylabel("share that is faster")
    axis.set_ylim(0, 1.02)
    axis.set_title("Time between tokens")

    axis = axes[1, 1]
    share = stats.batch_size_share([one.stats for one in served])
    axis.bar(list(share), list(share.values()), color="C2")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("rows decoded together")
    axis.set_title("Share of steps by batch size")

    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# ---------------------------------------------------------------- which method to choose


def choose_cells(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the method-selection table. Two numbers in a cell are of the lowest and the highest rate; those of
    times are medians."""
    low, high = summary["levels"][0], summary["levels"][-1]

    def both(own: dict[str, Any], number: Callable[[dict[str, Any]], str]) -> str:
        return f"{number(own['at'][low])} | {number(own['at'][high])}"

    def median(key: str, scale: float, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda n: "-" if n[key] is None else _number(scale * n[key]["median"], digits)

    header = [
        "run",
        "K",
        "gain, low",
        "gain, high",
        "tokens/s",
        "decoding",
        "predicted",
        "ratio",
        "decoding gain (predicted)",
        "first token, s",
        "between, ms",
        "MAL",
        "wasted",
        "outputs",
    ]
    lines = []
    for name, own in summary["runs"].items():
        gains = ["{ratio:.2f} ({low:.2f} to {high:.2f})".format(**own[key]) for key in ("gain_low", "gain_high")]
        lines.append(
            [
                name,
                str(own["num_speculative_tokens_said"]),
                *(gains if name != summary["plain"] else ("1", "1")),
                both(own, lambda n: _number(n["output_tokens_per_s"], 1)),
                both(own, lambda n: _number(n["decode_tokens_per_s"], 1)),
                both(own, lambda n: _number(n["predicted_tokens_per_s"], 1)),
                both(own, lambda n: _number(n["measured_over_predicted"])),
                " | ".join(
                    f"{_number(decoding_gain(summary, name, level, 'decode'))} "
                    f"({_number(decoding_gain(summary, name, level, 'predicted'))})"
                    for level in (low, high)
                )
                if name != summary["plain"]
                else "1",
                both(own, median("time_to_first_token_s", 1, 2)),
                both(own, median("inter_token_s", 1e3, 0)),
                both(own, lambda n: _number(n["mean_acceptance_length"])),
                both(own, lambda n: "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}"),
                own["outputs"],
            ]
        )
    return header, lines


def decoding_gain(summary: dict[str, Any], name: str, level: str, which: str) -> float | None:
    """Tokens/s of decode steps over those of plain decoding, as measured (`decode`) or `predicted`."""
    own, plain = (summary["runs"][run]["at"][level][f"{which}_tokens_per_s"] for run in (name, summary["plain"]))
    return own / plain if own and plain else None


def describe_rate(level: str, summary: dict[str, Any]) -> str:
    """A rate in words."""
    if level == "one":
        return "one request at a time"
    if level == "all":
        return f"all at once, {summary['max_batch_size']} rows"
    return f"{level} of plain capacity ({float(level) * summary['plain_requests_per_s']:.2f}/s)"


def choose_caption(summary: dict[str, Any]) -> str:
    low, high = (describe_rate(summary["levels"][place], summary) for place in (0, -1))
    plain = summary["plain"]
    return (
        f"low: {low}; high: {high}. gain, low: mean time from arrival to last token of {plain} over the run's own (95 % "
        f"bootstrap interval over requests); gain, high: output tokens per second of the engine's time over those of {plain}, "
        "likewise. tokens/s: of all time, prefill included; decoding: of the steps after it alone, as measured; predicted: "
        "of the same steps by the measured costs; ratio: measured over predicted. What all runs have in common in it is "
        "the machine, faster or "
        "slower than while costs were measured; it cancels in the gain of decoding, low | high. first token: from "
        "arrival; between: from a request's tokens to its next, which come in pieces. MAL: mean acceptance length. "
        f"wasted: drafted tokens that did not stand. outputs: requests whose tokens equal those of {plain}, or by what "
        "right they are the target's."
    )


_GAINS = ("run", "K", "gain, low", "gain, high", "decoding gain (predicted)", "outputs")


def choose_tables(summary: dict[str, Any], title: str) -> list[Table]:
    """The gains, a line per run; and what they come from, a line per rate and run."""
    gains = Table(title=title, title_justify="left", header_style="bold")
    header, lines = choose_cells(summary)
    shown = [place for place, name in enumerate(header) if name in _GAINS]
    for place in shown:
        gains.add_column(header[place], justify="left" if place == 0 else "right", no_wrap=True)
    for line in lines:
        gains.add_row(*(line[place] for place in shown))
    grid = Table(title="by rate", title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("rate", no_wrap=True)
    grid.add_column("run", no_wrap=True)
    for name in (
        "tokens/s",
        "decoding",
        "predicted",
        "ratio",
        "first token, s",
        "between, ms",
        "whole, s",
        "batch",
        "MAL",
        "tokens/step",
        "wasted",
    ):
        grid.add_column(name, justify="right")
    for level in summary["levels"]:
        for place, (name, own) in enumerate(summary["runs"].items()):
            n = own["at"][level]
            grid.add_row(
                level if place == 0 else "",
                name,
                _number(n["output_tokens_per_s"], 1),
                _number(n["decode_tokens_per_s"], 1),
                _number(n["predicted_tokens_per_s"], 1),
                _number(n["measured_over_predicted"]),
                _seconds(n["time_to_first_token_s"]),
                _seconds(n["inter_token_s"], 1e3, 0),
                _seconds(n["end_to_end_s"]),
                _number(n["mean_batch_size"], 1),
                _number(n["mean_acceptance_length"]),
                _number(n["tokens_per_step"]),
                "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}",
                end_section=place == len(summary["runs"]) - 1,
            )
    grid.caption = f"a / b: median / 99th percentile. {choose_caption(summary)}"
    return [gains, grid]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table for a README. Bars inside cells become slashes."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def plot_choose(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Latency and time per token against the rate, a line per run; gains at the lowest and the highest rate."""
    plt = _pyplot()
    runs, levels = summary["runs"], summary["levels"]
    palette = plt.get_cmap("tab10" if len(runs) <= 11 else "tab20")
    speculating = [name for name in runs if name != summary["plain"]]
    colour = {name: palette(i % palette.N) for i, name in enumerate(speculating)} | {summary["plain"]: "black"}
    marks = dict(zip(runs, "os^vD<>P*Xhp" * (1 + len(runs) // 12), strict=False))
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.2), constrained_layout=True, width_ratios=[1, 1, 1.15])
    figure.suptitle(title)
    place = np.arange(len(levels))
    said = {"one": "one at\na time", "all": "all at\nonce"}
    for axis, key, what, scale, unit in (
        (axes[0], "end_to_end_s", "From arrival to last token, mean", 1.0, "seconds"),
        (axes[1], "time_per_output_token_s", "Per output token after the first, mean", 1e3, "milliseconds"),
    ):
        for name, own in runs.items():
            values = [np.nan if (n := own["at"][level][key]) is None else scale * n["mean"] for level in levels]
            width = 2.5 if name == summary["plain"] else 1.4
            axis.plot(place, values, marker=marks[name], markersize=5, color=colour[name], linewidth=width, label=name)
        _log(axis, "y")
        axis.set_xticks(place, [said.get(level, f"{level} x plain\ncapacity") for level in levels])
        axis.set_xlabel("request rate")
        axis.set_ylabel(unit)
        axis.set_title(what)
    axis = axes[2]
    place = np.arange(len(speculating))
    for offset, key, label, hatch in (
        (-0.2, "gain_low", "low rate: latency", None),
        (0.2, "gain_high", "high rate: tokens/s", "//"),
    ):
        heights = [runs[name][key]["ratio"] for name in speculating]
        bars = axis.bar(place + offset, heights, 0.38, color=[colour[n] for n in speculating], hatch=hatch, edgecolor="white")
        # an interval of few requests may leave out their own ratio
        below = [max(runs[name][key]["ratio"] - runs[name][key]["low"], 0) for name in speculating]
        above = [max(runs[name][key]["high"] - runs[name][key]["ratio"], 0) for name in speculating]
        axis.errorbar(place + offset, heights, yerr=[below, above], fmt="none", color="black", capsize=2, linewidth=0.8)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], label_type="center", fontsize=7, bbox=box)
        axis.bar([0], [0], color="grey", hatch=hatch, edgecolor="white", label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, speculating, rotation=35, ha="right")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)
    axis.set_title(f"Gain over {summary['plain']}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 8), fontsize=9)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
