"""A separate, smaller causal LM drafts (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Any Hugging Face causal LM with the target's vocabulary. It keeps a slot cache of its own; `propose` first runs over the tokens
committed since its last call (which overwrites what was rejected), then goes on token by token on its own drafts.

With `use_heterogeneous_vocab` the vocabulary may be another one (Timor et al. 2502.05202, token-level intersection). It then
drafts the tokens that both have, renormalised, and reads one token for each of the target's, so that positions are the same;
inside are its own ids, outside the target's (`specdec/drafter/shared_vocab.py`).

Training starts from some layers of the target, or from another LM, and fits the target's tokens (nll) or its distribution (kl,
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
from specdec.drafter import block, shared_vocab, unroll
from specdec.drafter.base import DraftSampler, check_drafting
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import OneStepObjective, UnrolledDrafter
from specdec.drafter.tree import Level
from specdec.model.contract import decoder_of
from specdec.model.distributed import SINGLE
from specdec.model.kv import CAUSAL, pack_ragged
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
        ids = self.layer_ids
        num_layers = target.num_layers
        if ids is None:
            count = self.num_hidden_layers or max(num_layers // 4, 1)
            if count > num_layers:
                raise ValueError(f"train.drafter.num_hidden_layers={count}: {target.name} has {num_layers}")
            return list(range(count))
        ids = [layer + num_layers if layer < 0 else layer for layer in ids]
        if not ids or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < num_layers:
            raise ValueError(
                f"train.drafter.layer_ids={self.layer_ids} must be ascending layers of {target.name}, 0..{num_layers - 1}"
            )
        return ids


class Init(Checked):
    """train_embedding: false keeps the embedding and the output layer as they are, which on a small model is most of the
    cost."""

    what: ClassVar[str] = "train.init key"

    train_embedding: bool = True


class Objective(OneStepObjective):
    """As every drafter of one token has it, over the whole vocabulary. With a loss of nll alone the target never runs."""


class DraftModel(StatelessProposer, UnrolledDrafter):
    """Settings as in vLLM.

    model: a directory (a training run's too), a hub id, an embedded name, a loaded model, or a checkpoint to train.
    draft_sample_method: `greedy` (argmax at every temperature: the draft distribution is one-hot) or `probabilistic` (sampled
        at the request's temperature, the distribution reported).
    max_model_len: of the drafter's context, beyond which a row is not drafted for.
    revision: of a hub id.
    use_heterogeneous_vocab: the vocabularies may differ, and tokens that both have are drafted.
    draft_tensor_parallel_size: 1 (each of the target's processes holds the full drafter) or the target's (it is sharded like
        the target, the default).
    tree_topk, tree_depth, tree_builder, speculative_token_tree: of trees, `specdec.drafter.tree`.
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
        tree_topk: int | None = None,
        tree_depth: int | None = None,
        tree_builder: str | None = None,
        speculative_token_tree: str | list[list[int]] | None = None,
    ):
        super().__init__()
        check_drafting(num_speculative_tokens, draft_sample_method)
        self.target = target
        self.shared = {}
        self.objective = self.objective_type()
        self.num_speculative_tokens = num_speculative_tokens
        self.chain_length = num_speculative_tokens if tree_topk is None and speculative_token_tree is None else 0
        self.probabilistic = draft_sample_method == "probabilistic"
        self.needs_uniforms = self.probabilistic
        self.set_tree(tree_topk, tree_depth, tree_builder, speculative_token_tree)
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
        # of each row, tokens that the cache holds: committed ones, and draft tokens after them
        self.cached_R: dict[int, tuple[int, int]] = {}

    # ---------------------------------------------------------------- drafting

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.cache.bytes_to_grow(rows, slots + self.num_draft_slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.cache.reserve(rows, slots + self.num_draft_slots)

    def on_start(self, row: int, request: Request) -> None:
        ids = np.asarray(request.prompt_token_ids[: self.max_model_len], dtype=np.int64)
        self.model.prefill(self.cache, row, self.to_draft_ids_host(ids), 0, PREFILL_CHUNK)
        self.cached_R[row] = len(ids), 0

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        del self.cached_R[row]

    def wipe(self) -> None:
        self.cache.wipe()

    def summarize(self, answers: Sequence[list[int]]) -> dict[str, Any]:
        return {} if self.vocabulary is None else {"vocabulary": self.vocabulary.coverage(answers)}

    def propose(self, context: Context) -> Draft:
        rows = context.rows
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(rows), context.last_token_B.device)
        start_B, uncached = self.uncached_tokens(context, draft_B)
        count_B = np.array([len(tokens) for tokens in uncached])
        token_N = torch.from_numpy(np.concatenate(uncached)).to(context.last_token_B.device, non_blocking=True)
        if self.tree is not None:
            return self._propose_tree(context, draft_B, token_N, start_B, count_B)
        sampler = DraftSampler(context, self.probabilistic, self.to_target_vocab)
        for k in range(int(draft_B.max())):
            # the logits of a row without tokens are not read
            logits_BV = self.forward_tokens(rows, token_N, start_B, count_B, (np.cumsum(count_B) - 1).clip(0))
            token_B = sampler.sample(logits_BV)
            start_B = start_B + count_B
            count_B = (draft_B > k + 1).astype(np.int64)
            token_N = self.to_draft_ids(pack_ragged(token_B.unsqueeze(1), count_B))
        for b in np.flatnonzero(draft_B):
            self.cached_R[rows[b]] = int(context.length_B[b]), int(draft_B[b] - 1)
        return sampler.draft(draft_B)

    def _propose_tree(
        self, context: Context, draft_B: np.ndarray, token_N: Tensor, start_B: np.ndarray, count_B: np.ndarray
    ) -> Draft:
        """Nodes that are accepted are processed again, as committed tokens."""
        last_N = (np.cumsum(count_B) - 1).clip(0)
        logits_BV = self.forward_tokens(context.rows, token_N, start_B, count_B, last_N)

        def expand(level: Level) -> Tensor:
            node_N = self.to_draft_ids(self._index(level.token_N))
            all_N = np.arange(len(node_N))
            return self.forward_tokens(context.rows, node_N, start_B + count_B, level.count_B, all_N, level)

        for b in np.flatnonzero(draft_B):
            self.cached_R[context.rows[b]] = int(context.length_B[b]), 0
        return self.grower(context, draft_B).grow(logits_BV, expand)

    def draft_lengths(self, context: Context) -> np.ndarray:
        """[B] how many tokens to draft. The drafter sees length + K - 1 tokens at most; a row at the end of its context drafts
        fewer, then none."""
        return np.minimum(self.path_limit(context), np.clip(self.max_model_len - context.length_B + 1, 0, None))

    def uncached_tokens(self, context: Context, draft_B: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of the rows that draft, the committed tokens that the cache lacks (one or two for most rows), and where they begin.

        Of what the cache holds, committed tokens are valid, and so are draft tokens accepted since; the last committed token
        was never drafted."""
        num_committed_B, num_drafted_B = np.array([self.cached_R[row] for row in context.rows]).T
        if context.num_accepted_prev_B is not None:
            num_committed_B = num_committed_B + np.minimum(num_drafted_B, context.num_accepted_prev_B)
        start_B = np.minimum(num_committed_B, context.length_B - 1)
        return start_B, [
            self.to_draft_ids_host(context.tokens(b)[start_B[b] : None if n else start_B[b]]) for b, n in enumerate(draft_B)
        ]

    def forward_tokens(
        self,
        rows: np.ndarray,
        token_N: Tensor,
        start_B: np.ndarray,
        count_B: np.ndarray,
        logits_at_N: np.ndarray,
        level: Level | None = None,
    ) -> Tensor:
        """Logits [len(logits_at_N), V]; where vocabularies differ, of the shared tokens only.

        token_N: the rows' tokens end to end.
        start_B, count_B: position of each row's first token, and how many there are.
        logits_at_N: places among the tokens, whose logits are wanted.
        level: of a tree, whose nodes the tokens are; None: they continue the row.
        """
        start_R = np.zeros(rows[-1] + 1, dtype=np.int64)
        count_R = np.zeros(rows[-1] + 1, dtype=np.int64)
        start_R[rows] = start_B
        count_R[rows] = count_B
        visibility = CAUSAL if level is None else level.visibility(rows, len(start_R))
        output = self.model.forward(self.cache, token_N, start_R, count_R, logits_at_N=logits_at_N, visibility=visibility)
        logits_NV = output.logits
        return logits_NV if self.vocabulary is None else self.vocabulary.shared_logits(logits_NV)

    def to_draft_ids_host(self, target_ids: np.ndarray) -> np.ndarray:
        """Committed tokens in the drafter's vocabulary."""
        return target_ids if self.vocabulary is None else self.vocabulary.to_draft_ids_host(target_ids)

    def to_draft_ids(self, token_N: Tensor) -> Tensor:
        """Tokens that it drafted, on the device, in the drafter's vocabulary."""
        return token_N if self.vocabulary is None else self.vocabulary.to_draft_ids(token_N)

    def to_target_vocab(self, token_N: Tensor, q_NV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens sampled from `forward_tokens`, and their distributions, in the target's vocabulary."""
        return (token_N, q_NV) if self.vocabulary is None else self.vocabulary.to_target_vocab(token_N, q_NV)

    # ---------------------------------------------------------------- training

    def needs_target(self, objective: Any) -> bool:
        return bool(objective.reads_target)

    def for_training(
        self, objective: Checked, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False
    ) -> None:
        """float32 weights that gradients reach. Frozen weights, and an output layer that is the embedding, are no part of the
        module: they are neither saved with every step nor sent between processes."""
        self.objective = objective
        embedding = self.lm.get_input_embeddings()
        head = self.lm.get_output_embeddings()
        self.outside: list[Any] = [embedding, head]  # modules in a list are not registered
        self.tied = bool(self.config["hf_config"].get("tie_word_embeddings"))
        names = [causal_lm.module_name(self.lm, module) for module in self.outside]
        self.lm.requires_grad_(True)
        self.scale_draft_logits = None
        bias = head.bias
        if bias is not None or scale_logits(self.lm.config, torch.ones(1))[0] != 1:
            self.scale_draft_logits = lambda logits: scale_logits(self.lm.config, logits if bias is None else logits + bias)
        self.kept: dict[str, Tensor] = {}
        for name, module in zip(names, self.outside, strict=True):
            module.requires_grad_(init.train_embedding)
            if not init.train_embedding or (self.tied and module is head):
                parent, _, attribute = name.rpartition(".")
                setattr(self.lm.get_submodule(parent), attribute, None)
                self.kept |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
        if self.tied:
            self.kept.pop(f"{names[1]}.weight")
        if bias is not None:  # the loss adds it, without a gradient
            bias.requires_grad_(False)

    def train(self, mode: bool = True) -> DraftModel:
        """Without dropout at all times, so that a step is deterministic."""
        super().train(mode)
        for module in self.children():
            module.eval()
        return self

    def heads(self) -> list[Tensor | None]:
        embedding, head = self.outside
        return [(embedding if self.tied else head).weight]

    def masks(self, count: int) -> Tensor:
        """[count] tokens for places whose token is not known; a draft model that drafts token by token has none."""
        assert not count
        return torch.zeros(0, dtype=torch.int64, device=self.target.device)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """[A, D] states for the output layer at every step, in one forward: the tokens of the batch, then the mask tokens of
        step 1, 2, ..."""
        position_N = block.positions(plan)
        token_N = torch.cat([batch.token_N, self.masks(block.num_masks(plan))])
        num_positions = int(position_N.max()) + 1
        if (limit := longrope_limit(self.lm.config)) is not None and num_positions > limit:
            raise ValueError(
                f"a sample of {num_positions} tokens is over the {limit} for which the draft model's LongRoPE has one set of "
                f"factors; give data.max_length={limit}"
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
        if cls is DraftModel:  # a parallel one learns to draft token by token
            checkpoint.config = {k: x for k, x in checkpoint.config.items() if k != "num_depths"} | {"pard_token": None}
        same_vocabulary(target, checkpoint.config["hf_config"]["vocab_size"], name)
        same_tokens(target, lambda: hub.load_tokenizer(causal_lm.find(name, revision)), name, "train one that has the target's")
        return checkpoint

    @classmethod
    def required_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        return cls.resolve_config(target, architecture)

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """The keys of a recipe that an existing model can be compared with: those that are set."""
        recipe = cls.architecture_type(**architecture)
        count = len(recipe.layers_of(target)) if recipe.layer_ids or recipe.num_hidden_layers else None
        config = {"num_hidden_layers": count, "model": recipe.model, "pard_token": getattr(recipe, "pard_token", None)}
        return {key: value for key, value in config.items() if value is not None}

    @classmethod
    def init_checkpoint(
        cls, target: CausalLM, architecture: dict[str, Any], init: Any, vocab_ids: np.ndarray | None = None, seed: int = 0
    ) -> Checkpoint:
        """The model to begin with. None of its weights is random, unless the target's are."""
        assert vocab_ids is None, "a draft model has the target's vocabulary"
        recipe = cls.architecture_type(**architecture)
        if recipe.model is not None:
            checkpoint = cls.load_checkpoint(target, recipe.model, recipe.revision)
        else:
            layers = recipe.layers_of(target)
            dtype = target.dtype if hub.is_random(target.path) else torch.float32
            model = load_weights(target.path, dtype, torch.device("cpu"))
            checkpoint = causal_lm.first_layers(model, layers, cls.name, target.name)
        if (mask := getattr(recipe, "pard_token", None)) is not None:
            checkpoint.config["pard_token"] = mask
        return checkpoint

    def to_checkpoint(self, tensors: dict[str, Tensor] | None = None) -> Checkpoint:
        """The draft model as a checkpoint. tensors: its state, where that is gathered from several processes."""
        state = {key.removeprefix("lm."): x for key, x in (self.state_dict() if tensors is None else tensors).items()}
        weights = {key: tensor.detach().cpu() for key, tensor in (state | self.kept).items()}
        return Checkpoint(self.name, self.config, {}, weights)

    def write(self, directory: Path, state: dict[str, Tensor], provenance: dict[str, Any], card: str) -> None:
        """Save this draft model with these weights into an empty directory."""
        causal_lm.save(directory, self.to_checkpoint(state), self.target.path, provenance, card)


def same_vocabulary(target: CausalLM, size: int, name: str, otherwise: str = "") -> None:
    if size != target.vocab_size:
        raise ValueError(
            f"the draft model {name} has a vocabulary of {size}, the target {target.name} one of {target.vocab_size}; "
            f"they must be equal{otherwise}"
        )


def same_tokens(target: CausalLM, tokenizer: Callable[[], Any], name: str, advice: str) -> None:
    """`shared_vocab.check_same_tokens`, if both have a tokenizer; the vocabularies cannot be compared without."""
    try:
        draft_tokenizer = tokenizer()
        _ = target.tokenizer
    except ValueError:
        return
    shared_vocab.check_same_tokens(target, draft_tokenizer, name, advice)


def _load(target: CausalLM, name: str, revision: str | None, size: int | None = None) -> CausalLM:
    """The drafter's weights; the target itself, if that is the drafter."""
    path = causal_lm.find(name, revision)
    processes = SINGLE if size == 1 else target.processes
    if path == target.path and processes.size == target.processes.size:
        return target
    source = path if Path(name).expanduser().is_dir() else name
    return CausalLM(source, target.dtype, str(target.device), revision, processes, target.timers)
