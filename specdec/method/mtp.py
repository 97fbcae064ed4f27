"""Multi-token prediction: a decoder layer of the target's own kind that goes on from the target's last state.

    x  = eh_proj(concat[enorm(embedding), hnorm(h)])       h: the target's last state, then the output of the module before
    h' = norm(layer(x)),   logits = target's lm_head(h')

One module that is re-used K times (FastMTP, 2509.18362) drafts as EAGLE does, on its own states. With a module for every token
of the draft (DeepSeek-V3, 2412.19437) module k runs over the same positions as module 0, on tokens shifted by k more: its keys
at the last k positions depend on drafts and are computed again in the next step. A target that ships such modules, which
transformers leaves out, drafts with them when no `model` is given; their names: `specdec.checkpoint.mtp`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.checked import Checked, first_line
from specdec.checkpoint import hf_common, native
from specdec.checkpoint import mtp as native_modules
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, MethodFacts
from specdec.drafter import losses, unroll
from specdec.drafter.autoregressive import PREFILL_CHUNK, AutoregressiveDrafter
from specdec.drafter.base import Init, UnrolledObjective
from specdec.drafter.batch import Batch
from specdec.model import fused
from specdec.model.attention import Attention
from specdec.model.target import CausalLM


class Architecture(Checked):
    """The parts of the drafter.

    num_modules: 1 is re-used for every token of a draft; more are one for each.
    last_hidden_kind: whether the target's last state is read after its final norm or before.
    hidden_feedback: a module reads the output of the one before it (own), or the target's state again.
    zero_first_embedding: the pair at position 0 has an embedding of zeros (DeepSeek-V3).
    draft_vocab_size: the most frequent tokens of the training data; null: all, as a target's own modules have it.
    """

    what: ClassVar[str] = "train.drafter key"

    num_modules: int | None = Field(None, ge=1)
    last_hidden_kind: Literal["post_norm", "pre_norm"] = "post_norm"
    hidden_feedback: Literal["own", "target"] = "own"
    zero_first_embedding: bool | None = None
    draft_vocab_size: int | None = Field(None, ge=1)


class Objective(UnrolledObjective):
    """As EAGLE-3's, but for the weights of the steps.

    ttt_steps: tokens that are trained; num_modules if there are several.
    ttt_step_loss_decay: step k weighs decay^k, divided so that the weights sum to 1.
    """

    ttt_steps: int = Field(3, ge=1)
    ttt_step_loss_decay: float = Field(0.6, gt=0)
    loss: losses.Terms = Field({"nll": 1.0})

    def weights(self, num_steps: int) -> list[float]:
        total = sum(self.ttt_step_loss_decay**k for k in range(self.ttt_steps))
        return [self.ttt_step_loss_decay**k / total for k in range(num_steps)]


class FullAttention:
    """An attention without window and softcap: a module attends to its whole row, whatever the target's layers do."""

    def __init__(self, inner: Attention):
        self.inner = inner

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.inner.write_kv(layer, key_NGW, value_NGW)

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self.inner.attend(layer, query_NHW, scaling or query_NHW.shape[-1] ** -0.5)


class Module(nn.Module):
    """One module. block: a decoder layer of the target's kind; layer: its number in the slot cache."""

    def __init__(self, target: CausalLM, layer: int):
        super().__init__()
        width = target.hidden_size
        self.enorm = _norm(target)
        self.hnorm = _norm(target)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = _layer(target, layer)
        self.norm = _norm(target)

    def forward(self, embedding_ND: Tensor, hidden_ND: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedding_ND), self.hnorm(hidden_ND)], -1))
        out = self.block(x.unsqueeze(0), position_embeddings=cos_sin, attention_mask=None, attention=FullAttention(attention))
        return self.norm((out[0] if isinstance(out, tuple) else out)[0])


def _norm(target: CausalLM) -> nn.Module:
    """A norm of the target's kind with initial weights."""
    norm = copy.deepcopy(target.final_norm)
    norm.load_state_dict(type(norm)(target.hidden_size).state_dict())
    return norm.float()


def _layer(target: CausalLM, number: int) -> nn.Module:
    """A decoder layer of the target's kind with initial weights."""
    layer = type(fused.plain_layer(target.layers[-1]))(target.config, native_modules.kind_of_layer(target.config))
    attention: Any = layer.self_attn
    attention.layer_idx = number
    return layer.float()


def _unsupported(target: CausalLM, error: Exception) -> ValueError:
    """For a target whose layers do not run on their own; those of most targets do."""
    return ValueError(
        f"{target.name}: method mtp drafts with decoder layers of the target's own kind, and those of model_type "
        f"{target.config.model_type!r} do not run one by one ({first_line(error)}); use another method, such as eagle3"
    )


class MTP(AutoregressiveDrafter):
    name = "mtp"
    facts = MethodFacts(
        runs_model=True,
        aliases=("*_mtp",),
        train_script="mtp",
        max_draft_key="num_modules",
        reuses_one_module=True,
        serving={"vllm": "mtp", "sglang": "NEXTN"},
        served_in_target=True,
    )
    architecture_type = Architecture
    objective_type = Objective

    def __init__(
        self,
        target: CausalLM,
        model: str | Checkpoint | None = None,
        num_speculative_tokens: int = 3,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
        tree_topk: int | None = None,
        tree_depth: int | None = None,
        tree_builder: str | None = None,
        speculative_token_tree: str | list[list[int]] | None = None,
    ):
        super().__init__(
            target, model, num_speculative_tokens, draft_sample_method, max_model_len, revision,
            tree_topk, tree_depth, tree_builder, speculative_token_tree,
        )  # fmt: skip
        if self.tree is not None and len(self.mtp) > 1:
            raise ValueError(
                f"this drafter has {len(self.mtp)} modules, and trees are built for one that is used again; leave tree_topk "
                "and speculative_token_tree out"
            )

    @classmethod
    def example_checkpoint(cls, target: CausalLM) -> Checkpoint:
        return cls.init_checkpoint(target, {"num_modules": 3}, Init())

    @classmethod
    def load_checkpoint(cls, target: CausalLM, name: str | None, revision: str | None) -> Checkpoint:
        """Without a name, the modules that the target ships; a name may be that of a directory with such modules."""
        directory = target.path if name is None else native.find(name, revision)
        config = hf_common.read_config(directory)
        return native.load(directory) if config.get("format") == native.FORMAT else native_modules.read(directory, config)

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        config = Architecture(**architecture).model_dump(exclude={"draft_vocab_size"})
        zero_first = bool(config["zero_first_embedding"])
        return config | {"num_modules": config["num_modules"] or 1, "zero_first_embedding": zero_first}

    def build(self, config: dict[str, Any]) -> None:
        self.architecture = Architecture(**config)
        self.hidden_layers = (self.target.num_layers,)
        try:
            Module(self.target, 0)
        except Exception as error:  # of a class that takes other arguments than a config and a number
            raise _unsupported(self.target, error) from None
        self.target_layer = native_modules.kind_of_layer(self.target.config)
        num_modules = self.architecture.num_modules or 1
        if 1 < num_modules < self.chain_length:
            raise ValueError(
                f"num_speculative_tokens={self.chain_length}, and this drafter has a module for each of "
                f"{num_modules} tokens; lower it"
            )
        self.max_draft_tokens = num_modules if num_modules > 1 else None
        self.mtp = nn.ModuleList(Module(self.target, layer) for layer in range(num_modules))
        # of each row, the end of the positions that were processed, and the last states, which later modules read again; the
        # states of a prompt begin at position 0, so nothing of the row's request before is read
        self.last_states: dict[int, tuple[int, Tensor]] = {}

    def prepare(self) -> None:
        super().prepare()
        try:  # with two tokens: not every class runs with the arguments that a layer gets here
            with torch.no_grad():
                state_ND = torch.zeros(2, self.target.hidden_size, dtype=self.dtype, device=self.target.device)
                plan = unroll.plan(np.array([2]), np.ones(2, dtype=bool), 1)
                self.step(state_ND, state_ND, torch.arange(2, device=self.target.device), unroll.UnrolledAttention(plan))
        except Exception as error:
            raise _unsupported(self.target, error) from None

    def kv_shapes(self) -> list[tuple[int, ...]]:
        return [self.target.kv_shapes()[self.target_layer]] * len(self.mtp)

    def cos_sin(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """[1, N, W] each: the target's own."""
        rotary = self.target.model.get_decoder().rotary_emb
        # where kinds of layers have different frequencies (Gemma 3), those of the layer whose kind the modules are
        types = getattr(self.target.config, "layer_types", None) if hasattr(rotary, "layer_types") else None
        kind = () if types is None else (types[self.target_layer],)
        cos, sin = rotary(torch.zeros((), device=position_N.device), position_N.unsqueeze(0), *kind)
        return cos, sin

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        if self.architecture.last_hidden_kind == "post_norm":
            return self.last_state(hidden_NTD[:, -1])
        return hidden_NTD[:, -1].to(self.dtype)

    def step(
        self,
        embedding_ND: Tensor,
        hidden_ND: Tensor,
        position_N: Tensor,
        attention: Attention,
        rows: Tensor | None = None,
        module: int = 0,
    ) -> tuple[Tensor, Tensor]:
        if not len(hidden_ND):  # every document ends before this step; a layer of transformers takes no empty input
            return hidden_ND, hidden_ND
        if self.architecture.zero_first_embedding:
            embedding_ND = embedding_ND * (position_N > 0).unsqueeze(1).to(embedding_ND.dtype)
        state = self.mtp[module](embedding_ND, hidden_ND, self.cos_sin(position_N), attention)
        feedback = state if self.architecture.hidden_feedback == "own" else hidden_ND
        return (state, feedback) if rows is None else (state[rows], feedback[rows])

    # ---------------------------------------------------------------- a module for every token

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        if len(self.mtp) == 1:
            return super().propose(context)
        draft_B = self.draft_lengths(context)
        num_later = len(self.mtp) - 1
        start_B = context.length_B - 1
        count_B = np.zeros_like(start_B)
        tokens: list[np.ndarray] = []
        hidden: list[Tensor] = []
        for b, fused_ND in self.fused_rows(context, range(len(context.rows))):
            fused_ND, start = self._with_last_states(context, b, fused_ND)
            if not draft_B[b]:
                continue
            ids = context.tokens(b)
            num_settled = len(fused_ND) - num_later  # pairs that every module has the tokens for
            # as many as one step settles are processed below, with those of the other rows; but drafts shorter than there are
            # modules do not reach the later ones
            if num_settled > (len(self.mtp) + 1 if int(draft_B.max()) == len(self.mtp) else 0):
                self._process_settled(context.rows[b : b + 1], ids, fused_ND[:num_settled], start)
                fused_ND = fused_ND[num_settled:]
                start += num_settled
            start_B[b] = start
            count_B[b] = len(fused_ND)
            hidden.append(fused_ND)
            tokens.append(ids[start + 1 :])
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        sampler = self.draft_sampler(context)
        hidden_ND = torch.cat(hidden)
        committed_N = self._index(np.concatenate(tokens))
        pair_N = np.arange(len(hidden_ND))
        row_N = np.repeat(np.arange(len(count_B)), count_B)
        first_N = (np.cumsum(count_B) - count_B)[row_N]
        last_B = self._index((np.cumsum(count_B) - 1).clip(0))
        for k in range(int(draft_B.max())):
            # module k reads the token k places after the pair's own: a committed one, or beyond these a draft token
            ahead_N = pair_N - first_N + k
            draft_position_N = ahead_N - count_B[row_N]
            token_N = committed_N[self._index(np.minimum(ahead_N, count_B[row_N] - 1) + first_N)]
            if k:
                draft_N = torch.stack(sampler.tokens, 1)[self._index(row_N), self._index(draft_position_N.clip(0))]
                token_N = torch.where(self._index(draft_position_N >= 0), draft_N, token_N)
            embedding_ND = self.embed(token_N)
            state_ND, hidden_ND = self.forward_pairs(context.rows, embedding_ND, hidden_ND, start_B, count_B, pair_N, module=k)
            sampler.sample(self.draft_logits(state_ND[last_B]))
        return sampler.draft(draft_B)

    def _with_last_states(self, context: Context, b: int, fused_ND: Tensor) -> tuple[Tensor, int]:
        """The states that later modules read again and those of row b since its last call; and the position of the first."""
        row = int(context.rows[b])
        end = int(context.length_B[b]) - 1
        if row in self.last_states:
            last_end, last_ND = self.last_states[row]
            num_again = len(last_ND) - (last_end - end + len(fused_ND))
            fused_ND = torch.cat([last_ND[: max(num_again, 0)], fused_ND])
        self.last_states[row] = end, fused_ND[1 - len(self.mtp) :]
        return fused_ND, end - len(fused_ND)

    @torch.inference_mode()
    def catch_up(self, context: Context) -> bool:
        if len(self.mtp) == 1:
            return super().catch_up(context)
        for b, fused_ND in self.fused_rows(context, range(len(context.rows))):
            fused_ND, start = self._with_last_states(context, b, fused_ND)
            self._process_settled(context.rows[b : b + 1], context.tokens(b), fused_ND[: 1 - len(self.mtp)], start)
        return True

    def _process_settled(self, row: np.ndarray, ids: np.ndarray, fused_ND: Tensor, start: int) -> None:
        """Write every module's K and V of one row's pairs from position `start` on, all of whose tokens are committed."""
        for a in range(0, len(fused_ND), PREFILL_CHUNK):
            hidden_ND = fused_ND[a : a + PREFILL_CHUNK]
            start_B = np.array([start + a])
            count_B = np.array([len(hidden_ND)])
            pair_N = np.arange(len(hidden_ND))
            for k in range(len(self.mtp)):
                token_N = self._index(ids[start + a + 1 + k :][: len(hidden_ND)])
                embedding_ND = self.embed(token_N)
                _, hidden_ND = self.forward_pairs(row, embedding_ND, hidden_ND, start_B, count_B, pair_N, module=k)

    # ---------------------------------------------------------------- training

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        if len(self.mtp) > 1:  # all of them are trained, and weigh 1 together
            objective = objective.model_copy(update={"ttt_steps": len(self.mtp)})
        super().for_training(objective, init, feature_sample, warm_start)

    def num_steps(self, progress: float) -> int:
        return super().num_steps(progress) if len(self.mtp) == 1 else len(self.mtp)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """A module for every token: each over all rows, since all are keys to those after them."""
        if len(self.mtp) == 1:
            return super().unrolled(batch, plan, seed, kernel)
        position_N = self._index(np.arange(len(plan.first_N)) - plan.first_N)
        hidden = self.fuse(batch.hidden(self.hidden_layers))
        states = []
        for k, step in enumerate(plan.steps):
            attention = unroll.UnrolledAttention(plan, kernel)
            # at the end of a document come tokens of the next one, at pairs that are no rows
            state, hidden = self.step(self.embed(batch.token_N.roll(-1 - k)), hidden, position_N, attention, module=k)
            states.append(state[self._index(step.rows)])
        return states
