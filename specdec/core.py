"""Records that travel between the stages of decoding, and the protocols that they implement.

Glossary:
    target       the model whose output is wanted, as plain sampling would give it
    drafter      what guesses the next tokens: a trained module, another language model or a lookup; `Proposer` is its protocol
    draft        the guessed tokens of a row, a chain or a tree; the nodes of a tree are tokens too
    verify       check a draft with the target's probabilities, from one forward over it
    accepted     draft tokens that verification keeps, a prefix of the chain or a path of the tree
    recovered    the token that follows a rejection, sampled from the residual distribution, norm(max(p - q, 0))
    bonus        the token that follows a draft that was accepted as a whole
    committed    tokens of a row that are final: prompt, accepted, recovered and bonus tokens
    emitted      tokens that a step commits: the accepted ones and one more, fewer where a stop rule cuts
    pruned       tokens that were drafted and are not verified, because a policy cut the draft short; on disk: `trimmed`
    step         one round of draft, forward, verify and commit, over all active rows
    row          line of the caches that a request holds from its prefill to its end
    slot         place within a row of a cache, which holds K and V of one token
    position     place of a token in its text, prompt included, from 0; what RoPE and sliding windows read
    uniforms     random numbers in [0, 1), a function of the request's seed: decoding's only source of randomness
    confidence   numbers about a draft token that say how likely it is to be accepted
    K            num_speculative_tokens, the most tokens of a draft

Shape suffixes; a file that needs others, or one of these for something else, says so at its top:
    B  active rows of a step          L  committed tokens of a row
    K  draft tokens                   J  verified positions, K + 1
    M  tokens of a row in one forward N  tokens of one forward, all rows laid end to end
    V  vocabulary                     D  width of a hidden state
    T  layers that are read           R  rows of a cache
    S  slots of a row                 F  features: numbers of confidence
    H  query heads                    G  key heads, which groups of query heads share
    W  width of a head
Letters of probabilities: p is the target's, q is the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, ClassVar, Protocol, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.params import SamplingParams


@dataclass
class Draft:
    """Tokens that a proposer drafts, a chain or a tree for each row.

    token_BK: int64, on the model's device; entries at or beyond the row's length are padding.
    length_B: int64, on the host, 0..K: lengths decide shapes, so reading them must not wait for a device.
    q_BKV: the exact distribution that each token was drawn from; None: deterministic (the distribution is one-hot).
    parent_BK: int64, on the host or the device: the place of each node's parent in the row's tree, before its own; -1: it
        follows the last committed token. Nodes are ordered so that the first n are a good tree of that size; children of a
        node that were drawn, in the order of drawing. None: a chain, whose parents are -1, 0, 1, ...
    confidence_BKF: float32, if the context asks for it: F numbers that say how likely each token is to be accepted, given that
        those before it are; a weighted sum of them models its log-odds. Of a distribution, the log-odds of its likeliest token,
        never of the one that was drawn: pruning by a drawn token's own value biases the output. 0 means that nothing is known.
    proposer_B: of a composed proposer, the name of the component that drafted each row.
    num_model_drafted_B: on the host; of a composed proposer, tokens of each row that its `cost_proposer` drafted.
    finite_BK: whether the logits that each token was chosen from were free of nan and inf; None where there were none.
    """

    token_BK: Tensor
    length_B: Tensor
    q_BKV: Tensor | None = None
    parent_BK: Tensor | None = None
    confidence_BKF: Tensor | None = None
    proposer_B: list[str] | None = None
    num_model_drafted_B: Tensor | None = None
    finite_BK: Tensor | None = None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu") -> Draft:
        """No tokens for any row."""
        token_BK = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        return cls(token_BK, torch.zeros(num_rows, dtype=torch.int64))

    def parents(self) -> np.ndarray:
        """[B, K] parents of the nodes, on the host; of a chain -1, 0, 1, ...; of a tree -1 for padding, whatever it holds."""
        if self.parent_BK is None:
            return tree.chain(*self.token_BK.shape)
        is_node_BK = np.arange(self.parent_BK.shape[1]) < self.length_B.numpy()[:, None]
        return np.where(is_node_BK, self.parent_BK.cpu().numpy(), -1)

    def check_tree(self, source: str) -> None:
        """Raise ValueError, one line, if `parent_BK` is not int64 [B, K], or a parent is not before its child. source: what
        made the draft."""
        if self.parent_BK is not None:
            kind = f"{self.parent_BK.dtype} {list(self.parent_BK.shape)}"
            if kind != (right := f"torch.int64 {list(self.token_BK.shape)}"):
                raise ValueError(f"{source}: parent_BK is {kind}; it must be {right}, as token_BK")
            parent_BK = self.parents()
            place_K = np.arange(parent_BK.shape[1])
            is_wrong_BK = ((parent_BK < -1) | (parent_BK >= place_K)) & (place_K < self.length_B.numpy()[:, None])
            if is_wrong_BK.any():
                b, k = np.argwhere(is_wrong_BK)[0].tolist()
                raise ValueError(
                    f"{source}: node {k} of row {b} has parent {parent_BK[b, k]}; it must be -1 or a node before it"
                )

    def cut(self, length_B: np.ndarray) -> Draft:
        """The first so many tokens of each row's draft, and no more columns than these need."""
        width = int(length_B.max(initial=0))
        names = ("token_BK", "q_BKV", "parent_BK", "confidence_BKF", "finite_BK")
        columns = {name: x[:, :width] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, length_B=torch.from_numpy(length_B), **columns)

    def select_rows(self, place_B: np.ndarray) -> Draft:
        """The drafts of some of the rows, by their places."""
        if len(place_B) == len(self.length_B):
            return self
        return self._by_row(
            lambda x: x[torch.from_numpy(place_B).to(x.device, non_blocking=True)], lambda names: [names[b] for b in place_B]
        )

    def scatter_rows(self, place_B: np.ndarray, num_rows: int) -> Draft:
        """The same drafts as those of rows `place_B` of `num_rows`; the others have none."""
        if len(place_B) == num_rows:
            return self

        def scatter(x: Tensor) -> Tensor:
            at_B = torch.from_numpy(place_B).to(x.device, non_blocking=True)
            return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, at_B, x)

        def scatter_names(names: list[str]) -> list[str]:
            scattered = [""] * num_rows
            for b, name in zip(place_B, names, strict=True):
                scattered[b] = name
            return scattered

        return self._by_row(scatter, scatter_names)

    def _by_row(self, of_tensor: Callable[[Tensor], Tensor], of_names: Callable[[list[str]], list[str]]) -> Draft:
        """Every field that is set, whose first dimension is always the row, passed through one of the functions."""
        values: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is not None:
                values[name] = of_names(value) if name == "proposer_B" else of_tensor(value)
        return Draft(**values)


def require_chain(draft: Draft, user: str) -> None:
    """Raise ValueError, one line, for a tree. user: what can only use chains."""
    if draft.parent_BK is not None:
        raise ValueError(f"{user} takes chains, and the draft is a tree (parent_BK is set); use a method that drafts chains")


@dataclass
class Verdict:
    """What a rejection scheme decides about a draft.

    num_accepted_B: draft tokens of each row that are accepted.
    token_B: the token that follows them: *recovered* after a rejection, *bonus* when all were accepted.
    path_BK: the accepted nodes of a tree, in order; entries beyond the accepted ones are padding. None: 0, 1, ..., a chain's.
    """

    num_accepted_B: Tensor
    token_B: Tensor
    path_BK: Tensor | None = None

    def visited_BJ(self, num_positions: int) -> Tensor:
        """[B, J] whether a token was taken at each position of the verification: the last committed token's, which is the
        first, and those of the accepted draft tokens."""
        place_K = torch.arange(num_positions - 1, device=self.token_B.device)
        is_accepted_BK = place_K < self.num_accepted_B.unsqueeze(1)
        node_BK = place_K if self.path_BK is None else self.path_BK
        visited_BJ = is_accepted_BK.new_zeros(len(self.token_B), num_positions)
        visited_BJ[:, 0] = True
        return visited_BJ.scatter_(1, torch.where(is_accepted_BK, 1 + node_BK, 0), True)


@dataclass
class RequestStats:
    """What happened to one request, step by step (lists of equal length), and its times in seconds. Keys of requests.jsonl.

    drafted: draft tokens that were verified; of a tree, its nodes.
    accepted: of these, the accepted ones that were emitted.
    emitted: tokens; accepted + 1, fewer at a stop.
    trimmed: pruned tokens, drafted and not verified.
    draft_s, verify_s: durations of the step's two phases, shared by all rows of the step.
    batch_size: rows of the step.
    wall_s: since the request's last tokens, whatever the engine did meanwhile.
    cpu_s: CPU time of this process, all its threads, in both phases: less than these where other processes had the machine.
    proposer: the component that drafted, where a method is composed of several; else the list stays empty.
    draft_token_ids: the tokens that were verified; of a tree, its nodes in order. Empty where the recorder has none.
    draft_parents: of drafts that are trees, the nodes' parents as in Draft; else the list stays empty.
    accepted_nodes: with them, the accepted nodes that were emitted, in order.
    The token that prefill yields belongs to no step.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    batch_size: list[int] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    proposer: list[str] = field(default_factory=list)
    draft_token_ids: list[list[int]] = field(default_factory=list)
    draft_parents: list[list[int]] = field(default_factory=list)
    accepted_nodes: list[list[int]] = field(default_factory=list)
    queue_s: float = 0.0  # from the moment the request was added until it took a row
    time_to_first_token_s: float = 0.0  # from the moment the request took its row
    prefill_s: float = 0.0  # forwards over the prompt, target and drafter
    prefill_cpu_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last

    def add(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        draft_s: float,
        verify_s: float,
        batch_size: int,
        trimmed: int = 0,
        wall_s: float | None = None,
        proposer: str | None = None,
        cpu_s: float | None = None,
        draft_token_ids: list[int] | None = None,
        draft_parents: list[int] | None = None,
        accepted_nodes: list[int] | None = None,
    ) -> None:
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.emitted.append(emitted)
        self.trimmed.append(trimmed)
        self.draft_s.append(draft_s)
        self.verify_s.append(verify_s)
        self.batch_size.append(batch_size)
        self.wall_s.append(draft_s + verify_s if wall_s is None else wall_s)
        self.cpu_s.append(draft_s + verify_s if cpu_s is None else cpu_s)
        if proposer is not None:
            self.proposer.append(proposer)
        if draft_token_ids is not None:
            self.draft_token_ids.append(draft_token_ids)
        if draft_parents is not None and accepted_nodes is not None:
            self._fill_in_chains(len(self.drafted) - 1)
            self.draft_parents.append(draft_parents)
            self.accepted_nodes.append(accepted_nodes)
        elif self.draft_parents:
            self._fill_in_chains(len(self.drafted))

    def _fill_in_chains(self, num_steps: int) -> None:
        """Parents and accepted nodes of steps whose drafts were chains, or empty."""
        for step in range(len(self.draft_parents), num_steps):
            self.draft_parents.append(list(range(-1, self.drafted[step] - 1)))
            self.accepted_nodes.append(list(range(self.accepted[step])))

    @property
    def rejections(self) -> list[int]:
        """Places in the output of tokens that the target emitted in place of a rejected draft token, or where no child of the
        last accepted node was right."""
        places = []
        place = 1  # the token that prefill yields belongs to no step
        for depth, accepted, emitted in zip(self.depths, self.accepted, self.emitted, strict=True):
            if accepted < min(depth, emitted):
                places.append(place + accepted)
            place += emitted
        return places

    @property
    def depths(self) -> list[int]:
        """Tokens of each draft's longest path."""
        if not self.draft_parents:
            return self.drafted
        return [tree.height_of(parents) for parents in self.draft_parents]

    def ends_at_leaf(self, width: int) -> np.ndarray:
        """[i] number of drafts with i accepted tokens, the last of them without children, that are deeper elsewhere."""
        count = np.zeros(width, dtype=np.int64)
        for parents, nodes, depth in zip(self.draft_parents, self.accepted_nodes, self.depths, strict=False):
            if 0 < len(nodes) < depth and nodes[-1] not in parents:
                count[len(nodes)] += 1
        return count

    def histogram(self, width: int | None = None) -> np.ndarray:
        """[d, a] number of steps that drafted d tokens one after the other and accepted a of them; steps without a draft are in
        row 0."""
        depths = self.depths
        width = max(depths, default=0) + 1 if width is None else width
        histogram = np.zeros((width, width), dtype=np.int64)
        np.add.at(histogram, (depths, self.accepted), 1)
        return histogram


@dataclass
class Step:
    """One step of the engine, all its rows.

    drafted_B: tokens drafted, pruned ones too: `drafted` + `trimmed` of RequestStats.
    verified_B: of these, verified: `drafted` of RequestStats.
    accepted_B, emitted_B: as in RequestStats.
    draft_s, verify_s, cpu_s: as in RequestStats.
    at: the end of the step on the engine's clock.
    num_model_drafted_B: as in Draft.
    """

    drafted_B: np.ndarray
    verified_B: np.ndarray
    accepted_B: np.ndarray
    emitted_B: np.ndarray
    draft_s: float
    verify_s: float
    cpu_s: float
    at: float
    num_model_drafted_B: np.ndarray | None = None


@dataclass
class TokenLogprobs:
    """Log probabilities at one place of a prompt or an answer, under softmax of the target's logits as they are.

    token_ids: [1 + n] the token at this place, then the n most likely ones, the likeliest first.
    logprobs: [1 + n] of these.
    rank: of the token at this place; 1: no other is likelier.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int

    def top(self, count: int) -> TokenLogprobs:
        """The same with fewer of the most likely tokens."""
        return TokenLogprobs(self.token_ids[: 1 + count], self.logprobs[: 1 + count], self.rank)


@dataclass
class Request:
    """One prompt on its way through the engine; the engine fills in the second half."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0  # the seed that is used: params.seed, or one that the caller derived
    category: str = ""

    added_at: float = 0.0  # when the engine was given it, on the engine's clock
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or string; None for eos and length
    text: str | None = None  # set when stop strings cut the text
    bad_words_token_ids: list[list[int]] = field(default_factory=list)  # of params.bad_words
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token, if params.logprobs asks for them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each prompt token but the first, likewise
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass
class Context:
    """What a proposer may look at. Row b of every field is the same request.

    Rows that draft nothing in a step are not in it: what a proposer missed of a row comes when the row drafts again.

    rows: [B] the cache row that the request holds, ascending; a proposer keeps its own state by this number.
    token_RL: int64 on the host, committed tokens by cache row; `token_RL[rows[b], :length_B[b]]` are row b's.
    length_B: [B] number of committed tokens, prompt included. The target's cache holds all of them but the last.
    max_draft_B: [B] how many tokens may be drafted for the row, 1 to K; of a tree, its nodes.
    max_depth_B: int64 [B], tokens of the longest path that the row may take; None: as `max_draft_B`.
    last_token_B: int64 on the device, the last committed token.
    num_accepted_prev_B: [B] how many tokens of the row's last draft were accepted; K and V of its other tokens are stale.
    uniform_BK: float64 on the device, the request's own uniforms for drawing draft tokens, if `needs_uniforms`.
    shares_noise: they are those that the target samples the positions with, which are drawn with `specdec.gumbel`.
    stop_BV: on the host, which tokens end the row's request, if `drafts_trees`: their nodes need no children.
    hidden: row b's `[n, T, D]` states of the tokens committed since the last call, if the proposer has `hidden_layers`;
        their positions are `length_B[b] - 1 - n .. length_B[b] - 2`.
    logits_BV: the target's raw logits that the last token was chosen from, if `needs_logits`.
    return_confidence: the draft shall come with `confidence_BKF`.
    """

    rows: np.ndarray
    requests: list[Request]
    token_RL: np.ndarray
    length_B: np.ndarray
    max_draft_B: np.ndarray
    last_token_B: Tensor
    max_depth_B: np.ndarray | None = None
    num_accepted_prev_B: np.ndarray | None = None
    uniform_BK: Tensor | None = None
    shares_noise: bool = False
    stop_BV: np.ndarray | None = None
    hidden: list[Tensor] | None = None
    logits_BV: Tensor | None = None
    return_confidence: bool = False

    def select_rows(self, place_B: np.ndarray) -> Context:
        """The same for some of the rows, by their places, ascending."""
        at_B = torch.from_numpy(place_B).to(self.last_token_B.device, non_blocking=True)
        return Context(
            rows=self.rows[place_B],
            requests=[self.requests[b] for b in place_B],
            token_RL=self.token_RL,
            length_B=self.length_B[place_B],
            max_draft_B=self.max_draft_B[place_B],
            max_depth_B=None if self.max_depth_B is None else self.max_depth_B[place_B],
            last_token_B=self.last_token_B[at_B],
            num_accepted_prev_B=None if self.num_accepted_prev_B is None else self.num_accepted_prev_B[place_B],
            uniform_BK=None if self.uniform_BK is None else self.uniform_BK[at_B],
            shares_noise=self.shares_noise,
            stop_BV=None if self.stop_BV is None else self.stop_BV[place_B],
            hidden=None if self.hidden is None else [self.hidden[b] for b in place_B],
            logits_BV=None if self.logits_BV is None else self.logits_BV[at_B],
            return_confidence=self.return_confidence,
        )

    def path_limit(self) -> np.ndarray:
        """[B] how many tokens a path may have."""
        return self.max_draft_B if self.max_depth_B is None else self.max_depth_B

    def tokens(self, b: int) -> np.ndarray:
        """Committed tokens of row b, prompt included (a view: do not write)."""
        return self.token_RL[self.rows[b], : self.length_B[b]]

    @property
    def temperature_B(self) -> Tensor:
        values = [request.params.temperature for request in self.requests]
        return torch.tensor(values, dtype=torch.float32, device=self.last_token_B.device)


@dataclass(frozen=True)
class MethodFacts:
    """What other modules need to know of a method beside its settings, which its constructor has. Its class declares it, as
    `facts`, so that no module outside specdec.method names a method.

    drafts: false for a method that never drafts a token
    composes: it takes `proposers`, a list of other methods with their settings, and assigns a model to one of them
    runs_model: its drafts cost time, as those of a model do; a lookup's cost next to nothing
    model_hint: the fix in the error line about a missing `model`; unless given, the script that trains one
    check_model: raises ValueError for a `model` that cannot be used with any target
    model_spellings: values of `model` that mean this method, where no method is given
    name_marks: words of a hub id that mean this method, where no method is given
    aliases: other names of the method, as patterns of fnmatch
    parallel_of: the method that is this one under `parallel_drafting`
    parallel_only: its drafters cannot draft token by token
    train_script: stem of the script in train/ that trains its drafters; None: there is nothing to train
    mask_key: key of a checkpoint's config with the token whose embedding stands for tokens that are not known yet
    max_draft_key: key of a checkpoint's config with the most tokens of a draft
    max_draft_of: the most tokens of a draft by a checkpoint's config, where no one key has it
    reuses_one_module: a `max_draft_key` of 1 does not limit a draft, since the one module is used again
    defaults_to_max: as many tokens as `max_draft_key` says is also the usual number
    serving: by engine, its name for the method: `method` of vLLM, `--speculative-algorithm` of SGLang
    serving_note: a sentence for the model card of an export
    served_in_target: the drafter is part of the target's own checkpoint where it is served
    """

    drafts: bool = True
    composes: bool = False
    runs_model: bool = False
    model_hint: str | None = None
    check_model: Callable[[str], object] | None = None
    model_spellings: tuple[str, ...] = ()
    name_marks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    parallel_of: str | None = None
    parallel_only: bool = False
    train_script: str | None = None
    mask_key: str | None = None
    max_draft_key: str | None = None
    max_draft_of: Callable[[dict[str, Any]], int] | None = None
    reuses_one_module: bool = False
    defaults_to_max: bool = False
    serving: Mapping[str, str] = field(default_factory=dict)
    serving_note: str | None = None
    served_in_target: bool = False


MAX_PENDING_STATES = 256  # tokens whose states are kept for a row that drafts nothing, before the proposer has to read them


class Proposer(Protocol):
    """Drafts tokens. It owns its caches and repairs them from the context: nothing tells it of a rollback.

    `StatelessProposer` has a default for everything but `propose`; `check_proposer` holds an object to the protocol.
    """

    facts: ClassVar[MethodFacts]
    name: str  # in error lines
    num_speculative_tokens: int  # K, the most tokens of a draft
    max_model_len: int | None  # positions that a row may take, beyond which it is not drafted for; None: no limit of its own
    hidden_layers: tuple[int, ...]  # target layers whose states it reads (ids as in vLLM: the input of layer i)
    needs_logits: bool  # the logits that the last token was chosen from
    needs_uniforms: bool  # uniforms to draw with
    num_confidence_features: int  # F of the confidence that its drafts can come with; 0: none
    predicts_acceptance: bool  # the confidence is one number, the log-odds themselves: nothing about it need be learned
    drafts_trees: bool  # num_speculative_tokens counts nodes, and only paths are limited by what may still be emitted
    component_names: tuple[str, ...]  # of the proposers that it is composed of, as in Draft.proposer_B; (): it is not composed
    cost_proposer: Proposer | None  # of a composed proposer, the component whose drafts take time, if one does

    @classmethod
    def example_settings(cls, target: Any, directory: Path) -> dict[str, Any]:
        """Settings that its YAML leaves to the user, with which it drafts for this target: for the contract tests and
        eval/prove.py.

        directory: an empty one, for an untrained checkpoint or for what it writes.
        """
        ...

    def on_start(self, row: int, request: Request) -> None:
        """A request takes a row; its prompt has been processed by the target."""

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        """The request leaves the row, finished (its `finish_reason` is set) or aborted.

        hidden: states of the tokens committed since the last `propose`, in pieces of [n, T, D], if it has `hidden_layers`.
        """

    def on_forward(self, token_N: Tensor, logits_NV: Tensor) -> None:
        """The target has processed tokens, of any rows: last committed ones, draft tokens, and those of a prompt whose logits
        are computed. A copy to the host that is queued here is there in the next call of the proposer.

        token_N: int64 on the device.
        logits_NV: the target's raw logits after each.
        """

    def propose(self, context: Context) -> Draft:
        """A draft for every row of the context, of at most `max_draft_B` tokens."""
        ...

    def catch_up(self, context: Context) -> bool:
        """Process the states of rows that have drafted nothing for long, so that they need not be kept. False: keep them."""
        ...

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        """Bytes that growing its caches to that many rows and positions takes."""
        ...

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for that many rows and positions."""

    def reset(self) -> None:
        """Forget what was learned from other requests."""

    def wipe(self) -> None:
        """Zero the caches: nan or inf may be in them, and no row is in use."""

    def summarize(self, answers: Sequence[list[int]]) -> dict[str, Any]:
        """More keys for summary.json. answers: the token ids of every request's output."""
        ...


class Policy(Protocol):
    """Decides in every step how much is drafted for each row, and how much of that is verified.

    A decision about position i may look at everything but the token drawn there (Draft.confidence_BKF says what is safe);
    tokens that the drafter chose as likeliest are not drawn, and may be looked at.
    """

    needs_confidence: bool  # drafts shall come with confidence_BKF

    def on_start(self, row: int) -> None:
        """A request takes a row."""

    def draft_lengths(self, rows: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        """[B] tokens to draft for each of the active rows, at most max_draft_B."""
        ...

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        """[B] tokens of each draft that are verified."""
        ...

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None = None) -> None:
        """The outcome of a step: the draft as it was verified, how much of it was accepted, and of trees which nodes."""


class FixedLengthPolicy:
    """Defaults for a policy: draft as much as may be, verify all of it, learn nothing."""

    needs_confidence = False

    def on_start(self, row: int) -> None:
        pass

    def draft_lengths(self, rows: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        return max_draft_B

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        return draft.length_B.numpy()

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None = None) -> None:
        pass


class StatelessProposer:
    """Defaults for a proposer: no cache, and nothing read of the target but its tokens."""

    facts: ClassVar[MethodFacts] = MethodFacts()
    name = ""
    num_speculative_tokens = 0
    max_model_len: int | None = None
    hidden_layers: tuple[int, ...] = ()
    needs_logits = False
    needs_uniforms = False
    num_confidence_features = 0
    predicts_acceptance = False
    drafts_trees = False
    component_names: tuple[str, ...] = ()
    cost_proposer: Proposer | None = None

    @classmethod
    def example_settings(cls, target: Any, directory: Path) -> dict[str, Any]:
        return {}

    def on_start(self, row: int, request: Request) -> None:
        pass

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        pass

    def on_forward(self, token_N: Tensor, logits_NV: Tensor) -> None:
        pass

    def catch_up(self, context: Context) -> bool:
        return False

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return 0

    def reserve(self, rows: int, slots: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def wipe(self) -> None:
        pass

    def summarize(self, answers: Sequence[list[int]]) -> dict[str, Any]:
        return {}


def check_proposer(proposer: Any) -> None:
    """Raise ValueError, one line, for an object that lacks an attribute or method of `Proposer`, or has it in another type."""
    cls = type(proposer).__name__
    advice = "inherit specdec.core.StatelessProposer, which has a default"
    for key, hint in get_type_hints(Proposer).items():
        if not hasattr(proposer, key):
            raise ValueError(f"proposer {cls} has no {key}; {advice}")
        value = getattr(proposer, key)
        kind = tuple if get_origin(hint) is tuple else hint
        if isinstance(kind, type | UnionType) and key != "cost_proposer" and not isinstance(value, kind):
            raise ValueError(f"proposer {cls}: {key}={value!r} must be {getattr(kind, '__name__', kind)}")
    for key, declared in vars(Proposer).items():
        if isinstance(declared, FunctionType) and not key.startswith("_") and not callable(getattr(proposer, key, None)):
            raise ValueError(f"proposer {cls} has no method {key}; {advice}")


def draft_from_lists(
    drafts: list[np.ndarray],
    device: torch.device | str = "cpu",
    confidence: list[np.ndarray] | None = None,
    parents: list[np.ndarray] | None = None,
) -> Draft:
    """Pad host-side drafts of different lengths into one Draft.

    confidence: [n, F] of each draft's n tokens.
    parents: [n] of each draft's n nodes, if they are trees; as in Draft.parent_BK, where padding is -1.
    """
    length_B = np.array([len(draft) for draft in drafts], dtype=np.int64)
    token_BK = np.zeros((len(drafts), int(length_B.max(initial=0))), dtype=np.int64)
    for row, draft in zip(token_BK, drafts, strict=True):
        row[: len(draft)] = draft
    confidence_BKF = None
    if confidence is not None:
        padded_BKF = np.zeros((*token_BK.shape, confidence[0].shape[1]), dtype=np.float32)
        for padded_KF, features in zip(padded_BKF, confidence, strict=True):
            padded_KF[: len(features)] = features
        confidence_BKF = torch.from_numpy(padded_BKF).to(device, non_blocking=True)
    parent_BK = None
    if parents is not None:
        padded_BK = np.full(token_BK.shape, -1, dtype=np.int64)
        for padded_K, parent_K in zip(padded_BK, parents, strict=True):
            padded_K[: len(parent_K)] = parent_K
        parent_BK = torch.from_numpy(padded_BK)
    token = torch.from_numpy(token_BK).to(device, non_blocking=True)
    return Draft(token, torch.from_numpy(length_B), parent_BK=parent_BK, confidence_BKF=confidence_BKF)
