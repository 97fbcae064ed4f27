"""What must hold on whatever device there is; `make gpu` runs this file on CUDA, CI on the CPU.

Greedy decoding in float32 is exact for every method; above temperature 0 the joint distribution is the target's; the rejection
schemes give the verdicts on the device that they give on the host.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from specdec import hub, rejection, sampling
from specdec.core import Draft, Request
from specdec.engine import Engine
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.distributions import chi_square
from support.methods import MAX_TOKENS, METHODS, decode, settings, tiny_prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# on the CPU test_exact.py holds the same methods, models and prompts against the same answers
ELSEWHERE_ON_CPU = [pytest.mark.prove] if DEVICE == "cpu" else []
NUM_REQUESTS = 2000 if DEVICE == "cuda" else 700


@cache
def loaded(name: str) -> CausalLM:
    return CausalLM(name, "float32", DEVICE)


@cache
def reference(name: str) -> list[list[int]]:
    model = hub.load_model(hub.resolve(name), dtype=torch.float32).to(DEVICE).eval()
    answers = []
    for prompt, most in zip(tiny_prompts(), MAX_TOKENS, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", [pytest.param(name, marks=ELSEWHERE_ON_CPU) for name in ("llama", "gemma3")])
def test_greedy_is_exact(architecture: str, method: str, enforce_eager: bool) -> None:
    target = loaded(f"tiny-{architecture}")
    built = SpeculativeConfig(**settings(method, target)).resolve().build(target)
    engine = Engine(target, *built, max_batch_size=3, enforce_eager=enforce_eager)
    assert decode(engine, tiny_prompts(), MAX_TOKENS) == reference(f"tiny-{architecture}")


@pytest.mark.parametrize("scheme", ["standard", "block", "match", "gumbel"])
def test_joint_distribution(scheme: str) -> None:
    """Three tokens of a real model under top_k = 3, drafted with probabilities by another: 27 outcomes, enumerated."""
    target = loaded("tiny-llama")
    prompt = tiny_prompts()[2]
    params = SamplingParams(temperature=0.9, top_k=3, max_tokens=3)
    distribution = joint_distribution(target, prompt, params)
    config = SpeculativeConfig(
        method="draft_model",
        model="tiny-qwen3",
        num_speculative_tokens=2,
        draft_sample_method="probabilistic",
        rejection_sample_method=scheme,
    )
    engine = Engine(target, *config.resolve().build(target), max_batch_size=256)
    counts = dict.fromkeys(distribution, 0)
    for request in engine.run([Request(str(i), prompt, params, seed=i) for i in range(NUM_REQUESTS)]):
        counts[tuple(request.output_token_ids)] += 1  # an outcome outside the distribution is a KeyError
    observed = torch.tensor(list(counts.values()))
    statistic, threshold = chi_square(observed, torch.tensor(list(distribution.values())) * observed.sum())
    assert statistic < threshold


def joint_distribution(target: CausalLM, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    cache = target.new_cache()
    cache.reserve(1, len(prompt) + 3)

    def probs_after(tokens: list[int]) -> torch.Tensor:
        out = target.prefill(cache, 0, np.array(prompt + tokens), 0, chunk=512)
        return sampling.probs(out.logits, [params], torch.zeros(1, dtype=torch.int64, device=DEVICE))[0].cpu()

    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens or 0):
        distribution = {
            (*tokens, token): weight * float(p_V[token])
            for tokens, weight in distribution.items()
            for p_V in [probs_after(list(tokens))]
            for token in p_V.nonzero().flatten().tolist()
        }
    return distribution


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("name", ["standard", "block", "match", "synthetic"])
def test_verdicts_are_those_of_the_host(name: str, one_hot: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 500
    k = 4
    vocab = 50
    p_BJV = torch.rand(rows, k + 1, vocab, generator=generator).pow(4).softmax(-1)
    q_BKV = torch.rand(rows, k, vocab, generator=generator).pow(4).softmax(-1)
    u_BJ = torch.rand(rows, k + 1, generator=generator, dtype=torch.float64)
    token_BK = sampling.inverse_cdf(q_BKV, torch.rand(rows, k, generator=generator, dtype=torch.float64))
    length_B = torch.arange(rows) % (k + 1)
    params = {"synthetic_acceptance_length": 3.0} if name == "synthetic" else {}
    verifier = rejection.build(name, k, **params)

    def verdict(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        draft = Draft(token_BK.to(device), length_B, None if one_hot else q_BKV.to(device))
        got = verifier(draft, p_BJV.to(device), u_BJ.to(device))
        return got.num_accepted_B.cpu(), got.token_B.cpu()

    for here, there in itertools.pairwise([verdict("cpu"), verdict(DEVICE)]):
        assert torch.equal(here[0], there[0])
        assert torch.equal(here[1], there[1])
