"""report.html: one file, without anything from a network, about a run, or about several side by side.

What the console shows, the plot, and the answers token by token: the page's script (`specdec/assets/report.html`) draws the
request that is chosen, from the JSON that the page holds. Everything that a user or a model wrote is escaped.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.table import Table

from specdec.drafter import token_bytes
from specdec.files import ASSETS, parse_json, read_json_object, write_atomically
from specdec.measure import records, stats
from specdec.measure.report import compare as compare_report
from specdec.measure.report import run as run_report
from specdec.measure.report import training as training_report
from specdec.measure.report.figure import method_color, run_colors
from specdec.measure.report.table import method_words, new_table, number
from specdec.measure.tasks import Task, request_id
from specdec.params import PLAIN, SamplingParams

FILE = "report.html"
ROWS = "requests.jsonl"
_TEMPLATE = ASSETS / "report.html"
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_VIEWER = """<section>
<h2>Tokens</h2>
<div class="legend"><span><span class="tok prefill">first token</span> of the prefill</span>
<span>accepted, by draft position: {ramp}</span>
<span><span class="tok recovered">recovered</span> after a rejection</span>
<span><span class="tok bonus">bonus</span> after a draft that was accepted as a whole</span>
<span>plain: a step without a draft</span>{proposers}</div>
<div id="viewer">
<div id="chooser">
<div id="controls"><input id="search" type="search" placeholder="Search id, category, prompt" aria-label="Search requests">
<select id="order" aria-label="Order of the requests"><option value="file">in the order of the file</option>
<option value="low">lowest acceptance first</option><option value="high">highest acceptance first</option>
<option value="long">longest answer first</option></select>
<button id="previous" type="button" title="key p">Previous (p)</button><button id="next" type="button" title="key n">Next (n)</button></div>
<div id="list"><div class="item head"><span>request</span><span>category</span><span title="output tokens">tokens</span>
<span title="mean acceptance length">MAL</span></div><div id="items"></div></div>
<p class="dim" id="count"></p></div>
<div><h3 id="name"></h3>
<details id="prompt"><summary>Prompt</summary><pre id="prompt-text"></pre></details>
<p class="dim" id="no-prompt">The text of the prompt is not in the records.</p>
<div id="answers"></div></div></div></section>
"""  # noqa: E501


@dataclass(frozen=True)
class Texts:
    """What the files of a run lack.

    tokens: bytes of text by token id.
    prompts: the last turn of each request's prompt, by request id.
    """

    tokens: Mapping[int, bytes] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecords:
    """A finished run of eval/run.py.

    directory: its out_dir.
    summary: of summary.json.
    rows: of requests.jsonl.
    """

    directory: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def read_run(directory: Path) -> RunRecords:
    """The files of a run of eval/run.py. Raises ValueError, one line, if they are malformed or incomplete."""
    keys = [*records.Summary.model_fields.keys() - {"lossless_verdict"}, "lossless_said"]
    fix = "it was not written by this version of eval/run.py: run it again"
    summary = records.read_summary(directory, fix, sorted(keys), sorted(records.Numbers.model_fields))
    if not (directory / ROWS).is_file():
        raise ValueError(f"{directory}: no {ROWS}; give the out_dir of a finished run of eval/run.py")
    return RunRecords(directory, summary, read_rows(directory))


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """The rows of requests.jsonl; none where it is missing. Raises ValueError, one line, for a malformed one."""
    path = directory / ROWS
    rows = list(records.rows_in(path)) if path.is_file() else []
    records.check_rows(rows, path)
    return rows


# -------------------------------------------------------------------------------------------------- texts


def collect_texts(rows: Iterable[Mapping[str, Any]], tokenizer: Any, tasks: Iterable[Task]) -> Texts:
    """The texts of the tokens in these rows, and of these prompts. tokenizer: the target's; None: tokens are shown as ids."""
    ids: set[int] = set()
    for row in rows:
        ids.update(row["output_token_ids"], *row.get("draft_token_ids", []))
    prompts = {}
    for task in tasks:
        for turn, text in enumerate(task.turns, 1):
            system = f"{task.system}\n\n" if task.system and turn == 1 else ""
            prompts[request_id(task, turn)] = system + text
    return Texts({} if tokenizer is None else token_bytes.bytes_by_id(tokenizer, ids), prompts)


def saved_texts(path: Path) -> Texts | None:
    """The texts in a page that `write_run` wrote before; None if there is no such page."""
    match = _DATA.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    if match is None:
        return None
    data = parse_json(match[1], str(path))
    texts = zip(data["ids"], data["texts"], strict=True)
    tokens = {i: text.encode() if isinstance(text, str) else bytes(text) for i, text in texts if text is not None}
    return Texts(tokens, {entry["id"]: entry["prompt"] for entry in data["requests"] if entry["prompt"] is not None})


# --------------------------------------------------------------------------------------------- token view


class _TokenTable:
    """Tokens of all runs, each text once: the page's answers are places in this table."""

    def __init__(self) -> None:
        self.place_of: dict[tuple[int, bytes | None], int] = {}

    def places(self, ids: Iterable[int], texts: Texts) -> list[int]:
        keys = ((i, texts.tokens.get(i)) for i in ids)
        return [self.place_of.setdefault(key, len(self.place_of)) for key in keys]

    def columns(self) -> dict[str, list[Any]]:
        """ids, and texts: a string, the bytes of a piece of a character, or None."""
        return {"ids": [i for i, _ in self.place_of], "texts": [_text_or_bytes(text) for _, text in self.place_of]}


def _text_or_bytes(text: bytes | None) -> str | list[int] | None:
    if text is None:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def token_data(runs: Mapping[str, RunRecords], texts: Sequence[Texts]) -> dict[str, Any]:
    """What the page's script reads.

    runs: by label.
    texts: of each run.

    The requests are those of any run; `rows` of a run are in their order, None where it has no such request. Times are in
    microseconds. Lists of a row that say nothing (no token was pruned, batches of one row, no components, chains) are left out.
    """
    table = _TokenTable()
    proposers: dict[str, int] = {}
    requests: dict[str, dict[str, Any]] = {}
    for run, run_texts in zip(runs.values(), texts, strict=True):
        for row in run.rows:
            entry = {"id": row["id"], "category": row["category"], "prompt": run_texts.prompts.get(row["id"])}
            requests.setdefault(row["id"], entry)
    colors = run_colors({label: run.summary["method"] for label, run in runs.items()})
    shown = []
    for (label, run), run_texts in zip(runs.items(), texts, strict=True):
        rows = {row["id"]: _row_data(row, table, run_texts, proposers) for row in run.rows}
        shown.append({"label": label, "color": colors[label], "rows": [rows.get(name) for name in requests]})
    components = [{"name": name, "color": method_color(name)} for name in proposers]
    return {"runs": shown, "requests": list(requests.values()), "proposers": components, **table.columns()}


def _row_data(row: Mapping[str, Any], table: _TokenTable, texts: Texts, proposers: dict[str, int]) -> dict[str, Any]:
    parts = zip(row["wall_s"], row["draft_s"], row["verify_s"], strict=True)
    data = {
        "output": table.places(row["output_token_ids"], texts),
        "num_prompt_tokens": row["num_prompt_tokens"],
        "finish_reason": row.get("finish_reason"),
        "mean_acceptance_length": stats.request_metrics(records.stats_of(dict(row)))["mean_acceptance_length"],
        **{key: row[key] for key in ("drafted", "accepted", "emitted")},
        "draft_us": _microseconds(row["draft_s"]),
        "verify_us": _microseconds(row["verify_s"]),
        "rest_us": _microseconds(max(wall - draft - verify, 0.0) for wall, draft, verify in parts),
    }
    if row.get("draft_token_ids"):
        data["drafts"] = [table.places(draft, texts) for draft in row["draft_token_ids"]]
    if any(row.get("draft_parents", [])):
        data["parents"] = row["draft_parents"]
        data["nodes"] = row["accepted_nodes"]
    if any(row["trimmed"]):
        data["trimmed"] = row["trimmed"]
    if any(size > 1 for size in row["batch_size"]):
        data["batch_size"] = row["batch_size"]
    if row["proposer"]:
        data["proposer"] = [proposers.setdefault(name or PLAIN, len(proposers)) for name in row["proposer"]]
    return data


def _microseconds(seconds: Iterable[float]) -> list[int]:
    return [round(1e6 * value) for value in seconds]


# ----------------------------------------------------------------------------------------------- the page


def write_run(directory: Path, texts: Texts) -> Path:
    """The page of a run of eval/run.py, in its out_dir. Returns its path."""
    run = read_run(directory)
    name = directory.resolve().name
    summary = run.summary
    gain = run_report.speedup_line(summary["overall"])
    lines = [*([gain] if gain else []), f"lossless: {summary['lossless_said']}"]
    notes = [run_report.busy_note(summary["busy"], summary["overall"]["speedup_cpu"])] if summary["busy"] else []
    if summary.get("resumed"):
        notes.append("note: resumed: times are of several processes")
    body = [
        _header(_title(summary), lines, notes),
        _section("What ran", _facts_table([name], [_run_facts(run)]), _config(directory)),
        _section("Numbers", *map(table_html, run_report.tables(summary, "acceptance")), _plot(directory / "run.png")),
    ]
    return _write(directory / FILE, name, body, token_data({name: run}, [texts]))


def write_runs(runs: Mapping[str, RunRecords], texts: Sequence[Texts], out: Path, plot: Path | None = None) -> Path:
    """The page of several runs side by side, in the directory `out`. Returns its path.

    runs: by label.
    texts: of each run.
    plot: a PNG of them.
    """
    summaries = {label: run.summary for label, run in runs.items()}
    facts = [_run_facts(run) for run in runs.values()]
    title = f"{len(runs)} runs: " + ", ".join(runs)
    tables = [table_html(table) for table in compare_report.compare_tables(summaries)]
    warnings = [f"warning: {each}; such runs do not compare" for each in compare_report.differences(summaries)]
    body = [
        _header(title, compare_report.verdicts(summaries), [*warnings, *compare_report.notes(summaries)]),
        _section("What ran", _facts_table(list(runs), facts)),
        _section("Numbers", *tables, *([] if plot is None else [_plot(plot)])),
    ]
    return _write(out / FILE, title, body, token_data(runs, texts))


def write_training(directory: Path) -> Path:
    """The page of a training run, in its out_dir. Returns its path. Raises ValueError, one line, for malformed files."""
    summary = read_json_object(directory / "summary.json", "give the out_dir of a training run that has ended")
    path = directory / "metrics.jsonl"
    rows = list(records.rows_in(path)) if path.is_file() else []
    for row in rows:
        records.check_numbers(row, str(path))
    lines = [f"step {summary.get('step')} of {summary.get('num_steps')}"]
    if best := summary.get("best"):
        lines.append(training_report.best_line(best))
    keys = ("method", "target", "dtype", "data", "seed", "skipped_steps", "cpu_s")
    facts = {key: str(summary[key]) for key in keys if key in summary} | _place_facts(directory, summary)
    body = [
        _header(f"training: {summary.get('method')} for {summary.get('target')}", lines),
        _section("What ran", _facts_table([directory.resolve().name], [facts]), _config(directory)),
        _section("Numbers", table_html(_training_table(rows)), _plot(directory / "train.png")),
    ]
    return _write(directory / FILE, directory.resolve().name, body, {"requests": []})


def _training_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A line for every evaluation."""
    caption = "mean acceptance length and acceptance per position: of the engine, decoding held-out prompts greedily"
    heads = ["loss", "validation loss", "mean acceptance length"]
    table = new_table("acceptance while training", ["step"], heads, caption)
    table.add_column("acceptance per position")
    for row in rows:
        if row.get("mean_acceptance_length") is not None or row.get("val_loss") is not None:
            rates = row.get("acceptance_rate_per_position") or []
            table.add_row(
                str(row.get("step")),
                number(row.get("loss"), 3),
                number(row.get("val_loss"), 3),
                number(row.get("mean_acceptance_length"), 3),
                " ".join(number(rate) for rate in rates) or "-",
            )
    return table


def _title(summary: Mapping[str, Any]) -> str:
    return f"{method_words(summary)} on {summary['target']}, {summary['dtype']}"


def _run_facts(run: RunRecords) -> dict[str, str]:
    """What ran, a line each."""
    summary = run.summary
    defaults = SamplingParams().model_dump()
    kept = ("temperature", "max_tokens")
    sampling = {key: value for key, value in summary["sampling"].items() if key in kept or value != defaults.get(key)}
    return {
        "target": f"{summary['target']}, {summary['dtype']}",
        "method": _settings(summary["speculative_config"]) or summary["method"],
        "rejection": summary["rejection"],
        "sampling": f"{_settings(sampling)}, seed={summary['seed']}",
        "requests": f"{len(run.rows)} (prompts {summary['prompts']})",
        "engine": _settings({key: summary[key] for key in ("max_batch_size", "max_model_len", "prefill_chunk_size")}),
        **_place_facts(run.directory, summary),
    }


def _place_facts(directory: Path, summary: Mapping[str, Any]) -> dict[str, str]:
    """Where and when a run was: by the time of its summary.json."""
    place = summary.get("environment", {})
    versions = (f"{key} {place[key]}" for key in ("specdec", "torch", "transformers", "python") if key in place)
    threads = [f"threads={place['num_threads']}"] if "num_threads" in place else []
    modified_at = time.gmtime((directory / "summary.json").stat().st_mtime)
    return {
        "machine": ", ".join([str(place.get("gpu") or place.get("processor") or "-"), *threads]),
        "versions": ", ".join(versions),
        "written": time.strftime("%Y-%m-%d %H:%M UTC", modified_at),
    }


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)


def _facts_table(labels: Sequence[str], facts: Sequence[Mapping[str, str]]) -> str:
    """A line per key, a column per run."""
    keys = dict.fromkeys(key for each in facts for key in each)
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    lines = [
        f"<tr><th>{escape(key)}</th>" + "".join(f"<td>{escape(each.get(key, '-'))}</td>" for each in facts) + "</tr>"
        for key in keys
    ]
    table = f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="facts">{table}</table></div>'


def table_html(table: Table) -> str:
    """A table of the console as HTML."""
    right = [column.justify == "right" for column in table.columns]
    heads = [
        f"<th{' class=r' * is_right}>{escape(str(column.header))}</th>"
        for column, is_right in zip(table.columns, right, strict=True)
    ]
    lines = []
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        shown = [f"<td{' class=r' * is_right}>{escape(str(cell))}</td>" for cell, is_right in zip(cells, right, strict=True)]
        lines.append(f"<tr{' class=bold' if row.style == 'bold' else ''}>{''.join(shown)}</tr>")
    below = f'<p class="dim">{escape(str(table.caption))}</p>' if table.caption else ""
    return (
        f'<div class="scroll"><table><caption>{escape(str(table.title))}</caption><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{below}"
    )


def _header(title: str, lines: Iterable[str], notes: Iterable[str] = ()) -> str:
    """The title, and below it the lines and, less loud, the notes."""
    shown = [f'<p class="verdict">{escape(line)}</p>' for line in lines]
    shown += [f'<p class="dim">{escape(note)}</p>' for note in notes]
    return f"<header><h1>{escape(title)}</h1>{''.join(shown)}</header>"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _plot(path: Path) -> str:
    """A PNG as a part of the page; nothing where there is none."""
    if not path.is_file():
        return ""
    image = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img src="data:image/png;base64,{image}" alt="plots of the numbers above"></figure>'


def _config(directory: Path) -> str:
    path = directory / "config.yaml"
    if not path.is_file():
        return ""
    return f"<details><summary>config.yaml</summary><pre>{escape(path.read_text(encoding='utf-8'))}</pre></details>"


def _viewer(data: Mapping[str, Any]) -> str:
    ramp = " ".join(f'<span class="tok accepted" style="--i:{i}">{i + 1}</span>' for i in range(8))
    lines = [
        f'<span style="border-bottom:2px solid {component["color"]}">drafted by {escape(component["name"])}</span>'
        for component in data["proposers"]
        if component["name"] != PLAIN
    ]
    return _VIEWER.format(ramp=ramp, proposers="".join(lines))


def _write(path: Path, title: str, body: list[str], data: dict[str, Any]) -> Path:
    header, *sections = body
    if data["requests"]:
        sections.append(_viewer(data))
    # in a script element, only `<` can end it
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    main = f"<main>{''.join(sections)}</main>"
    page = Template(_TEMPLATE.read_text(encoding="utf-8"))
    write_atomically(path, page.substitute(title=escape(title), body=header + main, data=text))
    return path
