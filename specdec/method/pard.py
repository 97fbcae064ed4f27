"""PARD (2504.18583): a small causal LM that makes all its tokens at once, `draft_model` with `parallel_drafting` in vLLM.

Behind the committed tokens come K-1 mask tokens; the last committed token and each of them draft one token, in one causal
forward. Mask tokens leave K and V behind that the next forward overwrites. Places do not see what those before them drafted, so
greedy drafts suit it best.

Training takes any causal LM and gives it mask tokens: `specdec.drafter.block`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specdec import sampling
from specdec.checkpoint import causal_lm, hf_common
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, MethodFacts, Serving
from specdec.drafter import unroll
from specdec.drafter.batch import Batch
from specdec.drafter.block import Depths
from specdec.method import draft_model
from specdec.method.draft_model import DraftModel
from specdec.model.target import CausalLM


class Architecture(draft_model.Architecture):
    """As a draft model's, and pard_token: whose embedding stands for tokens that are not there yet; one that the data never
    has."""

    pard_token: int | None = Field(None, ge=0)


class Objective(Depths):
    """As that of every drafter that makes its tokens in one pass; num_depths is the most tokens of a draft, and depth_warmup
    trains a draft model."""

    mask_outside_vocab: ClassVar[bool] = False


class Pard(DraftModel):
    """Settings as those of `draft_model`; pard_token: the mask token (an id of the draft model's), if the model's config.json
    does not name it."""

    name = "pard"
    facts = MethodFacts(
        runs_model=True,
        parallel_of="draft_model",
        train_script="pard",
        mask_key="pard_token",
        max_draft_key="num_depths",
        serving={"vllm": Serving("causal_lm", "draft_model")},
    )
    architecture_type = Architecture
    objective_type = Objective

    def __init__(
        self,
        target: CausalLM,
        model: str | CausalLM | Checkpoint,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
        draft_tensor_parallel_size: int | None = None,
        pard_token: int | None = None,
        use_heterogeneous_vocab: bool = False,
    ):
        super().__init__(
            target,
            model,
            num_speculative_tokens,
            draft_sample_method,
            max_model_len,
            revision,
            use_heterogeneous_vocab,
            draft_tensor_parallel_size,
        )
        if isinstance(model, Checkpoint):
            name, config, size = model.name, model.config, target.vocab_size
            mask, num_depths = config.get("pard_token"), None  # of what is trained, the objective says it
        else:
            name, config, size = self.model.name, vars(self.model.config), self.model.vocab_size
            mask, num_depths = causal_lm.mask_token(config), causal_lm.num_depths(config)
        mask = mask if pard_token is None else pard_token
        if mask is None:
            raise ValueError(
                f"{name} names no mask token ({', '.join(hf_common.MASK_KEYS)}); train it with train/pard.py, "
                "or give pard_token"
            )
        if not 0 <= mask < size:
            raise ValueError(f"pard_token={mask} of {name} is outside 0..{size - 1}, the rows of its embedding")
        if num_depths is not None and num_speculative_tokens > num_depths:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens} is over the {num_depths} that {name} was trained for; "
                "lower it"
            )
        self.pard_token, self.max_draft_tokens = mask, num_depths

    # ---------------------------------------------------------------- drafting

    def propose(self, context: Context) -> Draft:
        """All tokens of a draft from one pass. Probabilistic: each from its own law, which knows nothing of the others."""
        rows, draft_B = context.rows, self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        start_B, missing = self.uncached_tokens(context, draft_B)
        tokens = [np.r_[own, np.full(max(n - 1, 0), self.pard_token)] for own, n in zip(missing, draft_B, strict=True)]
        count_B, num_draft = np.array([len(own) for own in tokens]), int(draft_B.max())
        token_N = torch.from_numpy(np.concatenate(tokens)).to(context.last_token_B.device, non_blocking=True)
        # the last committed token and the mask tokens of every row that drafts
        row_N, place_N = np.nonzero(np.arange(num_draft) < draft_B[:, None])
        keep_N = (np.cumsum(count_B) - draft_B)[row_N] + place_N
        logits_NV = self.forward_tokens(rows, token_N, start_B, count_B, keep_N)
        at_N = [torch.from_numpy(x).to(logits_NV.device, non_blocking=True) for x in (row_N, place_N)]
        uniform_N = None
        if self.probabilistic:
            assert context.uniform_BK is not None
            uniform_N = context.uniform_BK[at_N[0], at_N[1]]
        drawn_N, law_NV, most_N = sampling.sample(logits_NV, context.temperature_B[at_N[0]], uniform_N)
        drafted_N, q_NV = self.to_target_vocab(drawn_N, law_NV)
        finite_BK = torch.ones(len(rows), num_draft, dtype=torch.bool, device=most_N.device)
        finite_BK.index_put_((at_N[0], at_N[1]), sampling.finite(most_N))
        token_BK = drafted_N.new_zeros(len(rows), num_draft).index_put_((at_N[0], at_N[1]), drafted_N)
        q_BKV = None
        if q_NV is not None:
            q_BKV = q_NV.new_zeros(len(rows), num_draft, q_NV.shape[1]).index_put_((at_N[0], at_N[1]), q_NV)
        confidence_BKF = None
        if context.return_confidence:
            odds_N = sampling.log_odds(logits_NV, context.temperature_B[at_N[0]])
            confidence_BKF = odds_N.new_zeros(len(rows), num_draft, 1).index_put_((at_N[0], at_N[1]), odds_N.unsqueeze(1))
        for b in np.flatnonzero(draft_B):
            self.cached_R[rows[b]] = int(context.length_B[b]), 0
        return Draft(token_BK, torch.from_numpy(draft_B), q_BKV, confidence_BKF=confidence_BKF, finite_BK=finite_BK)

    # ---------------------------------------------------------------- training

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        super().for_training(objective, init, feature_sample, warm_start)
        objective.check(self.num_speculative_tokens)
        self.config = self.config | {"num_depths": objective.num_depths, "pard_token": self.pard_token}

    def masks(self, count: int) -> Tensor:
        return torch.full((count,), self.pard_token, device=self.target.device)

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        plan: unroll.Plan = self.objective.plan(batch, num_steps, self.label_offset, seed)
        return plan
