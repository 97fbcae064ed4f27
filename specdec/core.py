"""Records that travel between the stages, and the protocols that the stages keep.

Shape suffixes used in every file:
    B  active rows of a step          L  committed tokens of a row
    K  draft tokens                   J  verified positions, K + 1
    M  tokens of a row in one forward N  tokens of one forward, all rows laid end to end
    V  vocabulary                     D  width of a hidden state
    T  tapped layers                  R  rows of a cache
Letters of their laws: p is the target's, q is the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.params import SamplingParams


@dataclass
class Draft:
    """What a proposer offers.

    token_BK: int64, on the model's device; entries at or beyond the row's length are padding.
    length_B: int64, on the host, 0..K: lengths decide shapes, so reading them must not wait for a device.
    q_BKV: the exact law that each token was drawn from; None says deterministic (the law is one-hot).
    parent_BK: for trees; a chain has none.
    confidence_BKF: float32, F numbers that tell how likely each token is to stand, given that those before it do, if the
        proposer's `return_confidence` was set; a weighed sum of them stands for log-odds. Of a law, the log-odds of its likeliest
        token, never of the one that was drawn: what is cut by its own value leaves a biased output. 0 means nothing is known.
    finite_BK: whether the logits that each token was chosen from were free of nan and inf; None where there were none.
    proposer_B: which part of a composed proposer made each row's draft, by name.
    num_model_drafted_B: of a composed proposer, tokens of each row that its cost_proposer part drafted, the one that cost tables are of.
    """

    token_BK: Tensor
    length_B: Tensor
    q_BKV: Tensor | None = None
    parent_BK: Tensor | None = None
    confidence_BKF: Tensor | None = None
    proposer_B: list[str] | None = None
    num_model_drafted_B: np.ndarray | None = None
    finite_BK: Tensor | None = None

    def cut(self, length_B: np.ndarray) -> Draft:
        """The first so many tokens of each row's draft, and no more columns than these need."""
        most = int(length_B.max(initial=0))
        names = ("token_BK", "q_BKV", "confidence_BKF", "finite_BK")
        columns = {name: x[:, :most] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, length_B=torch.from_numpy(length_B), **columns)

    def scatter_rows(self, place_B: np.ndarray, num_rows: int) -> Draft:
        """The same drafts as those of rows `place_B` of `num_rows`; the others have none."""
        if len(place_B) == num_rows:
            return self
        at_B = torch.from_numpy(place_B)

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, at_B.to(x.device, non_blocking=True), x)

        names = None
        if self.proposer_B is not None:
            names = [""] * num_rows
            for b, name in zip(place_B, self.proposer_B, strict=True):
                names[b] = name
        return Draft(
            spread(self.token_BK),
            spread(self.length_B),
            None if self.q_BKV is None else spread(self.q_BKV),
            confidence_BKF=None if self.confidence_BKF is None else spread(self.confidence_BKF),
            proposer_B=names,
            num_model_drafted_B=None
            if self.num_model_drafted_B is None
            else spread(torch.from_numpy(self.num_model_drafted_B)).numpy(),
            finite_BK=None if self.finite_BK is None else spread(self.finite_BK),
        )


@dataclass
class Verdict:
    """num_accepted_B draft tokens stand, then comes token_B: *recovered* after a rejection, *bonus* when all stood."""

    num_accepted_B: Tensor
    token_B: Tensor


@dataclass
class RequestStats:
    """What happened to one request, step by step (lists of equal length), and its times in seconds.

    drafted, accepted, emitted: tokens; trimmed: tokens that were drafted beside and not verified; draft_s, verify_s: duration
    of the step's draft and verify phases, shared with the request's batch mates; batch_size: rows of the step; wall_s: since
    the request's tokens before, whatever the engine did meanwhile; cpu_s: CPU time of this process, all its threads, in both
    phases: where it falls behind them, others had the machine. `emitted` is accepted + 1, less at a stop. proposer: who made
    the draft, where a method is composed of several; else the list stays empty.
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

    def histogram(self, width: int | None = None) -> np.ndarray:
        """[d, a] number of steps that drafted d tokens and accepted a of them; steps without a draft are in row 0."""
        width = max(self.drafted, default=0) + 1 if width is None else width
        histogram = np.zeros((width, width), dtype=np.int64)
        np.add.at(histogram, (self.drafted, self.accepted), 1)
        return histogram


@dataclass
class Step:
    """One step of the engine, all its rows. made_B: tokens drafted; drafted_B: of these, verified; cpu_s: of both phases, as in
    RequestStats; at: its end on the engine's clock; num_model_drafted_B: as in Draft."""

    made_B: np.ndarray
    drafted_B: np.ndarray
    accepted_B: np.ndarray
    emitted_B: np.ndarray
    draft_s: float
    verify_s: float
    cpu_s: float
    at: float
    num_model_drafted_B: np.ndarray | None = None


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
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass
class Context:
    """What a proposer may look at. Row b of every field is the same request.

    Rows that draft nothing in a step are not in it: what a proposer missed of a row comes with the row's next turn.

    rows: [B] the cache row that the request holds, ascending; a proposer keeps its own state by this number.
    token_RL: int64 on the host, committed tokens by cache row; `token_RL[rows[b], :length_B[b]]` are row b's.
    length_B: [B] number of committed tokens, prompt included. The target's cache holds all of them but the last.
    max_draft_B: [B] how many tokens may be drafted for the row, 1 to K.
    last_token_B: int64 on the device, the last committed token.
    num_accepted_prev_B: [B] how many tokens of the row's last draft stood; whatever else a proposer made of that draft is worth nothing.
    uniform_BK: float64 on the device, the request's own noise for drawing draft tokens, if `needs_uniforms`.
    hidden: row b's `[n, T, D]` states of the tokens committed since the last call, if `hidden_layers` asked for them;
        they stand at positions `length_B[b] - 1 - n .. length_B[b] - 2`.
    logits_BV: the target's raw logits that the last token was chosen from, if `needs_logits`.
    """

    rows: np.ndarray
    requests: list[Request]
    token_RL: np.ndarray
    length_B: np.ndarray
    max_draft_B: np.ndarray
    last_token_B: Tensor
    num_accepted_prev_B: np.ndarray | None = None
    uniform_BK: Tensor | None = None
    hidden: list[Tensor] | None = None
    logits_BV: Tensor | None = None

    def select_rows(self, place_B: np.ndarray) -> Context:
        """The same for some of the rows, by their places, ascending."""
        at_B = torch.from_numpy(place_B).to(self.last_token_B.device, non_blocking=True)
        return Context(
            rows=self.rows[place_B],
            requests=[self.requests[b] for b in place_B],
            token_RL=self.token_RL,
            length_B=self.length_B[place_B],
            max_draft_B=self.max_draft_B[place_B],
            last_token_B=self.last_token_B[at_B],
            num_accepted_prev_B=None if self.num_accepted_prev_B is None else self.num_accepted_prev_B[place_B],
            uniform_BK=None if self.uniform_BK is None else self.uniform_BK[at_B],
            hidden=None if self.hidden is None else [self.hidden[b] for b in place_B],
            logits_BV=None if self.logits_BV is None else self.logits_BV[at_B],
        )

    def tokens(self, b: int) -> np.ndarray:
        """Committed tokens of row b, prompt included (a view: do not write)."""
        return self.token_RL[self.rows[b], : self.length_B[b]]

    @property
    def temperature_B(self) -> Tensor:
        values = [request.params.temperature for request in self.requests]
        return torch.tensor(values, dtype=torch.float32, device=self.last_token_B.device)


@dataclass(frozen=True)
class MethodFacts:
    """What other modules need to know of a method beside its settings, which its constructor has. Its class declares it, as `facts`,
    so that no module outside specdec.method names a method.

    drafts: false for a method that never drafts a token
    composes: it takes `proposers`, a list of other methods with their settings, and assigns a model to one of them
    runs_model: its drafts cost time, as those of a model do; a lookup's cost next to nothing
    model_hint: the fix in the error line about a missing `model`; unless given, the script that trains one
    model_spellings: values of `model` that mean this method, where no method is given
    name_marks: words of a hub id that mean this method, where no method is given
    aliases: other names of the method, as patterns of fnmatch
    parallel_of: the method that is this one under `parallel_drafting`
    parallel_only: its drafters cannot draft token by token
    train_script: stem of the script in train/ that trains its drafters; None: there is nothing to train
    mask_key: key of a checkpoint's config with the token whose embedding stands for tokens that are not known yet
    max_draft_key: key of a checkpoint's config with the most tokens of a draft
    one_is_no_limit: a `max_draft_key` of 1 does not limit a draft, since the one module is used again
    drafts_max: as many tokens as `max_draft_key` says is also the usual number
    serving: by engine, its name for the method: `method` of vLLM, `--speculative-algorithm` of SGLang
    serving_note: a sentence for the model card of an export
    served_in_target: the drafter is part of the target's own checkpoint where it is served
    """

    drafts: bool = True
    composes: bool = False
    runs_model: bool = False
    model_hint: str | None = None
    model_spellings: tuple[str, ...] = ()
    name_marks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    parallel_of: str | None = None
    parallel_only: bool = False
    train_script: str | None = None
    mask_key: str | None = None
    max_draft_key: str | None = None
    one_is_no_limit: bool = False
    drafts_max: bool = False
    serving: Mapping[str, str] = field(default_factory=dict)
    serving_note: str | None = None
    served_in_target: bool = False


class Proposer(Protocol):
    """Drafts tokens. It owns its state and repairs it from the context; nobody calls an update."""

    facts: ClassVar[MethodFacts]

    @classmethod
    def example_settings(cls, target: Any, directory: Path) -> dict[str, Any]:
        """Settings that its YAML leaves to the user, with which it drafts for this target: what the contract tests and eval/prove.py
        use. directory: an empty one, for an untrained checkpoint or for what it writes."""
        ...

    num_speculative_tokens: int
    hidden_layers: tuple[int, ...]  # target layers whose states it wants (ids as in vLLM: the entry of layer i)
    needs_logits: bool  # the logits that the last token was chosen from
    needs_uniforms: bool  # uniforms to draw with
    return_confidence: bool  # set from outside: drafts come with confidence_BKF, if the proposer has any
    num_confidence_features: int  # F of it; 0: it has none
    parts: tuple[str, ...]  # names of the proposers that it is composed of, as in Draft.proposer_B; (): it is one itself

    def on_start(self, row: int, request: Request) -> None:
        """A request takes a row; its prompt has been processed by the target."""

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        """The request leaves the row, finished (its `finish_reason` is set) or dropped. hidden: states of the tokens committed
        since the last `propose`, in parts of [n, T, D], if `hidden_layers` asked for them."""

    def propose(self, context: Context) -> Draft: ...

    def catch_up(self, context: Context) -> bool:
        """Process the states of rows that have drafted nothing for long, so that they need not be kept. False: they must be."""
        ...

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        """Bytes that growing its caches to that many rows and positions takes."""
        ...

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for that many rows and positions."""


class Policy(Protocol):
    """Decides in every step how much is drafted for each row, and how much of that is verified.

    A decision about position i may look at everything but the token drawn there (Draft.confidence_BKF says what is safe);
    tokens that the drafter chose as likeliest are not drawn, and may be looked at.
    """

    def on_start(self, row: int) -> None:
        """A request takes a row."""

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        """[B] tokens to draft for each of the active rows, at most most_B."""
        ...

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        """[B] tokens of each draft that are verified."""
        ...

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray) -> None:
        """What came of a step: draft as it was verified, and how much of it stood."""


class FixedLengthPolicy:
    """Defaults for a policy: all that may be is drafted, and all that is drafted verified; nothing is learned."""

    def on_start(self, row: int) -> None:
        pass

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        return most_B

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        return draft.length_B.numpy()

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray) -> None:
        pass


class StatelessProposer:
    """Defaults for a proposer that keeps no cache and asks nothing of the target."""

    facts: ClassVar[MethodFacts] = MethodFacts()

    @classmethod
    def example_settings(cls, target: Any, directory: Path) -> dict[str, Any]:
        return {}

    num_speculative_tokens = 0
    hidden_layers: tuple[int, ...] = ()
    needs_logits = False
    needs_uniforms = False
    return_confidence = False
    num_confidence_features = 0
    parts: tuple[str, ...] = ()

    def on_start(self, row: int, request: Request) -> None:
        pass

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        pass

    def catch_up(self, context: Context) -> bool:
        return False

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return 0

    def reserve(self, rows: int, slots: int) -> None:
        pass


def draft_from_lists(
    drafts: list[np.ndarray], device: torch.device | str = "cpu", evidence: list[np.ndarray] | None = None
) -> Draft:
    """Pad host-side drafts of different lengths into one Draft. evidence: [n, F] of each draft's n tokens."""
    length_B = np.array([len(draft) for draft in drafts], dtype=np.int64)
    token_BK = np.zeros((len(drafts), int(length_B.max(initial=0))), dtype=np.int64)
    for row, draft in zip(token_BK, drafts, strict=True):
        row[: len(draft)] = draft
    confidence_BKF = None
    if evidence is not None:
        padded_BKF = np.zeros((*token_BK.shape, evidence[0].shape[1]), dtype=np.float32)
        for own, given in zip(padded_BKF, evidence, strict=True):
            own[: len(given)] = given
        confidence_BKF = torch.from_numpy(padded_BKF).to(device, non_blocking=True)
    token = torch.from_numpy(token_BK).to(device, non_blocking=True)
    return Draft(token, torch.from_numpy(length_B), confidence_BKF=confidence_BKF)
