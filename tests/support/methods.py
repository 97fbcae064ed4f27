"""Every method of conf/method with what it needs to draft, and contexts for `propose`."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from specdec import method as method_of
from specdec.checkpoint import native
from specdec.config import CONF, read
from specdec.core import Context, Proposer, Request
from specdec.drafter.base import Init
from specdec.engine import Engine
from specdec.method.mtp import MTP
from specdec.model.target import CausalLM
from specdec.params import SamplingParams

SLOTS = 256


HANDED: WeakKeyDictionary[Proposer, dict[int, int]] = WeakKeyDictionary()  # by row: tokens whose states a proposer was given


@cache
def tiny() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


def context(
    proposer: Proposer,
    texts: dict[int, list[int]],
    max_draft: list[int] | None = None,
    temperature: float = 0.0,
    return_confidence: bool = False,
) -> Context:
    """What the engine hands over: committed tokens of some cache rows, in the order of the rows.

    The columns beyond a row's tokens hold garbage, as they do after a rejected draft. Hidden states are those of the tokens
    since the proposer's last call; where a test asks again about the same tokens, the last one's once more.
    """
    rows = np.array(sorted(texts))
    token_RL = np.full((rows[-1] + 1, SLOTS), 255, dtype=np.int64)
    for row, tokens in texts.items():
        token_RL[row, : len(tokens)] = tokens
    k = proposer.num_speculative_tokens
    hidden = None
    if proposer.hidden_layers:
        handed = HANDED.setdefault(proposer, {})
        hidden = []
        for row in rows.tolist():
            hidden_LTD = states(tuple(texts[row][:-1]), proposer.hidden_layers)
            hidden.append(hidden_LTD[min(handed.get(row, 0), len(hidden_LTD) - 1) :])
            handed[row] = len(hidden_LTD)
    generator = torch.Generator().manual_seed(len(rows))
    params = SamplingParams(temperature=temperature, max_tokens=64)
    return Context(
        return_confidence=return_confidence,
        rows=rows,
        requests=[Request(str(row), texts[row], params) for row in rows],
        token_RL=token_RL,
        length_B=np.array([len(texts[row]) for row in rows]),
        max_draft_B=np.array([k] * len(rows) if max_draft is None else max_draft),
        last_token_B=torch.tensor([texts[row][-1] for row in rows]),
        uniform_BK=torch.rand(len(rows), k, generator=generator, dtype=torch.float64),
        hidden=hidden,
        logits_BV=torch.zeros(len(rows), tiny().vocab_size) if proposer.needs_logits else None,
    )


@cache
def states(tokens: tuple[int, ...], layers: tuple[int, ...]) -> torch.Tensor:
    """[n, T, D] what the target's layers hold after a prefill of these tokens."""
    target_cache = tiny().new_cache()
    target_cache.reserve(1, len(tokens))
    out = tiny().prefill(target_cache, 0, np.array(tokens), 0, 512, layers)
    assert out.hidden_NTD is not None
    return out.hidden_NTD


def text(seed: int, length: int) -> list[int]:
    """A phrase over and over, so that lookups find drafts."""
    phrase = np.random.default_rng(seed).integers(97, 123, 7).tolist()
    return (phrase * 40)[:length]


METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def settings(name: str, target: CausalLM, **more: Any) -> dict[str, Any]:
    """A method as its YAML has it, drafting for (and where it needs a model, with) this target."""
    values = {key: value for key, value in read(CONF / "method" / f"{name}.yaml").items() if value is not None}
    values["method"] = values.pop("name")
    if "include_output_tokens" in values:  # the answer's states too
        values["include_output_tokens"] = True
    return values | example_settings(name, target) | more


TREE_METHODS = [name for name in METHODS if "tree_topk" in method_of.settings(name)]


def tree_settings(name: str, target: CausalLM, **more: Any) -> dict[str, Any]:
    """A method that drafts trees of seven nodes."""
    trees = {"tree_topk": 3, "tree_depth": 3, "num_speculative_tokens": 7}
    if name == "mtp":  # its example has a module for each token
        directory = Path(tempfile.mkdtemp())
        native.save(directory, MTP.init_checkpoint(target, {"num_modules": 1}, Init()), {}, "")
        more = {"model": str(directory)} | more
    return settings(name, target) | trees | more


def example_settings(name: str, target: CausalLM) -> dict[str, Any]:
    """What its YAML leaves to the user, such as the directory of a drafter with random weights that is right now and then."""
    proposer: Any = method_of.find(name)
    settings: dict[str, Any] = proposer.example_settings(target, Path(tempfile.mkdtemp()))
    return settings


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


MAX_TOKENS = [24, 12, 20, 1, 16, 24, 18, 7]
