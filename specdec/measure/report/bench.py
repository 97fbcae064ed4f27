"""Tables of the speed benchmark."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specdec.measure.report.table import interval, new_table, number


def bench_tables(results: dict[str, Any]) -> list[Table]:
    """Our engine against Hugging Face's, batch sizes, and the suffix tree."""
    return [_speed_table(results), _batch_table(results["batch"]), _suffix_table(results["suffix"])]


def _speed_table(results: dict[str, Any]) -> Table:
    machine = results["environment"]
    where = f"{machine['processor']}, torch {machine['torch']}, transformers {machine['transformers']}"
    names = ["dtype", "threads", "ours", "Hugging Face"]
    heads = ["tokens/s", "ratio (median)", "10 to 90 %", "by CPU time", "ratio (pooled)"]
    table = new_table(f"tokens/s, batch 1, prefill included ({where})", names, heads)
    for line in results["speed"]:
        table.add_row(
            line["dtype"],
            str(line["threads"]),
            line["ours"],
            line["theirs"],
            f"{line['ours_tokens_per_s']:.1f} / {line['theirs_tokens_per_s']:.1f}",
            number(line["ratio"]),
            interval(line["ratio_range"]),
            number(line["cpu_ratio"]),
            number(line["pooled_ratio"]),
        )
    return table


def _batch_table(lines: list[dict[str, Any]]) -> Table:
    heads = ["tokens/s", "outside forwards", "ms a step", "GB/s", "a sum's"]
    table = new_table("batches, and time outside forwards", ["dtype", "method", "threads", "rows"], heads)
    for line in lines:
        table.add_row(
            line["dtype"],
            line["method"],
            str(line["threads"]),
            str(line["batch_size"]),
            number(line["tokens_per_s"], 1),
            number(100 * line["outside_forwards"], 1, " %"),
            number(line["ms_per_step"], 1),
            number(line["gb_per_s"], 1),
            number(line["sum_gb_per_s"], 1),
        )
    return table


def _suffix_table(lines: list[dict[str, Any]]) -> Table:
    table = new_table("suffix tree, one thread", [], ["cached tokens", "update, us/token", "propose, us", "bytes/token"])
    for line in lines:
        table.add_row(
            f"{line['cached_tokens']:,}",
            number(line["update_us"], 1),
            number(line["propose_us"], 1),
            number(line["bytes_per_token"], 0),
        )
    return table
