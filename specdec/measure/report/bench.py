"""Tables of the speed benchmark."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specdec.measure.report.table import number


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
            number(line["ours_tokens_per_s"], 1),
            line["theirs"],
            number(line["theirs_tokens_per_s"], 1),
            number(line["ratio"]),
            "{:.2f} to {:.2f}".format(*line["ratio_range"]),
            number(line["cpu_ratio"]),
            number(line["pooled_ratio"]),
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
            number(line["tokens_per_s"], 1),
            number(100 * line["outside_forwards"], 1, " %"),
        )
    trie = Table(title="suffix trie, one thread", title_justify="left", header_style="bold")
    for name in ("cached tokens", "update, us/token", "propose, us", "bytes/token"):
        trie.add_column(name, justify="right")
    for line in results["suffix"]:
        trie.add_row(
            f"{line['cached_tokens']:,}",
            number(line["update_us"], 1),
            number(line["propose_us"], 1),
            number(line["bytes_per_token"], 0),
        )
    return [speed, batch, trie]
