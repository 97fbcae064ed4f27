"""What Hugging Face's `generate` gives, greedily and in float32: for tiny models and for SmolLM2."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from specdec import hub
from specdec.measure import tasks
from specdec.model.target import CausalLM
from support.methods import MAX_TOKENS, tiny_prompts
from support.targets import loaded


@cache
def reference_model(path: Path):
    # eager: in transformers 5.17 the sdpa path leaves out the soft cap of Gemma 2
    return hub.load_model(path, dtype=torch.float32, attn_implementation="eager").eval()


def generate(target: CausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference_model(target.path).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def tiny_reference(name: str) -> list[list[int]]:
    target = loaded(name)
    return [generate(target, ids, most) for ids, most in zip(tiny_prompts(), MAX_TOKENS, strict=True)]


def smollm2_prompts(target: CausalLM) -> list[list[int]]:
    chosen = {task.id: task for task in tasks.load(tasks.DEMO)}
    first = [tasks.prompt_ids(target.tokenizer, [chosen[i].turns[0]], []) for i in ("chat-02", "code-03", "extraction-01")]
    two_turns = next(task for task in chosen.values() if len(task.turns) > 1)
    return [*first, tasks.prompt_ids(target.tokenizer, list(two_turns.turns[:2]), ["Of course. Speak to them kindly."])]


@cache
def smollm2_reference(max_tokens: tuple[int, ...]) -> list[list[int]]:
    target = loaded(hub.DEFAULT)
    return [generate(target, ids, most) for ids, most in zip(smollm2_prompts(target), max_tokens, strict=True)]
