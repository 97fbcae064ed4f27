"""A separate, smaller causal LM drafts (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Any Hugging Face causal LM with the target's vocabulary. It keeps a slot cache of its own; `propose` first runs over the tokens
committed since its last call (which overwrites what was rejected), then goes on token by token on its own drafts.

With `use_heterogeneous_vocab` the vocabulary may be another one (Timor et al. 2502.05202, token-level intersection). It then
drafts the tokens that both have, renormalised, and reads one token for each of the target's, so that positions are the same;
inside are its own ids, outside the target's (`specdec/drafter/shared_vocab.py`).

Trained, it begins as some layers of the target, or as another LM, and learns what the target said (nll) or its whole law (kl,
tv, ce). It stays the transformers model that it is: in training another attention object keeps documents apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from specdec import hub
from specdec.checked import Checked
from specdec.checkpoint import causal_lm
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, MethodFacts, Request, StatelessProposer
from specdec.drafter import block, losses, shared_vocab, unroll
from specdec.drafter.base import DraftSampler, check_drafting
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import OneStepObjective, UnrolledDrafter
from specdec.model.contract import decoder_of
from specdec.model.distributed import SINGLE
from specdec.model.kv import pack_ragged
from specdec.model.target import CausalLM, load_weights, longrope_limit, scale_logits

PREFILL_CHUNK = 512


class Architecture(Checked):
    """What a new draft model begins as: another LM, or layers of the target.

    num_hidden_layers: the target's first so many, a quarter of them unless given; layer_ids: these instead; model, revision:
    a directory, a hub id or an embedded name of an LM with the target's vocabulary.
    """

    what: ClassVar[str] = "train.drafter key"

    num_hidden_layers: int | None = Field(None, ge=1)
    layer_ids: list[int] | None = None
    model: str | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Architecture:
        if self.model is not None and (self.num_hidden_layers is not None or self.layer_ids is not None):
            raise ValueError("train.drafter.model is a whole model; leave num_hidden_layers and layer_ids out, or the model")
        if self.layer_ids is not None and self.num_hidden_layers not in (None, len(self.layer_ids)):
            raise ValueError(
                f"train.drafter.num_hidden_layers={self.num_hidden_layers}, and layer_ids are {len(self.layer_ids)}; give one"
            )
        return self

    def layers_of(self, target: CausalLM) -> list[int]:
        """Ascending ids of the target's layers."""
        ids, most = self.layer_ids, target.num_layers
        if ids is None:
            count = self.num_hidden_layers or max(most // 4, 1)
            if count > most:
                raise ValueError(f"train.drafter.num_hidden_layers={count}: {target.name} has {most}")
            return list(range(count))
        if not ids or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < most:
            raise ValueError(f"train.drafter.layer_ids={ids} must be ascending layers of {target.name}, 0..{most - 1}")
        return ids


class Init(Checked):
    """train_embedding: false keeps the embedding and the output layer as they are, which on a small model is most of the
    cost."""

    what: ClassVar[str] = "train.init key"

    train_embedding: bool = True


class Objective(OneStepObjective):
    """loss: weights of nll (the likelihood of the data) and of ce, kl, tv (the target's distribution), over the whole
    vocabulary. With nll alone the target never runs."""

    loss: losses.Terms = Field({"nll": 1.0})


class DraftModel(StatelessProposer, UnrolledDrafter):
    """Settings as in vLLM.

    model: a directory (a training run's too), a hub id, an embedded name, a loaded model, or a checkpoint to train;
    draft_sample_method: `greedy` (argmax, at every temperature: the law of the draft is one-hot) or `probabilistic` (drawn at
    the request's temperature, the law recorded); max_model_len: of the drafter's own context, beyond which a row is not
    drafted for; use_heterogeneous_vocab: the vocabularies may differ, and what both have is drafted;
    draft_tensor_parallel_size: 1 (each of the target's processes holds the whole drafter) or the target's (it is cut like the
    target, the default).
    """

    name = "draft_model"
    max_model_len: int
    facts = MethodFacts(
        runs_model=True,
        model_hint="give a directory, a hub id or an embedded name of a smaller model with the target's vocabulary "
        "(use_heterogeneous_vocab=true: with another)",
        train_script="draft_model",
        serving={"vllm": "draft_model", "sglang": "STANDALONE"},
    )
    architecture_type: ClassVar[type[Architecture]] = Architecture
    objective_type: ClassVar[type[Checked]] = Objective
    init_type: ClassVar[type[Checked]] = Init
    num_confidence_features = 1
    label_offset = 1

    def __init__(
        self,
        target: CausalLM,
        model: str | CausalLM | Checkpoint,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
        use_heterogeneous_vocab: bool = False,
        draft_tensor_parallel_size: int | None = None,
    ):
        super().__init__()
        check_drafting(num_speculative_tokens, draft_sample_method)
        self.target, self.shared, self.objective = target, {}, self.objective_type()
        self.num_speculative_tokens = num_speculative_tokens
        self.probabilistic = self.needs_uniforms = draft_sample_method == "probabilistic"
        self.vocabulary: shared_vocab.SharedVocab | None = None
        if isinstance(model, Checkpoint):
            if use_heterogeneous_vocab:
                raise ValueError(f"use_heterogeneous_vocab=true: {model.name} is trained in the target's own ids; leave it out")
            same_vocabulary(target, model.config["hf_config"]["vocab_size"], model.name)
            self.config = model.config
            self.lm = causal_lm.build(model).to(target.device)
            return
        self.model = model if isinstance(model, CausalLM) else _load(target, model, revision, draft_tensor_parallel_size)
        if use_heterogeneous_vocab:
            self.vocabulary = shared_vocab.intersect(target, self.model)
        else:
            same_vocabulary(target, self.model.vocab_size, self.model.name, "; or give use_heterogeneous_vocab=true")
            if self.model is not target:
                same_tokens(target, lambda: self.model.tokenizer, self.model.name, "give use_heterogeneous_vocab=true")
        if max_model_len is not None and not 1 <= max_model_len <= self.model.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} of the draft is outside 1..{self.model.max_model_len}, "
                f"the range of {self.model.name}"
            )
        self.max_model_len = max_model_len or self.model.max_model_len
        self.cache = self.model.new_cache()
        # of each row, tokens that the cache holds: committed ones, and draft tokens behind them
        self.cached_R: dict[int, tuple[int, int]] = {}

    # ---------------------------------------------------------------- drafting

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.cache.bytes_to_grow(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.cache.reserve(rows, slots)

    def on_start(self, row: int, request: Request) -> None:
        ids = np.asarray(request.prompt_token_ids[: self.max_model_len], dtype=np.int64)
        self.model.prefill(self.cache, row, self.to_draft_ids_host(ids), 0, PREFILL_CHUNK)
        self.cached_R[row] = len(ids), 0

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        del self.cached_R[row]

    def wipe(self) -> None:
        self.cache.wipe()

    def propose(self, context: Context) -> Draft:
        rows, draft_B = context.rows, self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        start_B, missing = self.uncached_tokens(context, draft_B)
        count_B = np.array([len(tokens) for tokens in missing])
        token_N = torch.from_numpy(np.concatenate(missing)).to(context.last_token_B.device, non_blocking=True)
        sampler = DraftSampler(context, self.probabilistic, self.to_target_vocab)
        for k in range(int(draft_B.max())):
            # of a row without tokens, logits that nobody reads
            logits_BV = self.forward_tokens(rows, token_N, start_B, count_B, (np.cumsum(count_B) - 1).clip(0))
            token_B = sampler.sample(logits_BV)
            start_B, count_B = start_B + count_B, (draft_B > k + 1).astype(np.int64)
            token_N = self.to_draft_ids(pack_ragged(token_B.unsqueeze(1), count_B))
        for b in np.flatnonzero(draft_B):
            self.cached_R[rows[b]] = int(context.length_B[b]), int(draft_B[b] - 1)
        return sampler.draft(draft_B)

    def draft_lengths(self, context: Context) -> np.ndarray:
        """[B] how many tokens to draft. The drafter sees length + K - 1 tokens at most; a row whose context is used up drafts
        less, then nothing."""
        return np.minimum(context.max_draft_B, np.clip(self.max_model_len - context.length_B + 1, 0, None))

    def uncached_tokens(self, context: Context, draft_B: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of the rows that draft, the committed tokens that the cache lacks (one or two for most rows), and where they begin.
        Of what was written, committed tokens stand, and so do drafts accepted since; the last committed token never was one."""
        written = np.array([self.cached_R[row] for row in context.rows])
        num_accepted_prev_B = (
            0 if context.num_accepted_prev_B is None else np.minimum(written[:, 1], context.num_accepted_prev_B)
        )
        start_B = np.minimum(written[:, 0] + num_accepted_prev_B, context.length_B - 1)
        return start_B, [
            self.to_draft_ids_host(context.tokens(b)[start_B[b] : None if n else start_B[b]]) for b, n in enumerate(draft_B)
        ]

    def forward_tokens(
        self, rows: np.ndarray, token_N: Tensor, start_B: np.ndarray, count_B: np.ndarray, keep: np.ndarray
    ) -> Tensor:
        """Logits [len(keep), V] after the tokens at these places, where each row's tokens lie end to end; where vocabularies
        differ, of the shared tokens only."""
        start_R, count_R = np.zeros(rows[-1] + 1, dtype=np.int64), np.zeros(rows[-1] + 1, dtype=np.int64)
        start_R[rows], count_R[rows] = start_B, count_B
        logits_NV = self.model.forward(self.cache, token_N, start_R, count_R, logits_at_N=keep).logits
        return logits_NV if self.vocabulary is None else self.vocabulary.shared_logits(logits_NV)

    def to_draft_ids_host(self, target_ids: np.ndarray) -> np.ndarray:
        """Committed tokens as the drafter knows them."""
        return target_ids if self.vocabulary is None else self.vocabulary.to_draft_ids_host(target_ids)

    def to_draft_ids(self, token_N: Tensor) -> Tensor:
        """Likewise on the device, of tokens that it drafted."""
        return token_N if self.vocabulary is None else self.vocabulary.to_draft_ids(token_N)

    def to_target_vocab(self, drawn_N: Tensor, q_NV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What was drawn from `forward_tokens`, and its laws, over the target's vocabulary."""
        return (drawn_N, q_NV) if self.vocabulary is None else self.vocabulary.to_target_vocab(drawn_N, q_NV)

    # ---------------------------------------------------------------- training

    def needs_target(self, objective: Any) -> bool:
        return losses.needs_target_probs(objective.loss)

    def for_training(
        self, objective: Checked, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False
    ) -> None:
        """float32 weights that gradients reach. What stays as it is, and an output layer that is the embedding, is no part of
        the module: it is neither saved with every step nor sent between processes."""
        self.objective = objective
        embedding, head = self.lm.get_input_embeddings(), self.lm.get_output_embeddings()
        self.outside: list[Any] = [embedding, head]  # what is in a list is not registered
        self.tied = bool(self.config["hf_config"].get("tie_word_embeddings"))
        names = [causal_lm.module_name(self.lm, part) for part in self.outside]
        self.lm.requires_grad_(True)
        self.scale_draft_logits, bias = None, head.bias
        if bias is not None or scale_logits(self.lm.config, torch.ones(1))[0] != 1:
            self.scale_draft_logits = lambda logits: scale_logits(self.lm.config, logits if bias is None else logits + bias)
        self.kept: dict[str, Tensor] = {}
        for name, part in zip(names, self.outside, strict=True):
            part.requires_grad_(init.train_embedding)
            if not init.train_embedding or (self.tied and part is head):
                owner, _, own = name.rpartition(".")
                setattr(self.lm.get_submodule(owner), own, None)
                self.kept |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
        if self.tied:
            self.kept.pop(f"{names[1]}.weight")
        if bias is not None:  # the loss adds it where no gradient reaches
            bias.requires_grad_(False)

    def train(self, mode: bool = True) -> DraftModel:
        """Without dropout at all times: what a step is does not hang on chance."""
        super().train(mode)
        for part in self.children():
            part.eval()
        return self

    def heads(self) -> list[Tensor | None]:
        embedding, head = self.outside
        return [(embedding if self.tied else head).weight]

    def masks(self, count: int) -> Tensor:
        """[count] tokens for places whose token is not known; a draft model that takes one step has none."""
        assert not count
        return torch.zeros(0, dtype=torch.int64, device=self.target.device)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """[A, D] states for the output layer at every step, in one forward: the tokens of the batch, and behind them the mask
        tokens of step 1, 2, ..."""
        position_N = block.positions(plan)
        token_N = torch.cat([batch.token_N, self.masks(block.num_masks(plan))])
        reach = int(position_N.max()) + 1
        if (limit := longrope_limit(self.lm.config)) is not None and reach > limit:
            raise ValueError(
                f"a sample of {reach} tokens is over the {limit} for which the draft model's LongRoPE has one set of factors; "
                f"give data.max_length={limit}"
            )

        state_ND = decoder_of(self.lm)(
            inputs_embeds=self.outside[0](token_N).unsqueeze(0), position_ids=self._index(position_N).unsqueeze(0),
            use_cache=False, attention=block.DepthAttention(plan, kernel),
        ).last_hidden_state[0]  # fmt: skip
        return block.by_depth(state_ND, plan)

    # ---------------------------------------------------------------- at rest

    @classmethod
    def example_settings(cls, target: CausalLM, directory: Path) -> dict[str, Any]:
        return {"model": str(target.path)}

    @classmethod
    def load_checkpoint(cls, target: CausalLM, name: str, revision: str | None) -> Checkpoint:
        checkpoint = causal_lm.load(name, revision, cls.name)
        if cls is DraftModel:  # what was a parallel one learns to draft token by token
            checkpoint.config = {k: x for k, x in checkpoint.config.items() if k != "num_depths"} | {"pard_token": None}
        same_vocabulary(target, checkpoint.config["hf_config"]["vocab_size"], name)
        same_tokens(target, lambda: hub.load_tokenizer(causal_lm.find(name, revision)), name, "train one that has the target's")
        return checkpoint

    @classmethod
    def required_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        return cls.resolve_config(target, architecture)

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """What of a recipe can be held against a model that is there: what was asked for by a value."""
        asked = cls.architecture_type(**architecture)
        count = len(asked.layers_of(target)) if asked.layer_ids or asked.num_hidden_layers else None
        told = {"num_hidden_layers": count, "model": asked.model, "pard_token": getattr(asked, "pard_token", None)}
        return {key: value for key, value in told.items() if value is not None}

    @classmethod
    def init_checkpoint(
        cls, target: CausalLM, architecture: dict[str, Any], init: Any, vocab_ids: np.ndarray | None = None, seed: int = 0
    ) -> Checkpoint:
        """The model to begin with. Nothing of it is random, unless the target is."""
        assert vocab_ids is None, "a draft model has the target's vocabulary"
        asked = cls.architecture_type(**architecture)
        if asked.model is not None:
            checkpoint = cls.load_checkpoint(target, asked.model, asked.revision)
        else:
            layers = asked.layers_of(target)
            dtype = target.dtype if hub.is_random(target.path) else torch.float32
            model = load_weights(target.path, dtype, torch.device("cpu"))
            checkpoint = causal_lm.first_layers(model, layers, cls.name, target.name)
        if (mask := getattr(asked, "pard_token", None)) is not None:
            checkpoint.config["pard_token"] = mask
        return checkpoint

    def to_checkpoint(self, tensors: dict[str, Tensor] | None = None) -> Checkpoint:
        """The draft model as a checkpoint. tensors: its state, where that is gathered from several processes."""
        own = {key.removeprefix("lm."): x for key, x in (self.state_dict() if tensors is None else tensors).items()}
        whole = {key: tensor.detach().cpu() for key, tensor in (own | self.kept).items()}
        return Checkpoint(self.name, self.config, {}, whole)

    def write(self, directory: Path, state: dict[str, Tensor], provenance: dict[str, Any], card: str) -> None:
        """Save this draft model with these weights into a directory that exists and nobody reads yet."""
        causal_lm.save(directory, self.to_checkpoint(state), self.target.path, provenance, card)


def same_vocabulary(target: CausalLM, size: int, name: str, otherwise: str = "") -> None:
    if size != target.vocab_size:
        raise ValueError(
            f"the draft model {name} has a vocabulary of {size}, the target {target.name} one of {target.vocab_size}; "
            f"they must be equal{otherwise}"
        )


def same_tokens(target: CausalLM, tokenizer: Callable[[], Any], name: str, advice: str) -> None:
    """`shared_vocab.check_same_tokens` where both have a tokenizer; a model without one is given token ids, and nothing can be
    compared."""
    try:
        own = tokenizer()
        _ = target.tokenizer
    except ValueError:
        return
    shared_vocab.check_same_tokens(target, own, name, advice)


def _load(target: CausalLM, name: str, revision: str | None, size: int | None = None) -> CausalLM:
    """The drafter's weights; the target's own, if it is to draft for itself."""
    path = causal_lm.find(name, revision)
    processes = SINGLE if size == 1 else target.processes
    if path == target.path and processes.size == target.processes.size:
        return target
    own = path if Path(name).expanduser().is_dir() else name
    return CausalLM(own, target.dtype, str(target.device), revision, processes)
