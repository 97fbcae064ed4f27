"""User turns that the target makes up (Magpie, 2406.08464): it continues the text that its template puts before a user turn,
and stops where a turn ends. Openings, a text that a turn begins with, steer what the turns are about.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec import hub, script
from specdec.chat.template import user_frame
from specdec.config import pages
from specdec.core import Request
from specdec.engine import Engine
from specdec.files import ASSETS
from specdec.measure.records import JsonlFile
from specdec.measure.report import console
from specdec.params import SamplingParams
from specdec.prompts import derived_seed

OPENINGS = ASSETS / "openings.jsonl"
MAX_WEIGHT = 1_000_000
GOLDEN_RATIO = 0.6180339887498949
MIN_WORDS = 4  # of a turn
MAX_TRIES = 20  # for each turn that is wanted


def sampling_params(settings: pages.Synthesis, **others: Any) -> SamplingParams:
    """How user turns are sampled."""
    return SamplingParams(**settings.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"}), **others)


def read_openings(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of openings: text, category, weight (1 unless given), and perhaps ends, how a turn must end. Raises
    ValueError, one line, for a file without a usable one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"synthesize.openings={path}: cannot be read ({error.__class__.__name__}); give JSON lines") from None
    openings = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"synthesize.openings={path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        texts = [row.get("text"), row.get("category"), row.get("ends", "")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: needs text and category, and perhaps ends, each a text")
        weight = row.get("weight", 1)
        if type(weight) is not int or not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"{where}: weight={weight!r} is not a whole number from 0 to {MAX_WEIGHT}")
        openings.append({**row, "weight": weight})
    if not sum(opening["weight"] for opening in openings):
        raise ValueError(f"synthesize.openings={path}: no line has a weight above 0")
    return openings


def open_rows(path: Path, header: dict[str, Any], resume: bool) -> JsonlFile:
    """A file of rows under a header: a new one, or one that was begun with the same header. Raises ValueError for any other
    file, and leaves it as it is."""
    if path.exists():
        if not resume:
            raise ValueError(f"{path} exists; give another out=, or resume=true to go on with it")
        first_line, newline, _ = path.read_bytes().partition(b"\n")
        previous = None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            previous = json.loads(first_line)["header"]
        was_cut = not newline and b'{"header": '.startswith(first_line[:11])
        if previous is None and not was_cut:
            raise ValueError(f"resume=true, but {path} is not of this script; give another out=")
        if previous is not None and previous != json.loads(json.dumps(header)):
            raise ValueError(f"resume=true, but {path} was begun with other settings; use the same, or another out=")
    rows = JsonlFile(path)
    if not rows.rows:
        rows.add({"header": header})
    return rows


def synthesize(cfg: pages.Prepare, engine: Engine, openings: list[dict[str, Any]]) -> Path:
    """Let the target write user turns into a file beside `out`, or go on with that file; returns its path. Raises ValueError if
    too few of them are usable."""
    target = engine.target
    count = min(cfg.synthesize.count, cfg.limit or cfg.synthesize.count)
    out = Path(cfg.out)
    path = out.with_name(f"{out.name}.prompts.jsonl")
    identity = {
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "synthesize": {**cfg.synthesize.model_dump(), "count": None},
        "seed": cfg.seed,
    }
    processes = target.processes
    rows = open_rows(path, identity, cfg.resume) if processes.is_first else None
    script.has_results(path, resumes=True)
    tried = processes.from_first([row["turns"] for row in rows.rows[1:]] if rows else None)
    num_tried = len(tried)
    turns = {text for texts in tried for text in texts}
    requests = _requests(cfg, target.tokenizer, openings, num_tried)
    with console.progress(count, processes.is_first, prompts=len(turns)) as advance:
        while len(turns) < count:
            if num_tried > MAX_TRIES * count:
                raise ValueError(f"{len(turns)} usable user turns among {num_tried}; {target.name} does not make them up well")
            batch = list(itertools.islice(requests, 4 * cfg.max_batch_size))
            # every process decodes its share, and decides on all of them
            here = [
                (int(one.id), one.category, one.output_token_ids, one.finish_reason)
                for one in engine.run(processes.share(batch))
            ]
            for number, category, output_token_ids, finish_reason in sorted(itertools.chain(*processes.from_all(here))):
                num_tried += 1
                opening = json.loads(category)
                text = (opening["text"] + target.tokenizer.decode(output_token_ids, skip_special_tokens=True)).strip()
                is_used = (
                    len(turns) < count
                    and finish_reason == "stop"
                    and len(text.split()) >= MIN_WORDS
                    and text not in turns
                    and text.endswith(opening.get("ends", ""))
                    and "\ufffd" not in text
                )
                # a turn that is not used leaves a row too, so that a resumed run knows which requests are through
                name = opening["category"]
                if rows:
                    rows.add({"id": f"{name}-{number}", "category": name, "turns": [text] if is_used else []})
                if is_used:
                    turns.add(text)
                    advance("prompts")
    if rows:
        rows.close()
    processes.from_first(None)  # others read the file when it is complete
    return path


def _requests(cfg: pages.Prepare, tokenizer: Any, openings: list[dict[str, Any]], first: int) -> Iterator[Request]:
    """Endless requests, from number `first` on, each with its opening as the category. The openings are a low-discrepancy
    sequence: any stretch of it has them in the shares of their weights."""
    cumulative = list(itertools.accumulate(opening["weight"] for opening in openings))
    prefix, closing = user_frame(tokenizer)
    params = sampling_params(cfg.synthesize, stop_token_ids=closing)
    for number in itertools.count(first):
        opening = openings[bisect.bisect_right(cumulative, int(number * GOLDEN_RATIO % 1 * cumulative[-1]))]
        ids = tokenizer(prefix + opening["text"], add_special_tokens=False)["input_ids"]
        yield Request(str(number), ids, params, derived_seed(cfg.seed, number), json.dumps(opening))
