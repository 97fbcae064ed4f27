"""Records of runs that never ran, for report.html."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specdec.measure import records
from specdec.measure.report import run as run_report
from specdec.measure.report.page import Texts
from specdec.params import SamplingParams

WORDS = ["the", " river", " runs", " </script><b>", "\n", " é", " and", " then"]


def example_texts(rows: list[dict[str, Any]]) -> Texts:
    """A word and its id for every id, and a prompt for every request. Ids 1 and 2 are the halves of an emoji."""
    tokens = {i: f"{WORDS[i % len(WORDS)]}{i}".encode() for i in range(400)}
    tokens[1] = b"\xf0\x9f"
    tokens[2] = b"\x98\x80"
    return Texts(tokens, {row["id"]: f"prompt of {row['id']}" for row in rows})


def example_rows(num_requests: int, num_tokens: int, num_draft: int = 5, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of requests.jsonl, by lot."""
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(num_requests):
        output = rng.integers(3, 400, num_tokens).tolist()
        row: dict[str, Any] = {key: [] for key in ("drafted", "accepted", "emitted", "draft_token_ids")}
        at = 1
        while at < num_tokens:
            drafted = min(int(rng.integers(0, num_draft + 1)), num_tokens - at - 1)
            accepted = int(rng.integers(0, drafted + 1))
            rejected = rng.integers(3, 400, drafted - accepted).tolist()
            row["drafted"].append(drafted)
            row["accepted"].append(accepted)
            row["emitted"].append(accepted + 1)
            row["draft_token_ids"].append(output[at : at + accepted] + rejected)
            at += accepted + 1
        num_steps = len(row["drafted"])
        draft_s = rng.random(num_steps) / 1000
        verify_s = rng.random(num_steps) / 100
        rows.append(
            {
                "id": f"chat-{place}/1",
                "category": ("chat", "code")[place % 2],
                "num_prompt_tokens": 20,
                "output_token_ids": output,
                "finish_reason": "length",
                "sampling": SamplingParams(temperature=0.0).model_dump(),
                **row,
                "trimmed": [0] * num_steps,
                "draft_s": draft_s.tolist(),
                "verify_s": verify_s.tolist(),
                "wall_s": (draft_s + verify_s + 0.001).tolist(),
                "cpu_s": verify_s.tolist(),
                "batch_size": [1] * num_steps,
                "proposer": [],
                **dict.fromkeys(("queue_s", "time_to_first_token_s", "prefill_s", "prefill_cpu_s"), 0.1),
                "decode_s": float(sum(draft_s + verify_s)),
            }
        )
    return rows


def write_example_run(directory: Path, rows: list[dict[str, Any]], method: str = "ngram") -> Path:
    """The out_dir of a run with these rows."""
    stats = {row["id"]: records.stats_of(row) for row in rows}
    numbers = run_report.summarize(stats, {}, {row["id"]: row["category"] for row in rows}, None)
    summary = {
        "target": "tiny-llama", "dtype": "float32", "prompts": "0", "sampling": rows[0]["sampling"], "seed": 0,
        "method": method,
        "speculative_config": {"method": method}, "num_speculative_tokens": 5, "rejection": "standard", "lossless": True,
        "lossless_short": "yes", "lossless_said": "yes", "max_batch_size": 1, "max_model_len": None, "prefill_chunk_size": 512,
        "environment": {"processor": "a <b>processor</b>"}, "busy": [],
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(summary | numbers))
    (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory
