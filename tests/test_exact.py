"""Greedy decoding in float32 gives Hugging Face's tokens, whatever drafts, however many rows: every file in conf/method."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import hub
from specdec import method as method_of
from specdec.checkpoint import native
from specdec.config import CONF, read
from specdec.core import Request
from specdec.drafter.base import Init
from specdec.engine import Engine
from specdec.measure import tasks
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def settings(name: str, target: CausalLM, **more: Any) -> dict[str, Any]:
    """A method as its YAML has it, drafting for (and where it needs a model, with) this target."""
    given = {key: value for key, value in read(CONF / "method" / f"{name}.yaml").items() if value is not None}
    given["method"] = given.pop("name")
    if name == "draft_model":
        given["model"] = str(target.path)
    if name == "pard":  # the target itself, of which some token stands for what is not there yet
        given |= {"model": str(target.path), "pard_token": 1}
    if name in ("eagle", "eagle3", "mlp", "mtp", "peagle"):
        given["model"] = drafter(name, target)
    if name == "hybrid":
        given["model"] = drafter("eagle3", target)
    if name == "extract_hidden_states":
        last = target.num_layers
        given["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, last]}}
        given |= {"shared_storage_path": tempfile.mkdtemp(), "include_output_tokens": True}
    return given | more


def drafter(name: str, target: CausalLM) -> str:
    """The directory of a drafter with random weights that nevertheless drafts what is accepted now and then."""
    directory = Path(tempfile.mkdtemp())
    own: Any = method_of.find(name)
    architecture = {"num_modules": 3} if name == "mtp" else {}
    checkpoint = own.init_checkpoint(target, architecture, Init(), np.arange(60, 200) if name == "eagle3" else None)
    native.save(directory, checkpoint, {}, "")
    return str(directory)


def build(name: str, target: CausalLM, **more: Any):
    return SpeculativeConfig(**settings(name, target, **more)).resolve().build(target)


@cache
def loaded(name: str) -> CausalLM:
    return CausalLM(name, "float32", "cpu")


@cache
def theirs(path: Path):
    # eager: in transformers 5.17 the sdpa path leaves out the soft cap of Gemma 2
    return hub.load_model(path, dtype=torch.float32, attn_implementation="eager").eval()


def generate(target: CausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = theirs(target.path).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def decode(engine: Engine, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
    requests = [
        Request(str(i), ids, SamplingParams(temperature=0, max_tokens=most))
        for i, (ids, most) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    done = {request.id: request.output_token_ids for request in engine.run(requests)}
    return [done[str(i)] for i in range(len(prompts))]


def tiny_prompts() -> list[list[int]]:
    """Repetitive text, so that lookups find drafts; lengths on both sides of a prefill chunk and of the sliding window."""
    rng = np.random.default_rng(7)
    phrase = rng.integers(97, 123, 9).tolist()
    lengths = (3, 130, 20, 64, 65, 9, 200, 31)
    return [(rng.integers(97, 123, 4).tolist() + phrase * 30)[:n] for n in lengths]


MAX_TOKENS = [40, 12, 40, 1, 25, 40, 30, 7]


@pytest.mark.parametrize("architecture", hub.TINY)
@pytest.mark.parametrize("method", METHODS)
def test_tiny(architecture: str, method: str) -> None:
    target, prompts = loaded(f"tiny-{architecture}"), tiny_prompts()
    want = [generate(target, ids, most) for ids, most in zip(prompts, MAX_TOKENS, strict=True)]
    for batch_size in (1, 3, 8):
        engine = Engine(target, *build(method, target), max_batch_size=batch_size, prefill_chunk_size=64)
        assert decode(engine, prompts, MAX_TOKENS) == want, f"batch size {batch_size}"


@pytest.mark.parametrize("scheme", ["block", "match"])
@pytest.mark.parametrize("method", METHODS)
def test_other_lossless_schemes_on_tiny(method: str, scheme: str) -> None:
    target, prompts = loaded("tiny-llama"), tiny_prompts()
    want = [generate(target, ids, most) for ids, most in zip(prompts, MAX_TOKENS, strict=True)]
    engine = Engine(target, *build(method, target, rejection_sample_method=scheme), max_batch_size=3)
    assert decode(engine, prompts, MAX_TOKENS) == want


@pytest.mark.embedded
@pytest.mark.parametrize("method", METHODS)
def test_smollm2(method: str) -> None:
    """Real prompts, one of them a second turn, one longer than a prefill chunk."""
    target = loaded(hub.DEFAULT)
    prompts = smollm2_prompts(target)
    max_tokens = [24, 16, 24, 8]
    want = smollm2_reference(tuple(max_tokens))
    for batch_size in (1, 3):
        engine = Engine(target, *build(method, target), max_batch_size=batch_size, prefill_chunk_size=64)
        assert decode(engine, prompts, max_tokens) == want, f"batch size {batch_size}"


def smollm2_prompts(target: CausalLM) -> list[list[int]]:
    chosen = {task.id: task for task in tasks.load(tasks.DEMO)}
    first = [tasks.prompt_ids(target.tokenizer, [chosen[i].turns[0]], []) for i in ("chat-02", "code-03", "extraction-01")]
    two_turns = next(task for task in chosen.values() if len(task.turns) > 1)
    return [*first, tasks.prompt_ids(target.tokenizer, list(two_turns.turns[:2]), ["Of course. Speak to them kindly."])]


@cache
def smollm2_reference(max_tokens: tuple[int, ...]) -> list[list[int]]:
    target = loaded(hub.DEFAULT)
    return [generate(target, ids, most) for ids, most in zip(smollm2_prompts(target), max_tokens, strict=True)]


@pytest.mark.embedded
@pytest.mark.parametrize("method", [m for m in METHODS if m != "none"])
def test_match_is_plain_sampling_on_smollm2(method: str) -> None:
    """At temperature 0.8, token for token, though the forwards have other shapes: rows do not depend on their company."""
    target = loaded(hub.DEFAULT)
    more = {"draft_sample_method": "probabilistic"} if method == "draft_model" else {}
    outputs = []
    for name, scheme, extra in (("none", "standard", {}), (method, "match", more)):
        engine = Engine(target, *build(name, target, rejection_sample_method=scheme, **extra), max_batch_size=3)
        requests = [
            Request(str(i), ids, SamplingParams(temperature=0.8, max_tokens=24), seed=i)
            for i, ids in enumerate(smollm2_prompts(target))
        ]
        outputs.append({request.id: request.output_token_ids for request in engine.run(requests)})
    assert outputs[0] == outputs[1]
