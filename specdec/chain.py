"""Drafters that read the target's hidden states and draft a chain: what EAGLE-1 and EAGLE-3 have in common.

At position i such a drafter sees the pair (token i+1, target state i) and predicts token i+2: ids are shifted left by one,
positions are not. `propose` first runs over the pairs of the newly committed tokens, which overwrites what was made of
rejected drafts, then goes on with its own states in place of the target's. `loss` unrolls the same `step` over training data,
with the rows of `specdec.training.unroll`. A method adds its module: `fuse`, `step` and a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec import linear, sampling
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.core import GREEDY_BELOW, Checked, Context, Draft, Request
from specdec.kv import SlotCache, Window, end_to_end, slot_attention
from specdec.target import CausalLM
from specdec.training import losses, unroll
from specdec.training.features import Batch
from specdec.training.losses import Teacher

PREFILL_CHUNK = 512
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query [A, H, W], key and value [N, G, W] -> [A, H, W]


class Objective(Checked):
    """How the unrolled steps are weighed. Names after `speculators`, where it has them.

    ttt_steps: unrolled steps; ttt_step_loss_decay: step k weighs decay^k; ttt_warmup: for this share of the run only one step
    is unrolled; loss: weights of ce, kl, tv; mask_outside_vocab: a row whose likeliest target token the drafter cannot draft
    teaches nothing.
    """

    what: ClassVar[str] = "train.objective key"

    ttt_steps: int = Field(7, ge=1)
    ttt_step_loss_decay: float = Field(0.8, gt=0)
    ttt_warmup: float = Field(0.0, ge=0, le=1)
    loss: losses.Terms = Field({"ce": 1.0})
    mask_outside_vocab: bool = True

    def steps_at(self, progress: float) -> int:
        return 1 if progress < self.ttt_warmup else self.ttt_steps


class Init(Checked):
    """What a new drafter begins with.

    lm_head: the target's rows, or random; train_lm_head: false keeps them; scale_features: target states are divided by their
    root mean square per dimension while training, since a few dimensions are hundreds of times larger than the rest; this is
    folded into `fc` when the drafter is saved. Where a norm comes first it does nothing.
    """

    what: ClassVar[str] = "train.init key"

    lm_head: Literal["target", "random"] = "target"
    train_lm_head: bool = True
    scale_features: bool = True

    @model_validator(mode="after")
    def _not_frozen_noise(self) -> Init:
        if self.lm_head == "random" and not self.train_lm_head:
            raise ValueError("train.init.lm_head=random and train_lm_head=false keep a random output layer; change one")
        return self


class Geometry(Checked):
    """The shape of a Llama-like layer; what is not given is the target's."""

    what: ClassVar[str] = "train.drafter.geometry key"

    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    rms_norm_eps: float | None = Field(None, gt=0)
    max_position_embeddings: int | None = Field(None, ge=1)
    rope_parameters: dict[str, Any] | None = None

    def of(self, target: CausalLM) -> LlamaConfig:
        """Width and vocabulary are always the target's, whose embedding is shared."""
        theirs = target.config
        heads = theirs.num_attention_heads
        rope = dict(getattr(theirs, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        rope = dict(rope.get("full_attention", rope))  # Gemma 3 has one of them for each kind of layer
        rope.pop("partial_rotary_factor", None)
        facts = {
            "intermediate_size": theirs.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // heads,
            "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
            "max_position_embeddings": target.max_model_len,
            "rope_parameters": rope,
        } | self.model_dump(exclude_none=True)
        if facts["num_attention_heads"] % facts["num_key_value_heads"]:
            raise ValueError(
                f"num_attention_heads={facts['num_attention_heads']} is not a multiple of "
                f"num_key_value_heads={facts['num_key_value_heads']}"
            )
        if facts["head_dim"] % 2:
            raise ValueError(f"head_dim={facts['head_dim']} is odd; positions are rotations of pairs, so give an even one")
        try:
            shape = LlamaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, hidden_act="silu", **facts)
            LlamaRotaryEmbedding(shape)
            return shape
        except Exception as error:  # transformers has rules of its own, and errors of several lines
            given = ", ".join(f"{key}={value}" for key, value in self.model_dump(exclude_none=True).items())
            raise ValueError(f"geometry {given} is no Llama layer: {' '.join(str(error).split())[:200]}") from None

    def filled(self, target: CausalLM) -> dict[str, Any]:
        """Every key with the value that it comes to."""
        shape = self.of(target)
        return {key: getattr(shape, key) for key in type(self).model_fields}


class Attention(nn.Module):
    """Projections of one attention layer; how the scores come about is the caller's: a slot cache, or unrolled training."""

    layer_idx = 0  # its place in the drafter's slot cache

    def __init__(self, config: Any, in_features: int, qk_norm: bool):
        super().__init__()
        self.width: int = config.head_dim
        self.q_proj = nn.Linear(in_features, config.num_attention_heads * self.width, bias=False)
        self.k_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.width, config.hidden_size, bias=False)
        if qk_norm:
            self.q_norm = LlamaRMSNorm(self.width, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.width, config.rms_norm_eps)

    def forward(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """rows: the tokens whose output is wanted; keys and values are made of all."""
        wanted = x_ND if rows is None else x_ND[rows]
        query = self.q_proj(wanted).unflatten(-1, (-1, self.width))
        key = self.k_proj(x_ND).unflatten(-1, (-1, self.width))
        value = self.v_proj(x_ND).unflatten(-1, (-1, self.width))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query = _rotate(query, cos_N if rows is None else cos_N[rows], sin_N if rows is None else sin_N[rows])
        key = _rotate(key, cos_N, sin_N)
        return self.o_proj(attend(query.to(value.dtype), key.to(value.dtype), value).flatten(1))


def _rotate(x_NHW: Tensor, cos_NW: Tensor, sin_NW: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x_NHW, x_NHW[:, :1], cos_NW, sin_NW, unsqueeze_dim=1)[0]


class ChainDrafter(nn.Module):
    """Settings as in vLLM. model: the directory of a checkpoint, a hub id, or a Checkpoint; draft_sample_method: `greedy`
    (argmax at every temperature) or `probabilistic` (drawn at the request's temperature, the law recorded); max_model_len:
    pairs that a row may hold in the drafter's cache, beyond which it is not drafted for.
    """

    name: ClassVar[str]
    objective_type: ClassVar[type[Checked]] = Objective
    needs_logits = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        target: CausalLM,
        model: str | Checkpoint,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
    ):
        super().__init__()
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing"
            )
        if draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method={draft_sample_method!r}: use 'greedy' or 'probabilistic'")
        if max_model_len is not None and not 2 <= max_model_len <= target.max_model_len:
            raise ValueError(f"max_model_len={max_model_len} of the draft is outside 2..{target.max_model_len}, the target's")
        checkpoint = model if isinstance(model, Checkpoint) else native.load(model, revision)
        checkpoint.check(self.name, target)
        self.target = target
        self.num_speculative_tokens = num_speculative_tokens
        self.probabilistic = self.needs_noise = draft_sample_method == "probabilistic"
        self.max_model_len = max_model_len or target.max_model_len
        self.objective: Any = self.objective_type()
        self.shared: dict[str, Any] = {}  # frozen parts of the target, and what follows from a config: not registered
        self.feature_scale: Tensor | None
        self.register_buffer("feature_scale", None)

        self.config = dict(checkpoint.config)
        shape: Any = self.build(self.config)
        with target.device:
            self.shared["rotary"] = LlamaRotaryEmbedding(shape)
        self.lm_head: nn.Linear | None = None
        num_draft_vocab = self.config.get("draft_vocab_size", target.vocab_size)
        if self.config.get("own_lm_head"):
            self.lm_head = nn.Linear(shape.hidden_size, num_draft_vocab, bias=False)
        if num_draft_vocab < target.vocab_size:
            self.register_buffer("d2t", torch.zeros(num_draft_vocab, dtype=torch.int64))
        if checkpoint.tensors is None:
            start(self, seed=0)
        else:
            native.fill(self, checkpoint)
            self._check_vocabulary(checkpoint.name)
        self.to(target.device)
        self.cache = SlotCache([(shape.num_key_value_heads, shape.head_dim)], target.dtype, target.device)
        self.ready = False

    def _check_vocabulary(self, name: str) -> None:
        """Each draft id must be another token of the target: a law that loses mass is not lossless."""
        if (ids := self.vocab_ids) is None:
            return
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.target.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"{name}: d2t does not map its {len(ids)} draft ids to different tokens of 0..{self.target.vocab_size - 1}"
            )

    # ---------------------------------------------------------------- what a method adds

    attention: Attention

    def build(self, config: dict[str, Any]) -> LlamaConfig:
        """Make the modules that the config asks for, and set `hidden_layers`; returns the shape of the layer."""
        raise NotImplementedError

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        """[N, D] from the target's states of `hidden_layers`."""
        raise NotImplementedError

    def step(
        self, embedding_ND: Tensor, hidden_ND: Tensor, position_N: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass of the drafter: [A, D] states for the output layer, and [A, D] those fed to the next step."""
        raise NotImplementedError

    # ---------------------------------------------------------------- shared parts

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, token_N: Tensor) -> Tensor:
        """The target's own embedding, frozen."""
        with torch.no_grad():
            embedded: Tensor = self.target.embedding(token_N)
        return embedded.to(self.dtype)

    def draft_logits(self, state_ND: Tensor) -> Tensor:
        """[N, draft vocabulary]. Without a head of its own, the target's: whatever it does after it (a cap) is left out."""
        if self.lm_head is not None:
            return self.lm_head(state_ND)
        head = self.target.model.get_output_embeddings()
        if head.bias is None:
            return head(state_ND.to(self.target.dtype))
        return F.linear(state_ND.to(self.target.dtype), self.target.head_rows()[0])

    @property
    def vocab_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids; None if all can be drafted. Kept as EAGLE-3 has it, an offset for each draft id."""
        offset = getattr(self, "d2t", None)
        return None if offset is None else offset + torch.arange(len(offset), device=offset.device)

    def cos_sin(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, W] each. Kept in float32 whatever the drafter's type: large positions need it."""
        cos, sin = self.shared["rotary"](torch.zeros((), device=position_N.device), position_N.unsqueeze(0))
        return cos[0], sin[0]

    # ---------------------------------------------------------------- drafting

    def more_bytes(self, rows: int, slots: int) -> int:
        return self.cache.more_bytes(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        """Besides the cache: the weights become the target's type, and on a CPU are packed. Training is over then."""
        self.cache.reserve(rows, slots)
        if self.ready:
            return
        self.requires_grad_(False)
        for module in self.modules():
            for key, parameter in module.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(parameter.to(self.target.dtype), requires_grad=False))
        if linear.can_pack(self.target.dtype, self.target.device):
            linear.pack(self)
        self.ready = True

    def begin(self, row: int, request: Request) -> None:
        """Nothing to do: the first `propose` brings the prompt's states."""

    def end(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        """Nothing to undo: the next request overwrites the row."""

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Greedy: argmax drafts. Probabilistic: drawn by inverse CDF from softmax(logits / T), q_BKV recorded."""
        rows, length_B, device = context.rows, context.length_B, context.last_token_B.device
        # pair i stands at position i; the last of K drafts needs pair length + K - 3
        room_B = np.clip(self.max_model_len + 2 - length_B, 0, None)
        draft_B = np.minimum(context.max_draft_B, room_B)
        num_draft = int(draft_B.max())
        if num_draft == 0:
            return Draft(context.last_token_B.new_zeros(len(rows), 0), torch.zeros(len(rows), dtype=torch.int64))

        assert context.hidden is not None
        # catch up: a pair for every token committed since the last call; a row's prompt, all but its last pair, on its own
        start_B, count_B, hidden = length_B - 1, np.zeros(len(rows), dtype=np.int64), []
        tokens: list[Tensor] = []
        for b in np.flatnonzero(draft_B):
            fused, ids = self.fuse(context.hidden[b]), torch.from_numpy(context.tokens(int(b))[-len(context.hidden[b]) :])
            first, ids = int(length_B[b]) - 1 - len(fused), ids.to(device, non_blocking=True)
            if len(fused) > self.num_speculative_tokens + 1:
                for a in range(0, len(fused) - 1, PREFILL_CHUNK):
                    c = min(a + PREFILL_CHUNK, len(fused) - 1)
                    self._forward(rows[b : b + 1], ids[a:c], fused[a:c], np.array([first + a]), np.array([c - a]))
                fused, ids = fused[-1:], ids[-1:]
            start_B[b], count_B[b] = length_B[b] - 1 - len(fused), len(fused)
            hidden.append(fused)
            tokens.append(ids)
        token_N, hidden_ND = torch.cat(tokens), torch.cat(hidden)

        temperature_B1 = context.temperature_B.unsqueeze(1)
        drafted, laws = [], []
        for k in range(num_draft):
            state_BD, feedback_BD = self._forward(rows, token_N, hidden_ND, start_B, count_B)
            logits_BV = self.draft_logits(state_BD)
            if self.probabilistic:
                assert context.uniform_BK is not None
                tempered_BV = logits_BV.float() / temperature_B1.clamp(min=GREEDY_BELOW)
                argmax_BV = sampling.one_hot(logits_BV.max(-1).indices, logits_BV.shape[-1])
                q_BV = torch.where(temperature_B1 < GREEDY_BELOW, argmax_BV, tempered_BV.softmax(-1))
                drawn_B = sampling.inverse_cdf(q_BV, context.uniform_BK[:, k])
                laws.append(self._whole(q_BV))
            else:
                drawn_B = logits_BV.max(-1).indices
            drafted.append(drawn_B if self.vocab_ids is None else self.vocab_ids[drawn_B])
            start_B, count_B = start_B + count_B, (draft_B > k + 1).astype(np.int64)
            token_N = end_to_end(drafted[-1].unsqueeze(1), count_B)
            hidden_ND = end_to_end(feedback_BD.unsqueeze(1), count_B)
        q_BKV = torch.stack(laws, 1) if self.probabilistic else None
        return Draft(torch.stack(drafted, 1), torch.from_numpy(draft_B), q_BKV)

    def _forward(
        self, rows: np.ndarray, token_N: Tensor, hidden_ND: Tensor, start_B: np.ndarray, count_B: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """States [B, D] of each row's last pair, for the output layer and for the next step; of a row without pairs,
        anything."""
        first, last = int(rows[0]), int(rows[-1])
        start_R, count_R = np.zeros(last + 1 - first, dtype=np.int64), np.zeros(last + 1 - first, dtype=np.int64)
        start_R[rows - first], count_R[rows - first] = start_B, count_B
        window = Window(self.cache, first, start_R, count_R)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out, _ = slot_attention(self.attention, q, k, v, None, scaling=self.attention.width**-0.5, window=window)
            return out[0]

        states = self.step(self.embed(token_N), hidden_ND, window.slot_N, attend)
        last_N = torch.from_numpy((np.cumsum(count_B) - 1).clip(0)).to(token_N.device, non_blocking=True)
        return states[0][last_N], states[1][last_N]

    def _whole(self, q_BV: Tensor) -> Tensor:
        """A law over the draft vocabulary as one over the target's."""
        if (ids := self.vocab_ids) is None:
            return q_BV
        return q_BV.new_zeros(len(q_BV), self.target.vocab_size).index_copy_(1, ids, q_BV)

    # ---------------------------------------------------------------- training

    def forward(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, Tensor]:
        """`loss`, under the name that data-parallel wrappers call."""
        return self.loss(batch, progress, seed)

    def loss(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, Tensor]:
        """Sum of the losses of all supervised rows and steps, weighed by step; [K, 7] sums per step, for metrics.

        progress: how much of the run is behind, 0 to 1; seed: of what is random, if anything is.
        """
        num_steps = self.objective.steps_at(progress)
        plan = unroll.plan(batch.length_B, batch.mask_N, num_steps)
        if not len(plan.taught):  # nothing to learn from; other processes wait for gradients all the same
            nothing = sum(
                (p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=self.target.device)
            )
            return nothing, torch.zeros(num_steps, 7, device=self.target.device)
        states = self.unrolled(batch, plan, seed)
        supervised = [
            state[self._index(step.supervised)] if len(step.supervised) < len(state) else state
            for state, step in zip(states, plan.steps, strict=True)
        ]
        teacher = self.teacher(batch, plan)
        weights = [self.objective.ttt_step_loss_decay**k for k in range(num_steps)]
        head = teacher.weight_VD if self.lm_head is None else self.lm_head.weight
        assert head is not None
        total, sums, hits = losses.distill(
            supervised, [step.taught for step in plan.steps], head, teacher, weights, self.objective.loss
        )
        return self.regression(total, supervised[0], teacher, plan), torch.cat([sums, self._chains(hits, plan)], 1)

    def noised(self, hidden_ND: Tensor, batch: Batch, seed: int | str) -> Tensor:
        """The states that training reads; a method may blur them."""
        return hidden_ND

    def regression(self, total: Tensor, state_MD: Tensor, teacher: Teacher, plan: unroll.Plan) -> Tensor:
        """What a method adds to the loss; nothing here."""
        return total

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, attention: Any = unroll.attention) -> list[Tensor]:
        """[A, D] states for the output layer at every step, of the rows of the plan. attention: the efficient or readable
        one."""
        token_N, first_N = batch.token_N, plan.first_A
        position_N = self._index(np.arange(len(first_N)) - first_N)
        scaling = self.attention.width**-0.5
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        hidden = self.noised(self.fuse(batch.hidden(self.hidden_layers)), batch, seed)
        # the last row of a document gets the first token of the next one; nobody looks at that row
        embedding = self.embed(token_N.roll(-1))
        position, rows = position_N, self._index(plan.steps[0].rows)
        for k, step in enumerate(plan.steps):
            if k:
                rows, kept = self._index(step.rows), self._index(step.kept)
                if len(step.rows) < len(hidden):
                    hidden = hidden[kept]
                    keys[1:], values[1:] = [x[kept] for x in keys[1:]], [x[kept] for x in values[1:]]
                embedding, position = self.embed(token_N[rows + 1 + k]), position_N[rows] + k

            def attend(query: Tensor, key: Tensor, value: Tensor, of: Any = step.rows) -> Tensor:
                keys.append(key)
                values.append(value)
                return attention(query, keys[0], values[0], keys[1:], values[1:], of, first_N, scaling)

            state, hidden = self.step(embedding, hidden, position, attend, None if k else rows)
            states.append(state)
        return states

    @torch.no_grad()
    def teacher(self, batch: Batch, plan: unroll.Plan) -> Teacher:
        """The target's law on the taught positions."""
        place = self._index(plan.taught)
        if "head" not in self.shared:
            weight, bias = self.target.head_rows(self.vocab_ids)
            self.shared["head"] = weight.clone() if self.vocab_ids is not None else weight, bias
            if self.vocab_ids is not None:
                index = torch.full((self.target.vocab_size,), -1, dtype=torch.int64, device=self.target.device)
                index[self.vocab_ids] = torch.arange(len(self.vocab_ids), device=self.target.device)
                self.shared["draft_index"] = index
        label, token = batch.argmax_N[place], batch.token_N[place + 1]
        if self.vocab_ids is not None:
            label, token = self.shared["draft_index"][label], self.shared["draft_index"][token]
        last = batch.hidden([self.target.num_layers])[:, 0][place]
        with torch.autocast(last.device.type, enabled=False):
            state_QD = self.target.final_norm(last.to(self.target.dtype))
        count_Q = torch.ones(len(label), device=label.device)
        if batch.weight_B is not None:
            count_Q = self._index(batch.weight_B.repeat(batch.length_B))[place].float()
        if self.objective.mask_outside_vocab:
            count_Q = count_Q * (label >= 0)
        weight_VD, bias_V = self.shared["head"]
        return Teacher(state_QD, weight_VD, bias_V, self.target.cap, batch.logsumexp_N[place], label, token, count_Q)

    def _chains(self, hits: list[Tensor], plan: unroll.Plan) -> Tensor:
        """[K, 3] per step: rows whose tokens were all hits up to here, rows whose earlier ones were, and rows with all
        steps."""
        counts = []
        whole: Any = None
        joint: Any = None
        for hit, step in zip(hits, plan.steps, strict=True):
            if whole is None:
                reached, whole = torch.ones_like(hit), np.ones(len(hit), dtype=bool)
            else:
                before = step.hit_before.clip(0)
                whole = (step.hit_before >= 0) & whole[before] if len(whole) else np.zeros(len(hit), dtype=bool)
                reached = joint[self._index(before)] & self._index(whole) if len(joint) else torch.zeros_like(hit)
            joint = hit & reached
            counts.append(torch.stack([joint.sum(), reached.sum(), torch.full_like(joint.sum(), int(whole.sum()))]))
        return torch.stack(counts).float()

    def _index(self, values: np.ndarray | None) -> Tensor:
        assert values is not None
        return torch.from_numpy(values).to(self.target.device, non_blocking=True)

    # ---------------------------------------------------------------- at rest

    @classmethod
    def fresh(
        cls, target: CausalLM, architecture: dict[str, Any], init: Init, vocab_ids: np.ndarray | None = None, seed: int = 0
    ) -> Checkpoint:
        """A drafter with random weights, but for what `init` takes from the target.

        architecture: keys of the method's own; vocab_ids: ascending target ids of the draft vocabulary, None for all.
        """
        if vocab_ids is not None and (np.diff(vocab_ids) <= 0).any():
            raise ValueError("vocab_ids must be ascending and distinct")
        config = cls.resolved(target, architecture) | {
            "own_lm_head": init.train_lm_head or vocab_ids is not None,
            "draft_vocab_size": target.vocab_size if vocab_ids is None else len(vocab_ids),
        }
        drafter = cls(target, Checkpoint(cls.name, config, native.facts(target), None), 1)
        start(drafter, seed)
        if vocab_ids is not None:
            drafter.get_buffer("d2t").copy_(torch.from_numpy(vocab_ids - np.arange(len(vocab_ids))))
            drafter._check_vocabulary("vocab_ids")
        with torch.no_grad():
            if drafter.lm_head is None:
                drafter.adopt(target)
            elif init.lm_head == "target":
                drafter.lm_head.weight.copy_(target.head_rows(drafter.vocab_ids)[0])
                drafter.adopt(target)
        return drafter.exported()

    @classmethod
    def resolved(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """The config of a new drafter: every key with the value that it comes to. Raises ValueError for what cannot be."""
        raise NotImplementedError

    def adopt(self, target: CausalLM) -> None:
        """What else to take from the target where the output layer is the target's."""

    fc: nn.Linear  # its last columns read the target's states

    def for_training(self, objective: Checked, init: Init, statistics: Tensor | None = None, warm: bool = False) -> None:
        """float32 masters that gradients reach. statistics: [tokens, T, D] target states to scale features by; warm: the
        weights were trained before, so scaling must leave the function as it is."""
        self.objective = objective
        self.float().requires_grad_(True)
        if self.lm_head is not None:
            self.lm_head.requires_grad_(init.train_lm_head)
        if init.scale_features and statistics is not None and self.scales_features():
            rms = statistics.float().pow(2).mean(0).sqrt().flatten().clamp(min=1e-3).to(self.target.device)
            self.feature_scale = 1 / rms
            if warm:
                with torch.no_grad():
                    self.fc.weight[:, -len(rms) :] *= rms

    def scales_features(self) -> bool:
        """Whether target states reach `fc` as they are."""
        return False

    def exported(self, tensors: dict[str, Tensor] | None = None) -> Checkpoint:
        """The drafter as a checkpoint: scaling folded in. tensors: its state, where that is gathered from several processes."""
        tensors = {key: tensor.detach().cpu() for key, tensor in (self.state_dict() if tensors is None else tensors).items()}
        if (scale := tensors.pop("feature_scale", None)) is not None:
            weight = tensors["fc.weight"].clone()
            weight[:, -len(scale) :] *= scale
            tensors["fc.weight"] = weight
        return Checkpoint(self.name, self.config, native.facts(self.target), tensors)


def start(module: nn.Module, seed: int) -> None:
    """Random weights: matrices from N(0, 0.02^2), norms at 1."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        with torch.no_grad():
            if parameter.ndim > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=noise))
            else:
                parameter.fill_(1)
