"""The MLP speculator (Wertheimer et al. 2404.19124): a chain of small layers without attention, one for every token ahead.

    s_0 = h                                    the target's last state after its final norm   (scale_input: rms(h) / sqrt 2)
    s_i = gelu(ln_i(proj_i(s_{i-1}) + (w_e / w_s) emb_i(x_i)))        x_1 the last token, then the draft tokens
    logits_i = head_i(s_i),     w_s = 0.5^(0.5 / n),   w_e = sqrt((1 - w_s^2) inner / 2)

Formulas and tensor names are those of the IBM checkpoints that vLLM loaded up to 0.32. Two settings are not theirs: reading the
target's embedding, and a draft vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec.checked import Checked
from specdec.core import Context, Draft, MethodFacts
from specdec.drafter import unroll
from specdec.drafter.base import Drafter
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import ChainObjective
from specdec.drafter.tree import Level
from specdec.model.target import CausalLM

EPS = 1e-6


class Architecture(Checked):
    """The parts of the drafter.

    n_predict: heads, the most tokens of a draft.
    inner_dim: width of the states; null: the target's.
    tie_weights: one emb, ln and head for all tokens, and one proj from the second on.
    scale_input: see the module.
    own_embedding: false reads the target's embedding, frozen.
    draft_vocab_size: the most frequent tokens of the training data; null: all, which is what IBM's format can hold.
    """

    what: ClassVar[str] = "train.drafter key"

    n_predict: int = Field(3, ge=1)
    inner_dim: int | None = Field(None, ge=1)
    tie_weights: bool = True
    scale_input: bool = True
    own_embedding: bool = True
    draft_vocab_size: int | None = Field(None, ge=1)


class Objective(ChainObjective):
    """What is minimised, as every drafter of several tokens has it, and:

    mask_outside_vocab: rows whose likeliest target token cannot be drafted are left out of the loss.
    """

    mask_outside_vocab: bool = False


class Norm(nn.Module):
    """Divides by the root mean square, then scales and shifts."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.weight + self.bias


def rms(x: Tensor) -> Tensor:
    exact = x.float()
    return (exact * (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


class MLP(Drafter):
    name = "mlp"
    facts = MethodFacts(
        runs_model=True,
        aliases=("mlp_speculator",),
        train_script="mlp",
        max_draft_key="n_predict",
        defaults_to_max=True,
        serving={"vllm": "mlp_speculator"},
        serving_note="vLLM 0.33 has no MLP speculator any more: the class is there up to 0.32, and the engine for it up to "
        "0.9.2.",
    )
    architecture_type = Architecture
    objective_type = Objective

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        recipe = Architecture(**architecture)
        inner = recipe.inner_dim or target.hidden_size
        if not recipe.own_embedding and inner != target.hidden_size:
            raise ValueError(
                f"own_embedding=false reads the target's embedding, {target.hidden_size} wide, and inner_dim={inner}; "
                f"leave inner_dim out, or give it an embedding of its own"
            )
        return recipe.model_dump(exclude={"draft_vocab_size"}) | {"inner_dim": inner}

    def build(self, config: dict[str, Any]) -> None:
        architecture = Architecture(**config)
        inner = int(self.resolve_config(self.target, architecture.model_dump())["inner_dim"])
        self.hidden_layers = (self.target.num_layers,)
        self.inner_dim = inner
        self.num_heads = architecture.n_predict
        self.max_draft_tokens = architecture.n_predict
        self.scale_input = architecture.scale_input
        if inner != self.target.hidden_size and not self.config.get("own_lm_head"):
            raise ValueError(
                f"inner_dim={inner} does not fit the target's output layer ({self.target.hidden_size} wide); "
                "train.init.train_lm_head=true gives the drafter one of its own"
            )
        if self.chain_length > self.num_heads:
            raise ValueError(
                f"num_speculative_tokens={self.chain_length}, and this MLP speculator has n_predict={self.num_heads} "
                "heads; lower it"
            )
        copies = 1 if architecture.tie_weights else self.num_heads
        widths = [self.target.hidden_size] + [inner] * min(self.num_heads - 1, copies)
        num_embeddings = copies if architecture.own_embedding else 0
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(Norm(inner) for _ in range(copies))
        self.emb = nn.ModuleList(nn.Embedding(self.target.vocab_size, inner) for _ in range(num_embeddings))
        self.head = nn.ModuleList()
        state_weight = 0.5 ** (0.5 / self.num_heads)
        self.embedding_weight = ((1 - state_weight**2) * inner / 2) ** 0.5 / state_weight
        self.init_std = inner**-0.5

    def make_head(self, num_draft_vocab: int) -> None:
        self.head.extend(nn.Linear(self.inner_dim, num_draft_vocab, bias=False) for _ in range(len(self.ln)))

    def output_layers(self) -> list[Any]:
        return list(self.head)

    def heads(self) -> list[Tensor | None]:
        return [head.weight for head in self.output_layers()] or [None]

    def step(self, k: int, state_ND: Tensor, token_N: Tensor) -> Tensor:
        """[N, inner] state of head k, from the states before it and the tokens that it reads."""
        embedded = self.emb[min(k, len(self.emb) - 1)](token_N) if len(self.emb) else self.embed(token_N)
        mixed = self.proj[min(k, len(self.proj) - 1)](state_ND) + self.embedding_weight * embedded
        return F.gelu(self.ln[min(k, len(self.ln) - 1)](mixed))

    scaled_weight = "proj.0.weight"

    def features(self, hidden_NTD: Tensor) -> Tensor:
        state = self.last_state(hidden_NTD[:, -1])
        return rms(state) / 2**0.5 if self.scale_input else state

    def head_logits(self, k: int, state_ND: Tensor) -> Tensor:
        return self.head[min(k, len(self.head) - 1)](state_ND) if len(self.head) else self.draft_logits(state_ND)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        assert context.hidden is not None
        state_BD = self.scaled_features(torch.cat([states[-1:] for states in context.hidden]))
        token_B = context.last_token_B
        if self.tree is not None:
            return self._propose_tree(context, draft_B, self.step(0, state_BD, token_B))
        sampler = self.draft_sampler(context)
        for k in range(int(draft_B.max())):
            state_BD = self.step(k, state_BD, token_B)
            token_B = sampler.sample(self.head_logits(k, state_BD))
        return sampler.draft(draft_B)

    def _propose_tree(self, context: Context, draft_B: np.ndarray, state_BD: Tensor) -> Draft:
        state_ND = state_BD
        count_B = np.ones_like(draft_B)

        def expand(level: Level) -> Tensor:
            nonlocal state_ND, count_B
            above_ND = state_ND[self._index(level.parent_place(count_B))]
            state_ND = self.step(level.depth + 1, above_ND, self._index(level.token_N))
            count_B = level.count_B
            return self.head_logits(level.depth + 1, state_ND)

        return self.grower(context, draft_B).grow(self.head_logits(0, state_BD), expand)

    def num_steps(self, progress: float) -> int:
        return self.num_heads

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0) -> list[Tensor]:
        rows = self._index(plan.steps[0].rows)
        state = self.scaled_features(batch.hidden(self.hidden_layers)[rows])
        states = []
        for k, step in enumerate(plan.steps):
            if k and len(step.rows) < len(state):
                state = state[self._index(step.from_prev)]
            state = self.step(k, state, batch.token_N[self._index(step.rows + 1 + k)])
            states.append(state)
        return states
