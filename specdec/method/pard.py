"""PARD (2504.18583): a small causal LM that drafts a block in one pass, `draft_model` with `parallel_drafting` in vLLM.

A row's entries are its committed tokens; the last of them and K-1 mask tokens draft a token each, in one causal forward. The
next forward overwrites K and V of mask tokens. The rest, and how any causal LM learns it: `specdec.drafter.block`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specdec.checkpoint import causal_lm, hf_common
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, MethodFacts
from specdec.drafter.block import BlockLayout, DepthDrafter, DepthObjective
from specdec.method import draft_model
from specdec.method.draft_model import DraftModel
from specdec.model.target import CausalLM


class Architecture(draft_model.Architecture):
    """As a draft model's. pard_token: the token whose embedding masks have; one that the data never has."""

    pard_token: int | None = Field(None, ge=0)


class Objective(DepthObjective):
    """As that of every drafter that drafts a block in one pass: num_depths is the most tokens of a draft, and depth_warmup
    trains a draft model."""

    mask_outside_vocab: ClassVar[bool] = False


class Pard(DepthDrafter, DraftModel):
    """Settings as those of `draft_model`; pard_token: the mask token (an id of the draft model's), if the model's config.json
    does not name it."""

    name = "pard"
    facts = MethodFacts(
        runs_model=True,
        parallel_of="draft_model",
        train_script="pard",
        mask_key="pard_token",
        max_draft_key="num_depths",
        serving={"vllm": "draft_model"},
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
        tree_topk: int | None = None,
        tree_depth: int | None = None,
        tree_builder: str | None = None,
        speculative_token_tree: str | list[list[int]] | None = None,
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
            tree_topk,
            tree_depth,
            tree_builder,
            speculative_token_tree,
        )
        if isinstance(model, Checkpoint):  # in training the objective limits the draft
            name = model.name
            vocab_size = target.vocab_size
            mask = model.config.get("pard_token")
            num_depths = None
        else:
            name = self.model.name
            vocab_size = self.model.vocab_size
            mask = causal_lm.mask_token(vars(self.model.config))
            num_depths = causal_lm.num_depths(vars(self.model.config))
        mask = mask if pard_token is None else pard_token
        if mask is None:
            raise ValueError(
                f"{name} names no mask token ({', '.join(hf_common.MASK_KEYS)}); train it with train/pard.py, "
                "or give pard_token"
            )
        if not 0 <= mask < vocab_size:
            raise ValueError(f"pard_token={mask} of {name} is outside 0..{vocab_size - 1}, the rows of its embedding")
        self.limit_drafts(num_depths, name)
        self.set_tree(tree_topk, tree_depth, tree_builder, speculative_token_tree)  # no deeper than that
        self.pard_token = mask

    def masks(self, count: int) -> Tensor:
        """[count] mask tokens."""
        return torch.full((count,), self.pard_token, device=self.target.device)

    def block_logits(self, context: Context, draft_B: np.ndarray) -> tuple[Tensor, BlockLayout]:
        start_B, uncached = self.uncached_tokens(context, draft_B)
        num_uncached_B = np.array([len(tokens) for tokens in uncached])
        layout = BlockLayout(num_uncached_B, np.maximum(draft_B - 1, 0), draft_B, self.target.device)
        token_N = layout.put_committed(self.masks(layout.num_places), self._index(np.concatenate(uncached)))
        logits_NV = self.forward_tokens(context.rows, token_N, start_B, layout.length_B, layout.query_N)
        for b in np.flatnonzero(draft_B):
            self.cached_R[context.rows[b]] = int(context.length_B[b]), 0
        return logits_NV, layout

    @classmethod
    def example_settings(cls, target: CausalLM, directory: Path) -> dict[str, Any]:
        return {"model": str(target.path), "pard_token": target.vocab_size - 1}

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        super().for_training(objective, init, feature_sample, warm_start)
        self.config = self.config | {"pard_token": self.pard_token}
