"""How good a drafter is while it trains: its loss on validation samples, and what the engine accepts of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoint import native
from specdec.core import Policy, Proposer, Request
from specdec.drafter.batch import Batch, Sample
from specdec.engine import Engine
from specdec.measure import stats
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy import calibration
from specdec.policy.calibration import ConfidenceRecorder
from specdec.rejection import Verifier
from specdec.training.state import TrainState

TEXT_PROMPT = 64  # tokens, as in the second stage of the MLP speculator


@torch.no_grad()
def validation_metrics(
    run: TrainState, features: Callable[[Sequence[Sample]], Batch], samples: Sequence[Sample]
) -> dict[str, Any]:
    """Loss and accuracies on validation samples, with all steps unrolled. Every process computes the same."""
    if not samples:
        return {}
    run.model.eval()
    losses = []
    sums = []
    for i in range(0, len(samples), run.settings.micro_batch_size):
        batch = features(samples[i : i + run.settings.micro_batch_size])  # outside of autocast: the target's own precision
        with run.autocast():
            loss, batch_sums = run.model(batch)
        losses.append(loss)
        sums.append(batch_sums)
    run.model.train()
    num_supervised = sum(map(run.num_supervised, samples))
    metrics = sum(sums[1:], sums[0]).metrics()
    return {"val_loss": float(sum(losses)) / max(num_supervised, 1)} | {f"val_{key}": x for key, x in metrics.items()}


def acceptance(
    target: CausalLM,
    proposer: Proposer,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    max_batch_size: int = 8,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Acceptance metrics of the engine when it decodes the prompts greedily with this drafter."""
    engine = Engine(target, proposer, verifier, max_batch_size, policy=policy)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(str(i), list(ids), params) for i, ids in enumerate(prompts)]
    pooled = stats.pool([request.stats for request in engine.run(requests)])
    keys = ("mean_acceptance_length", "tokens_per_step", "acceptance_rate_per_position", "conditional_acceptance_per_position")
    return {key: pooled[key] for key in keys}


def calibrated(recorder: ConfidenceRecorder, saved: Path) -> dict[str, Any]:
    """Fit temperatures of the confidence to what was recorded, and add them to the checkpoint in a directory. Returns what the
    confidence is worth with them, on the same prompts."""
    table = recorder.table()
    temperature_K = calibration.fit_temperatures(*table)
    native.add_to_config(saved, confidence_temperatures=temperature_K.round(4).tolist())
    return calibration.quality(*table, temperature_K)


def prompts_of(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Prompts of the first `count` samples: the tokens before the first supervised one; of text that is supervised from its
    first token on, its beginning."""
    prompts = []
    for sample in samples[:count]:
        length = int(sample.mask_n.argmax()) or min(TEXT_PROMPT, len(sample.token_n) // 2)
        prompts.append(sample.token_n[:length].tolist())
    return prompts
