"""A trained module that reads the target's hidden states and drafts: settings, weights, output layer, and its way from random
weights to a checkpoint. `specdec.drafter.autoregressive` adds attention; `method/mlp.py` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from specdec import checkpoint, sampling
from specdec.checked import Checked, first_line
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, StatelessProposer
from specdec.drafter import losses
from specdec.drafter.trainable import ChainObjective, UnrolledDrafter
from specdec.model import fused, packed_linear
from specdec.model.target import CausalLM


class UnrolledObjective(ChainObjective):
    """The loss of unrolled steps. Names after `speculators`, where it has them.

    ttt_steps: unrolled steps.
    ttt_step_loss_decay: step k weighs decay^k.
    ttt_warmup: for this share of the run only one step is unrolled.
    mask_outside_vocab: rows whose likeliest target token cannot be drafted are left out of the loss.
    """

    ttt_steps: int = Field(7, ge=1)
    ttt_step_loss_decay: float = Field(0.8, gt=0)
    ttt_warmup: float = Field(0.0, ge=0, le=1)
    loss: losses.Terms = Field({"ce": 1.0})
    mask_outside_vocab: bool = True

    def steps_at(self, progress: float) -> int:
        return 1 if progress < self.ttt_warmup else self.ttt_steps

    def weights(self, num_steps: int) -> list[float]:
        return [self.ttt_step_loss_decay**k for k in range(num_steps)]


class Init(Checked):
    """How a new drafter begins.

    lm_head: the output layer has the target's rows, or is random.
    train_lm_head: false keeps the target's output layer.
    scale_features: target states are divided by their root mean square per dimension while training, since a few dimensions are
        hundreds of times larger than the rest; saving folds the factors into the weight that reads the states. Where a norm
        comes first it does nothing.
    """

    what: ClassVar[str] = "train.init key"

    lm_head: Literal["target", "random"] = "target"
    train_lm_head: bool = True
    scale_features: bool = True

    @model_validator(mode="after")
    def _trained_if_random(self) -> Init:
        if self.lm_head == "random" and not self.train_lm_head:
            raise ValueError("train.init.lm_head=random and train_lm_head=false keep a random output layer; change one")
        return self


def check_drafting(num_speculative_tokens: int, draft_sample_method: str) -> None:
    """Raises ValueError for impossible settings of those that every trained drafter has."""
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing")
    if draft_sample_method not in ("greedy", "probabilistic"):
        raise ValueError(f"draft_sample_method={draft_sample_method!r}: use 'greedy' or 'probabilistic'")


class Drafter(StatelessProposer, UnrolledDrafter):
    """A trained drafter. Settings as in vLLM.

    model: the directory of a checkpoint, a hub id, or a Checkpoint.
    draft_sample_method: `greedy` (argmax at every temperature) or `probabilistic` (sampled at the request's temperature, the
        distribution reported).
    max_model_len: positions that a row may take, beyond which it is not drafted for.
    tree_topk, tree_depth, tree_builder, speculative_token_tree: of trees, `specdec.drafter.tree`.
    """

    name: str
    max_model_len: int
    objective_type: ClassVar[type[Checked]] = UnrolledObjective
    init_type: ClassVar[type[Checked]] = Init
    num_confidence_features = 1
    init_std = 0.02  # of random matrices
    d2t: Tensor | None  # [draft vocabulary] target id - draft id, as EAGLE-3 has it; None: all tokens can be drafted
    feature_scale: Tensor | None  # factors of the target's states in training

    def __init__(
        self,
        target: CausalLM,
        model: str | Checkpoint | None,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
        tree_topk: int | None = None,
        tree_depth: int | None = None,
        tree_builder: str | None = None,
        speculative_token_tree: str | list[list[int]] | None = None,
    ):
        super().__init__()
        check_drafting(num_speculative_tokens, draft_sample_method)
        if max_model_len is not None and not 2 <= max_model_len <= target.max_model_len:
            raise ValueError(f"max_model_len={max_model_len} of the draft is outside 2..{target.max_model_len}, the target's")
        checkpoint = model if isinstance(model, Checkpoint) else self.load_checkpoint(target, model, revision)
        checkpoint.check(self.name, target)
        target.check_shared_parts()
        self.target = target
        self.num_speculative_tokens = num_speculative_tokens
        self.chain_length = num_speculative_tokens if tree_topk is None and speculative_token_tree is None else 0
        self.probabilistic = draft_sample_method == "probabilistic"
        self.needs_uniforms = self.probabilistic
        self.max_model_len = max_model_len or target.max_model_len
        self.objective = self.objective_type()
        self.shared = {}
        self.frozen = False

        self.config = dict(checkpoint.config)
        self.lm_head: nn.Linear | None = None
        num_draft_vocab = self.config.get("draft_vocab_size", target.vocab_size)
        if not isinstance(num_draft_vocab, int) or not 1 <= num_draft_vocab <= target.vocab_size:
            raise ValueError(f"{checkpoint.name}: draft_vocab_size={num_draft_vocab} is no number of 1..{target.vocab_size}")
        try:
            self.build({key: value for key, value in self.config.items() if key != "own_lm_head"})
            if self.config.get("own_lm_head"):
                self.make_head(num_draft_vocab)
        except (TypeError, RuntimeError) as error:  # of an altered config: no mapping, or more than memory holds
            raise ValueError(f"{checkpoint.name}: its config cannot be built ({first_line(error)})") from None
        is_reduced = num_draft_vocab < target.vocab_size
        self.register_buffer("d2t", torch.zeros(num_draft_vocab, dtype=torch.int64) if is_reduced else None)
        if checkpoint.tensors is None:
            init_weights(self, 0, self.init_std)
        else:
            native.fill(self, checkpoint)
            self._check_vocabulary(checkpoint.name)
        self.to(target.device)
        self.set_tree(tree_topk, tree_depth, tree_builder, speculative_token_tree)
        self.prepare()

    @classmethod
    def load_checkpoint(cls, target: CausalLM, name: str | None, revision: str | None) -> Checkpoint:
        """The checkpoint of that name, in whatever format it is."""
        if name is None:
            raise ValueError(f"method {cls.name!r} needs model; give the directory of a drafter (eval/run.py: checkpoint=DIR)")
        return checkpoint.load(name, revision)

    def _check_vocabulary(self, name: str) -> None:
        """Raises ValueError where draft ids are not different tokens of the target: probability that two ids share would be
        lost, and the output biased."""
        if (ids := self.vocab_ids) is None:
            return
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.target.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"{name}: d2t does not map its {len(ids)} draft ids to different tokens of 0..{self.target.vocab_size - 1}"
            )

    # ---------------------------------------------------------------- what a method adds

    def build(self, config: dict[str, Any]) -> None:
        """Make the modules that the config asks for, and set `hidden_layers`. config: without `own_lm_head`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what it needs beside its modules, which exist by now."""
        self.register_buffer("feature_scale", None)

    scaled_weight: ClassVar[str | None] = None  # whose last columns read the target's states; None: these are not scaled

    def features(self, hidden_NTD: Tensor) -> Tensor:
        """[N, columns] the states that the weight reads, before they are scaled."""
        return hidden_NTD.flatten(1)

    def scaled_features(self, hidden_NTD: Tensor) -> Tensor:
        """[N, columns] the states as the weight reads them."""
        x = self.features(hidden_NTD).to(self.dtype)
        return x if self.feature_scale is None else x * self.feature_scale

    def propose(self, context: Context) -> Draft:
        raise NotImplementedError

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """The config of a new drafter, every key with its value. Raises ValueError for an impossible architecture."""
        raise NotImplementedError

    @classmethod
    def required_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """The config that a recipe requires of a drafter to start from: its keys that are not null."""
        values = cls.resolve_config(target, architecture)
        return {key: value for key, value in values.items() if architecture.get(key) not in (None, {})}

    def init_from_target(self, target: CausalLM) -> None:
        """Copy what belongs to the output layer, where that is the target's."""

    # ---------------------------------------------------------------- shared parts

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype if self.frozen else next(self.parameters()).dtype  # packed layers have no parameters

    def make_head(self, num_draft_vocab: int) -> None:
        """Make an output layer that belongs to the drafter."""
        self.lm_head = nn.Linear(self.target.hidden_size, num_draft_vocab, bias=False)

    def output_layers(self) -> list[nn.Linear]:
        """Output layers that belong to the drafter; none where the target's is used."""
        return [] if self.lm_head is None else [self.lm_head]

    def heads(self) -> list[Tensor | None]:
        return [None if self.lm_head is None else self.lm_head.weight]

    def embed(self, token_N: Tensor) -> Tensor:
        """The target's own embedding, frozen."""
        with torch.no_grad():
            embedded: Tensor = self.target.embedding(token_N)
        return embedded.to(self.dtype)

    def last_state(self, hidden_ND: Tensor) -> Tensor:
        """The target's last state after its final norm, as its output layer reads it. hidden_ND: the last layer's output."""
        with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
            state: Tensor = self.target.final_norm(hidden_ND.to(self.target.dtype))
        return state.to(self.dtype)

    def draft_logits(self, state_ND: Tensor) -> Tensor:
        """[N, draft vocabulary]. With the target's output layer, without what the target does to its logits (a softcap)."""
        if self.lm_head is not None:
            return self.lm_head(state_ND)
        head = self.target.model.get_output_embeddings()
        if head.bias is None:
            return head(state_ND.to(self.target.dtype))
        return F.linear(state_ND.to(self.target.dtype), self.target.head_rows()[0])

    @property
    def vocab_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids; None if all can be drafted."""
        if self.d2t is None:
            return None
        if "vocab_ids" in self.shared:
            ids: Tensor = self.shared["vocab_ids"]
            return ids
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        if self.frozen:
            self.shared["vocab_ids"] = ids
        return ids

    def to_target_vocab(self, token_N: Tensor, q_NV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if (ids := self.vocab_ids) is None:
            return token_N, q_NV
        if q_NV is not None:
            q_NV = q_NV.new_zeros(len(q_NV), self.target.vocab_size).index_copy_(1, ids, q_NV)
        return ids[token_N], q_NV

    # ---------------------------------------------------------------- drafting

    def draft_sampler(self, context: Context) -> DraftSampler:
        return DraftSampler(context, self.probabilistic, self.to_target_vocab)

    def draft_lengths(self, context: Context) -> np.ndarray:
        """[B] how many tokens to draft. Pair i has position i, and the last of K draft tokens needs pair length + K - 3."""
        return np.minimum(self.path_limit(context), np.clip(self.max_model_len + 2 - context.length_B, 0, None))

    def reserve(self, rows: int, slots: int) -> None:
        """Make room, and end training: see `freeze`."""
        self.freeze()

    def freeze(self) -> None:
        """Make the weights ready for decoding: of the target's dtype, without gradients, packed on a CPU. It ends training."""
        if self.frozen:
            return
        self.requires_grad_(False)
        for module in self.modules():
            for key, parameter in module.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(parameter.to(self.target.dtype), requires_grad=False))
        if packed_linear.can_pack(self.target.dtype, self.target.device):
            packed_linear.pack(self)
            fused.fuse(self)
        self.frozen = True

    def catch_up(self, context: Context) -> bool:
        """Only the last state of a row is ever read."""
        return True

    # ---------------------------------------------------------------- at rest

    @classmethod
    def example_settings(cls, target: CausalLM, directory: Path) -> dict[str, Any]:
        native.save(directory, cls.example_checkpoint(target), {}, "")
        return {"model": str(directory)}

    @classmethod
    def example_checkpoint(cls, target: CausalLM) -> Checkpoint:
        """An untrained drafter that reaches as much of the method's code as one can."""
        return cls.init_checkpoint(target, {}, Init())

    @classmethod
    def init_checkpoint(
        cls, target: CausalLM, architecture: dict[str, Any], init: Init, vocab_ids: np.ndarray | None = None, seed: int = 0
    ) -> Checkpoint:
        """A drafter with random weights, but for those that `init` copies from the target.

        architecture: keys of train.drafter; vocab_ids: ascending target ids of the draft vocabulary, None for all.
        """
        if vocab_ids is not None and (np.diff(vocab_ids) <= 0).any():
            raise ValueError("vocab_ids must be ascending and distinct")
        config = cls.resolve_config(target, architecture) | {
            "own_lm_head": init.train_lm_head or vocab_ids is not None,
            "draft_vocab_size": target.vocab_size if vocab_ids is None else len(vocab_ids),
        }
        drafter = cls(target, Checkpoint(cls.name, config, native.facts(target), None), 1)
        init_weights(drafter, seed, drafter.init_std)
        if vocab_ids is not None:
            drafter.get_buffer("d2t").copy_(torch.from_numpy(vocab_ids - np.arange(len(vocab_ids))))
            drafter._check_vocabulary("vocab_ids")
        with torch.no_grad():
            output_layers = drafter.output_layers()
            if init.lm_head == "target":
                for head in output_layers:
                    rows = target.head_rows(drafter.vocab_ids)[0]
                    if head.weight.shape != rows.shape:
                        raise ValueError(
                            f"train.init.lm_head=target copies rows {rows.shape[1]} wide, and this drafter's output layer is "
                            f"{head.weight.shape[1]} wide; give train.init.lm_head=random"
                        )
                    head.weight.copy_(rows)
            if init.lm_head == "target" or not output_layers:
                drafter.init_from_target(target)
        return drafter.to_checkpoint()

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        self.objective = objective
        self.float().requires_grad_(True)
        for head in self.output_layers():
            head.requires_grad_(init.train_lm_head)
        if init.scale_features and feature_sample is not None and self.scaled_weight is not None:
            rms = self.features(feature_sample).float().pow(2).mean(0).sqrt().clamp(min=1e-3).to(self.target.device)
            self.feature_scale = 1 / rms
            if warm_start:
                with torch.no_grad():
                    self.get_parameter(self.scaled_weight)[:, -len(rms) :] *= rms

    def to_checkpoint(self, tensors: dict[str, Tensor] | None = None) -> Checkpoint:
        """The drafter as a checkpoint, feature scales folded in. tensors: its state_dict, if it is gathered from processes."""
        tensors = {key: tensor.detach().cpu() for key, tensor in (self.state_dict() if tensors is None else tensors).items()}
        if (scale := tensors.pop("feature_scale", None)) is not None:
            assert self.scaled_weight is not None
            weight = tensors[self.scaled_weight].clone()
            weight[:, -len(scale) :] *= scale
            tensors[self.scaled_weight] = weight
        return Checkpoint(self.name, self.config, native.facts(self.target), tensors)

    def write(self, directory: Any, state: dict[str, Tensor], provenance: dict[str, Any], card: str) -> None:
        """Save a checkpoint with these weights into an existing directory."""
        native.save(directory, self.to_checkpoint(state), provenance, card)


class DraftSampler:
    """Samples a draft position by position, all rows at a time.

    context: of the step.
    probabilistic: false takes the argmax at every temperature and reports no distribution (it is one-hot); true samples by
        inverse CDF from softmax(logits / T) and reports it.
    to_target_vocab: maps tokens and distributions over a draft vocabulary to the target's.
    """

    def __init__(self, context: Context, probabilistic: bool, to_target_vocab: Callable[..., Any] | None = None):
        assert not probabilistic or context.uniform_BK is not None
        self.context = context
        self.probabilistic = probabilistic
        self.to_target_vocab = to_target_vocab
        self.temperature_B = context.temperature_B
        self.tokens: list[Tensor] = []
        self.max_logits: list[Tensor] = []  # finite if all logits were
        self.probs: list[Any] = []
        self.log_odds: list[Tensor] = []

    def sample(self, logits_BV: Tensor, log_odds_B: Tensor | None = None) -> Tensor:
        """[B] the next token of every row. log_odds_B: of its acceptance, where the drafter says; None: those of its likeliest
        token."""
        uniform_B = self.context.uniform_BK[:, len(self.tokens)] if self.probabilistic else None  # type: ignore[index]
        token_B, q_BV, max_logit_B = sampling.sample(
            logits_BV, self.temperature_B, uniform_B, self.to_target_vocab, self.context.shares_noise
        )
        if self.context.return_confidence:
            self.log_odds.append(sampling.log_odds(logits_BV, self.temperature_B) if log_odds_B is None else log_odds_B)
        self.tokens.append(token_B)
        self.max_logits.append(max_logit_B)
        self.probs.append(q_BV)
        return token_B

    def draft(self, draft_B: np.ndarray) -> Draft:
        """The draft. draft_B: number of each row's tokens; the rest is padding."""
        return Draft(
            torch.stack(self.tokens, 1),
            torch.from_numpy(draft_B),
            torch.stack(self.probs, 1) if self.probabilistic else None,
            confidence_BKF=torch.stack(self.log_odds, 1).unsqueeze(-1) if self.context.return_confidence else None,
            finite_BK=sampling.finite(torch.stack(self.max_logits, 1)),
        )


def init_weights(module: nn.Module, seed: int, std: float) -> None:
    """Random weights, by the seed alone: matrices from N(0, std^2), biases at 0; norms are as they were made."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if parameter.ndim > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))
            elif "bias" in name.rpartition(".")[2]:  # bias_ih of a recurrent cell too
                parameter.zero_()
