"""Training data that the target itself writes: it answers prompts with the project's engine, and its token ids are kept.

The prompts are a file's, whose answers are dropped and made anew turn by turn, or made up by the target too
(`specdec.training.synthesize`). The result is a header and one line per conversation: messages, input_ids, and loss_mask with 1
where the target generated the token. With a drafter, which makes it faster, rejected_mask has 1 where a draft was rejected.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specdec import __version__, config, hub, lock, method, rejection, script
from specdec.chat.conversation import conversation_without_answers, unused_note
from specdec.chat.template import common_prefix_length
from specdec.config import pages
from specdec.core import Request
from specdec.engine import Engine
from specdec.measure import tasks
from specdec.measure.records import open_shared
from specdec.measure.report import console
from specdec.measure.tasks import Task
from specdec.model import distributed
from specdec.model.distributed import SharedCount
from specdec.model.target import choose_device
from specdec.params import SamplingParams
from specdec.training import data
from specdec.training.synthesize import OPENINGS, open_rows, read_openings, sampling_params, synthesize


def run(cfg: pages.Prepare) -> None:
    """Write the file `out`, or go on with it. Raises ValueError, one line, for what cannot work."""
    # everything that a typo can break comes before the weights
    out = Path(cfg.out)
    if script.is_main_process():
        real = out.resolve()  # a link and the file that it leads to are one, by whatever name
        lock.acquire(real.with_name(f".{real.name}.lock"), f"out={out}")
        if out.exists() and not cfg.resume:
            raise ValueError(f"out={out} exists; give another name, or resume=true to go on with it")
    limits = cfg.answers.model_dump(include={"max_tokens", "top_p", "top_k"})
    params_by_place = [SamplingParams(temperature=temperature, **limits) for temperature in cfg.answers.temperatures]
    openings = []
    if cfg.prompts is None:
        sampling_params(cfg.synthesize)
        openings = read_openings(Path(cfg.synthesize.openings or OPENINGS))
    drafter_method = None if cfg.drafter is None else method.of_checkpoint(cfg.drafter)
    torch.set_num_threads(cfg.num_threads or 1)

    processes = distributed.join(1, choose_device(cfg.model.device), data_parallel=True)
    target = cfg.model.load(processes, fastest=True)
    max_model_len = min(cfg.max_model_len, target.max_model_len)
    drafting = {} if cfg.drafter is None else {"model": cfg.drafter, "num_speculative_tokens": cfg.num_speculative_tokens}
    proposer = method.build(drafter_method or method.PLAIN, target, **drafting)
    engine = Engine(target, proposer, rejection.build("standard"), cfg.max_batch_size, max_model_len)
    prompts = Path(cfg.prompts) if cfg.prompts is not None else synthesize(cfg, engine, openings)
    conversations = [task for task in read_prompts(prompts, cfg.limit, target.tokenizer) if fits(engine, task)]
    if not conversations:
        raise ValueError(f"prompts={prompts}: no prompt leaves room for an answer within max_model_len={engine.max_model_len}")
    template = template_text(target.tokenizer.chat_template)
    header = {
        "made_by": f"specdec {__version__} train/prepare.py",
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "revision": cfg.model.revision,
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "drafter": None if drafter_method is None else [drafter_method, cfg.drafter, cfg.num_speculative_tokens],
        "prompts": {"file": prompts.name, "fingerprint": tasks.fingerprint(conversations), "count": len(conversations)},
        "synthesize": None if cfg.prompts is not None else config.plain(cfg.synthesize),
        "answers": config.plain(cfg.answers),
        "seed": cfg.seed,
    }
    count = SharedCount(processes, "answers")
    rows = open_rows(out, header, cfg.resume) if processes.is_first else None
    script.has_results(out, resumes=True)
    written = processes.from_first({row["id"] for row in rows.rows[1:]} if rows else None)
    rows = rows or open_shared(out, processes)
    with console.progress(len(conversations), processes.is_first, answers=len(written)) as advance:
        for place, params in enumerate(params_by_place):  # temperatures are dealt out to the conversations in turn
            dealt = conversations[place :: len(params_by_place)]
            share = processes.share([task for task in dealt if task.id not in written])
            for row in answer(engine, share, params, cfg.seed):
                rows.add(row)
                advance("answers", num_done=count.add(1))
        distributed.wait_for_all(processes, lambda: advance("answers", num_done=count.add(0)))
    if not processes.is_first:
        return rows.close()
    rows.take_parts()
    rows.sort({task.id: place for place, task in enumerate(conversations)})
    rows.close()
    num_tokens = sum(sum(row["loss_mask"]) for row in rows.rows[1:])
    console.show(f"{len(rows.rows) - 1} conversations, {num_tokens} supervised tokens, written to {out}")


def answer(engine: Engine, conversations: list[Task], params: SamplingParams, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of conversations as they are finished; last, those that outgrew the context, with the turns that fit."""
    unfinished: dict[str, list[Request]] = {}
    for task, turn, request in tasks.decode(engine, conversations, params, seed):
        unfinished.setdefault(task.id, []).append(request)
        if turn == len(task.turns):
            yield conversation_row(task, unfinished.pop(task.id), engine.target.tokenizer)
    for task in conversations:
        if task.id in unfinished:
            yield conversation_row(task, unfinished[task.id], engine.target.tokenizer)


def conversation_row(task: Task, requests: list[Request], tokenizer: Any) -> dict[str, Any]:
    """A conversation as its last request has it. Of an earlier answer, those tokens are supervised that the last prompt has as
    they were generated, up to the first that differs."""
    last = requests[-1]
    input_ids = [*last.prompt_token_ids, *last.output_token_ids]
    loss_mask = [0] * len(input_ids)
    rejected_mask = [0] * len(input_ids)
    messages = [{"role": "system", "content": task.system}] if task.system else []
    for turn, request in zip(task.turns, requests, strict=False):
        text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]
        first = len(request.prompt_token_ids)
        end = common_prefix_length(input_ids, [*request.prompt_token_ids, *request.output_token_ids])
        loss_mask[first:end] = [1] * (end - first)
        for place in request.stats.rejections:
            if first + place < end:
                rejected_mask[first + place] = 1
    row = {
        "id": task.id,
        "category": task.category,
        "messages": messages,
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "temperature": last.params.temperature,
        "finish_reason": last.finish_reason,
    }
    if any(any(request.stats.drafted) for request in requests):
        row["rejected_mask"] = rejected_mask
    return row | ({"tools": json.loads(task.tools)} if task.tools else {})


def read_prompts(path: Path, limit: int | None, tokenizer: Any) -> list[Task]:
    """The user turns of a prompt set, a system message in front of them, and the tools that may be called. Rows that cannot be
    used, and fields that nothing reads, are counted in a note."""
    if not path.is_file():
        raise ValueError(f"prompts={path}: no such file")
    conversations: list[Task] = []
    left_out: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    ids = data.UniqueIds()
    for where, row in data.rows(path, "train"):
        if isinstance(row, dict) and (row.get("turns") == [] or set(row) == {"header"}):
            continue  # a made-up turn that is not used, or the header
        try:
            prompt = conversation_without_answers(row, tokenizer)
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        unused.update(sorted(prompt.unused))
        turns = tuple(message["content"] for message in prompt.messages if message["role"] == "user")
        first = prompt.messages[0]
        system = first["content"] if first["role"] == "system" else None
        tools = json.dumps(prompt.tools) if prompt.tools else None
        name = ids.unique(str(row.get("id", where)))
        conversations.append(Task(name, str(row.get("category", "all")), turns, system, tools))
    if left_out and script.is_main_process():
        reasons = "; ".join(f"{count} with {reason}" for reason, count in left_out.most_common())
        print(f"note: {left_out.total()} rows of {path} were left out: {reasons}")
    if unused and script.is_main_process():
        print(f"note: {unused_note(unused)}")
    if not conversations:
        raise ValueError(f"prompts={path}: no row with user turns; give rows with one of {', '.join(tasks.PROMPTS)}")
    return conversations[:limit]


def fits(engine: Engine, task: Task) -> bool:
    """Whether the first turn leaves room for an answer; a note on stderr if it does not."""
    try:
        ids = tasks.first_prompt_ids(engine.target.tokenizer, task)
        engine.check(Request(task.id, ids, SamplingParams()))
    except ValueError as error:
        if script.is_main_process():
            print(f"note: left out: {error}", file=sys.stderr)
        return False
    return True


def template_text(template: Any) -> str:
    """A chat template, or several by name, as text."""
    if isinstance(template, str):
        return template
    return json.dumps(template, sort_keys=True) if template else ""
