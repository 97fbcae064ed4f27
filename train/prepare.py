"""Make training data: the target answers prompts with the project's own engine, and its token ids are kept.

    python train/prepare.py out=data.jsonl                          # the target invents the user turns, too
    python train/prepare.py prompts=prompts.jsonl out=data.jsonl    # lines with turns, messages or conversations
    python train/prepare.py prompts=prompts.jsonl out=data.jsonl resume=true

The first line of `out` is a header that says how it was made; then one line per conversation: messages, input_ids and loss_mask
(1 where the target generated the token). Answers of the prompt set are dropped and made anew, turn by turn; its `tools` reach
the chat template, and what a call of one gave cannot be made anew, so that such a row is left out.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import lock, script

if TYPE_CHECKING:
    from specdec.config.pages import Prepare

OPENINGS = Path(__file__).resolve().parents[1] / "specdec" / "assets" / "openings.jsonl"


def run(cfg: Prepare) -> None:
    import torch

    from specdec import __version__, config, hub, method, rejection
    from specdec.engine import Engine
    from specdec.measure import tasks
    from specdec.measure.report import console
    from specdec.params import SamplingParams

    out, answers = Path(cfg.out), cfg.answers
    # everything that a typo can break comes before the weights
    real = out.resolve()  # the file that a link leads to is one, by whatever name
    lock.acquire(real.with_name(f".{real.name}.lock"), f"out={out}")
    if out.exists() and not cfg.resume:
        raise ValueError(f"out={out} exists; give another name, or resume=true to go on with it")
    sampling = [
        SamplingParams(temperature=temperature, max_tokens=answers.max_tokens, top_p=answers.top_p, top_k=answers.top_k)
        for temperature in answers.temperatures
    ]
    openings = []
    if not cfg.prompts:
        invented(cfg)
        openings = openings_of(Path(cfg.synthesize.openings or OPENINGS))
    torch.set_num_threads(cfg.num_threads or 1)
    target = cfg.model.load()
    engine = Engine(
        target, method.build(method.PLAIN, target), rejection.build("standard"), cfg.max_batch_size,
        min(cfg.max_model_len, target.max_model_len),
    )  # fmt: skip
    prompts = Path(cfg.prompts) if cfg.prompts else synthesize(cfg, engine, out, openings)
    chosen = [task for task in conversations(prompts, cfg.limit, target.tokenizer) if fits(engine, task)]
    if not chosen:
        raise ValueError(f"prompts={prompts}: no prompt leaves room for an answer within max_model_len={engine.max_model_len}")

    header = {
        "made_by": f"specdec {__version__} train/prepare.py",
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "revision": cfg.model.revision,
        "chat_template_sha256": hashlib.sha256(template_text(target.tokenizer.chat_template).encode()).hexdigest(),
        "prompts": {"file": prompts.name, "fingerprint": tasks.fingerprint(chosen), "count": len(chosen)},
        "synthesize": None if cfg.prompts else config.plain(cfg.synthesize),
        "answers": config.plain(answers),
        "seed": cfg.seed,
    }
    rows = begin(out, header, cfg.resume)
    script.has_results(out, resumes=True)
    done = {row["id"] for row in rows.rows[1:]}

    with console.progress(len(chosen), answers=len(done)) as advance:
        for place, params in enumerate(sampling):
            mine = [task for i, task in enumerate(chosen) if i % len(sampling) == place and task.id not in done]
            said: dict[str, list[Any]] = {}
            for task, turn, request in tasks.decode(engine, mine, params, cfg.seed):
                said.setdefault(task.id, []).append(request)
                if turn == len(task.turns):
                    rows.add(request_record(task, said.pop(task.id), target.tokenizer))
                    advance("answers")
            for task in mine:  # a conversation that outgrew the context keeps the turns that fit
                if task.id in said:
                    rows.add(request_record(task, said[task.id], target.tokenizer))
                    advance("answers")
    rows.close()
    kept = rows.rows[1:]
    tokens = sum(sum(row["loss_mask"]) for row in kept)
    console.show(f"{len(kept)} conversations, {tokens} supervised tokens, written to {out}")


def begin(path: Path, header: dict[str, Any], resume: bool) -> Any:
    """A file of rows under a header: a new one, or one of ours that was begun with the same header. No other is touched."""
    from specdec.measure import records

    if path.exists():
        if not resume:
            raise ValueError(f"{path} exists; give another out=, or resume=true to go on with it")
        first = path.read_bytes().partition(b"\n")
        before = None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            before = json.loads(first[0])["header"]
        cut_short = not first[1] and b'{"header": '.startswith(first[0][:11])
        if before is None and not cut_short:
            raise ValueError(f"resume=true, but {path} is not of this script; give another out=")
        if before is not None and before != json.loads(json.dumps(header)):
            raise ValueError(f"resume=true, but {path} was begun with other settings; use the same, or another out=")
    rows = records.JsonlFile(path)
    if not rows.rows:
        rows.add({"header": header})
    return rows


def template_text(template: Any) -> str:
    """A chat template, or several by name, as text."""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""


def fits(engine: Any, task: Any) -> bool:
    """Whether the first turn leaves room for an answer; if not, says so."""
    from specdec.core import Request
    from specdec.measure import tasks
    from specdec.params import SamplingParams

    try:
        ids = tasks.first_prompt_ids(engine.target.tokenizer, task)
        engine.check(Request(task.id, ids, SamplingParams()))
    except ValueError as error:
        print(f"note: left out: {error}", file=sys.stderr)
        return False
    return True


def request_record(task: Any, requests: list[Any], tokenizer: Any) -> dict[str, Any]:
    """A conversation as the last request saw it. Of an earlier answer, the tokens are supervised that stand in there as they
    were generated, up to the first that does not."""
    last = requests[-1]
    input_ids = [*last.prompt_token_ids, *last.output_token_ids]
    loss_mask = [0] * len(input_ids)
    messages = [{"role": "system", "content": task.system}] if task.system else []
    for turn, request in zip(task.turns, requests, strict=False):
        text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]
        whole = [*request.prompt_token_ids, *request.output_token_ids]
        alike = next((i for i, (a, b) in enumerate(zip(input_ids, whole, strict=False)) if a != b), len(whole))
        first = len(request.prompt_token_ids)
        loss_mask[first:alike] = [1] * (alike - first)
    row = {
        "id": task.id,
        "category": task.category,
        "messages": messages,
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "temperature": last.params.temperature,
        "finish_reason": last.finish_reason,
    }
    return row | ({"tools": json.loads(task.tools)} if task.tools else {})


def conversations(path: Path, limit: int | None, tokenizer: Any) -> list[Any]:
    """The user turns of a prompt set, a system message in front of them, and the tools that may be called."""
    from specdec.chat.conversation import prompts_of, unused_note
    from specdec.measure import tasks
    from specdec.training import data

    if not path.is_file():
        raise ValueError(f"prompts={path}: no such file")
    chosen, left_out, taken, unused = [], Counter[str](), Counter[str](), Counter[str]()
    for where, row in data.rows(path, "train"):
        if isinstance(row, dict) and (row.get("turns") == [] or set(row) == {"header"}):
            continue  # a made-up turn that was not kept, or how they were made
        try:
            given = prompts_of(row, tokenizer)
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        unused.update(sorted(given.unused))
        base = name = str(row.get("id", where))
        while name in taken:  # an id names requests and rows, so it must be the only one
            taken[base] += 1
            name = f"{base}#{taken[base]}"
        taken[name] += 1
        turns = tuple(message["content"] for message in given.messages if message["role"] == "user")
        system = given.messages[0]["content"] if given.messages[0]["role"] == "system" else None
        tools = json.dumps(given.tools) if given.tools else None
        chosen.append(tasks.Task(name, str(row.get("category", "all")), turns, system, tools))
    if left_out:
        print(f"note: {sum(left_out.values())} rows of {path} were left out: {dict(left_out)}")
    if unused:
        print(f"note: {unused_note(unused)}")
    if not chosen:
        raise ValueError(f"prompts={path}: no row with user turns")
    return chosen[:limit]


def invented(cfg: Prepare, **more: Any) -> Any:
    """How user turns are sampled that the target makes up."""
    from specdec.params import SamplingParams

    return SamplingParams(**cfg.synthesize.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"}), **more)


MAX_WEIGHT = 1_000_000


def openings_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of openings: text, category, weight (1 if it is not given), perhaps ends."""
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


def synthesize(cfg: Prepare, engine: Any, out: Path, openings: list[dict[str, Any]]) -> Path:
    """Let the target write user turns: it continues the text that its template puts before one, and stops where a turn ends."""
    from specdec import hub
    from specdec.chat.template import user_frame
    from specdec.core import Request
    from specdec.measure.report import console
    from specdec.prompts import derived_seed

    given, tokenizer = cfg.synthesize, engine.target.tokenizer
    path = out.with_name(f"{out.name}.prompts.jsonl")
    shares = list(itertools.accumulate(opening["weight"] for opening in openings))
    prefix, closing = user_frame(tokenizer)
    params = invented(cfg, stop_token_ids=closing)
    how = {"target": engine.target.name, "target_weights": hub.weights_digest(engine.target.path)}
    how |= {"synthesize": {**given.model_dump(), "count": None}, "seed": cfg.seed}
    rows = begin(path, how, cfg.resume)
    script.has_results(path, resumes=True)
    seen = {row["turns"][0] for row in rows.rows[1:] if row["turns"]}
    number = len(rows.rows) - 1
    with console.progress(given.count, prompts=len(seen)) as advance:
        while len(seen) < given.count:
            if number > 20 * given.count:
                raise ValueError(
                    f"{len(seen)} usable user turns among {number}; {engine.target.name} does not make them up well"
                )
            size = 4 * cfg.max_batch_size
            requests = []
            for i in range(number, number + size):
                # a low-discrepancy walk, so that any stretch of numbers has the openings in their shares
                opening = openings[bisect.bisect_right(shares, int(i * 0.6180339887498949 % 1 * shares[-1]))]
                ids = tokenizer(prefix + opening["text"], add_special_tokens=False)["input_ids"]
                requests.append(Request(str(i), ids, params, derived_seed(cfg.seed, i), json.dumps(opening)))
            for request in sorted(engine.run(requests), key=lambda request: int(request.id)):
                opening = json.loads(request.category)
                answer = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
                text = (opening["text"] + answer).strip()
                good = request.finish_reason == "stop" and len(text.split()) >= 4 and text not in seen
                good = good and text.endswith(opening.get("ends", "")) and "\ufffd" not in text
                good = good and len(seen) < given.count
                # a turn that is not used leaves a row too, so that resuming knows which numbers are through
                rows.add({"id": f"{opening['category']}-{request.id}", "category": opening["category"], "turns": [text] * good})
                if good:
                    seen.add(text)
                    advance("prompts")
            number += size
    rows.close()
    return path


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("prepare", run)
