"""Seats for what is no chain: slot, position and visibility of a token; trees and blocks in the slot cache; accepted paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import method, rejection
from specdec.core import Context, Draft, Request, StatelessProposer, Verdict, check_proposer, require_chain
from specdec.engine import Engine
from specdec.model.attention import SlotAttention
from specdec.model.kv import CAUSAL, Block, ForwardBatch, SlotCache, Tree, Visibility
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy.adaptive import Adaptive
from specdec.policy.cost_table import CostTable
from specdec.policy.profiling import PaddedProposer
from specdec.rejection import Verifier
from support.methods import tiny
from support.table import scheme

CPU = torch.device("cpu")
HEADS = 4
KV_HEADS = 2
WIDTH = 8
SLOTS = 40
START_B = np.array([7, 0, 12])
LENGTH_B = np.array([5, 0, 3])  # a row among them takes part with no tokens
PARENT_BM = np.array([[-1, 0, 0, 1, 2], [-1, -1, -1, -1, -1], [-1, 0, 1, 0, 0]])
SLOT_BM = np.array([[7, 9, 8, 11, 10], [0, 0, 0, 0, 0], [14, 13, 12, 0, 0]])


def chain_of(length_B: np.ndarray) -> np.ndarray:
    return np.tile(np.arange(int(length_B.max())) - 1, (len(length_B), 1))


def filled_cache(seed: int = 0) -> SlotCache:
    cache = SlotCache([(KV_HEADS, WIDTH)] * 2, torch.float32, CPU)
    cache.reserve(4, SLOTS)
    generator = torch.Generator().manual_seed(seed)
    for stored in (*cache.key_RHSD, *cache.value_RHSD):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    return cache


def sees(visibility: Visibility, b: int, m: int, n: int) -> bool:
    """In words: whether token m of row b sees token n of the same forward."""
    if isinstance(visibility, Block):
        return True
    if isinstance(visibility, Tree):
        while m >= 0 and m != n:
            m = int(visibility.parent_BX[b, m])
        return m == n
    return n <= m


def depth(visibility: Visibility, b: int, m: int) -> int:
    if not isinstance(visibility, Tree):
        return m
    parent = int(visibility.parent_BX[b, m])
    return 0 if parent < 0 else 1 + depth(visibility, b, parent)


@pytest.mark.parametrize("sliding_window", [None, 3, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("visibility", "slot_BM"),
    [(CAUSAL, None), (Tree(PARENT_BM), None), (Tree(PARENT_BM), SLOT_BM), (Block(), None), (Block(), SLOT_BM)],
    ids=["causal", "tree", "tree elsewhere", "block", "block elsewhere"],
)
def test_attention_is_that_of_a_dense_mask(
    visibility: Visibility, slot_BM: np.ndarray | None, softcap: float | None, sliding_window: int | None
) -> None:
    """Every query against the keys that it sees, one by one."""
    cache = filled_cache()
    batch = ForwardBatch(cache, 1, START_B, LENGTH_B, visibility, slot_BM)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch.num_tokens, HEADS, WIDTH, generator=generator)
    key, value = torch.randn(2, batch.num_tokens, KV_HEADS, WIDTH, generator=generator)
    attention = SlotAttention(batch)
    attention.write_kv(1, key, value)
    out = attention.attend(1, query, 0.5, sliding_window, softcap)
    first_B = np.cumsum(LENGTH_B) - LENGTH_B
    for b, m in np.argwhere(np.arange(5) < LENGTH_B[:, None]).tolist():
        position = START_B[b] + depth(visibility, b, m)
        keys = []
        values = []
        for slot in range(START_B[b]):
            if sliding_window is None or slot > position - sliding_window:
                keys.append(cache.key_RHSD[1][1 + b, :, slot])
                values.append(cache.value_RHSD[1][1 + b, :, slot])
        for n in range(LENGTH_B[b]):
            behind = position - (START_B[b] + depth(visibility, b, n))
            if sees(visibility, b, m, n) and (sliding_window is None or behind < sliding_window):
                keys.append(key[first_B[b] + n])
                values.append(value[first_B[b] + n])
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            score = torch.stack([k[group] for k in keys]) @ query[first_B[b] + m, head] * 0.5
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            want = score.softmax(0) @ torch.stack([v[group] for v in values])
            torch.testing.assert_close(out[first_B[b] + m, head], want, rtol=1e-4, atol=1e-5)


def test_positions_and_slots_are_apart() -> None:
    batch = ForwardBatch(filled_cache(), 1, START_B, LENGTH_B, Tree(PARENT_BM), SLOT_BM)
    assert batch.row_N.tolist() == [1] * 5 + [3] * 3
    assert batch.slot_N.tolist() == [7, 9, 8, 11, 10, 14, 13, 12]
    assert batch.position_N.tolist() == [7, 8, 8, 9, 9, 12, 13, 14]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_chain_is_the_tree_of_one_branch(architecture: str) -> None:
    """The same bits, over sliding windows too."""
    model = CausalLM(f"tiny-{architecture}", "float32", "cpu")
    start_B = np.array([20, 9, 31])
    length_B = np.array([4, 1, 6])
    ids = np.random.default_rng(0).integers(0, 256, 64)
    outputs = []
    for visibility in (CAUSAL, Tree(chain_of(length_B))):
        cache = model.new_cache()
        cache.reserve(3, 64)
        for row, start in enumerate(start_B):
            model.prefill(cache, row, ids[:start], 0, 64)
        token_N = torch.from_numpy(np.concatenate([ids[s : s + n] for s, n in zip(start_B, length_B, strict=True)]))
        outputs.append(model.forward(cache, token_N, start_B, length_B, visibility=visibility, hidden_layers=(1,)))
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].hidden_NTD, outputs[1].hidden_NTD)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_branches_of_a_tree_are_chains(architecture: str) -> None:
    """Logits of every node are those after the chain from the root to it; and once its K and V are moved, the row goes on."""
    model = CausalLM(f"tiny-{architecture}", "float32", "cpu")
    ids = np.random.default_rng(1).integers(0, 256, 64)
    parent_M = np.array([-1, 0, 0, 1, 2, 4])
    tokens = np.array([3, 70, 80, 90, 100, 110])
    cache = model.new_cache()
    cache.reserve(2, 64)
    for row in range(2):
        model.prefill(cache, row, ids[:30], 0, 64)
    tree = model.forward(cache, torch.from_numpy(tokens), np.array([30]), np.array([6]), visibility=Tree(parent_M[None]))
    for node in range(6):
        branch = [node]
        while parent_M[branch[0]] >= 0:
            branch.insert(0, int(parent_M[branch[0]]))
        chain = model.forward(
            cache, torch.from_numpy(tokens[branch]), np.array([30]), np.array([len(branch)]), first_row=1, last_only=True
        )
        torch.testing.assert_close(tree.logits[node], chain.logits[0], rtol=1e-4, atol=1e-3)
    path = [0, 2, 4, 5]  # as chain in row 1 by now
    cache.move(torch.zeros(4, dtype=torch.int64), torch.tensor([30 + node for node in path]), torch.arange(30, 34))
    token = torch.from_numpy(ids[:1])
    after = [model.forward(cache, token, np.array([34]), np.array([1]), first_row=row).logits for row in (0, 1)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-3)


def test_a_move_reads_before_it_writes() -> None:
    cache = filled_cache()
    before = [x.clone() for x in (*cache.key_RHSD, *cache.value_RHSD)]
    rows = torch.tensor([0, 0, 2])
    source = torch.tensor([5, 6, 9])
    to = torch.tensor([6, 7, 9])
    cache.move(rows, source, to)
    for stored, old in zip((*cache.key_RHSD, *cache.value_RHSD), before, strict=True):
        assert torch.equal(stored[0, :, 6], old[0, :, 5])
        assert torch.equal(stored[0, :, 7], old[0, :, 6])
        old[0, :, 6], old[0, :, 7] = old[0, :, 5].clone(), old[0, :, 6].clone()
        assert torch.equal(stored, old)


def test_a_plan_fills_the_buffers_of_its_bucket() -> None:
    """What a graph captures: the same addresses, other numbers. And `forward` is `plan` and `run`."""
    model = tiny()
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 60))
    cache = model.new_cache()
    cache.reserve(2, 64)
    for row in range(2):
        model.prefill(cache, row, ids[:40].numpy(), 0, 64)
    plan = model.plan(cache, np.array([20, 30]), np.array([3, 2]))
    index = plan.index.data_ptr()
    first = model.run(ids[:5], plan).logits
    assert torch.equal(model.forward(cache, ids[:5], np.array([20, 30]), np.array([3, 2])).logits, first)
    again = model.plan(cache, np.array([25, 11]), np.array([3, 2]), buffers=plan)
    assert again.index.data_ptr() == index
    second = model.run(ids[5:10], again).logits
    assert torch.equal(model.forward(cache, ids[5:10], np.array([25, 11]), np.array([3, 2])).logits, second)
    with pytest.raises(AssertionError, match="one bucket"):
        model.plan(cache, np.array([25, 11]), np.array([2, 2]), buffers=plan)


# --------------------------------------------------------------------------------------------- the engine


class Bushes(StatelessProposer):
    """Trees of tokens by lot, of which some branch is what the target says, so that paths are long and not the first nodes."""

    num_speculative_tokens = 6
    hidden_layers = (1, 3)

    def __init__(self, target: CausalLM, answers: dict[str, list[int]]):
        self.target = target
        self.answers = answers
        self.rng = np.random.default_rng(0)
        self.hidden: dict[str, list[Tensor]] = {}

    def propose(self, context: Context) -> Draft:
        shape = (len(context.rows), self.num_speculative_tokens)
        token_BK = self.rng.integers(97, 123, shape)
        parent_BK = np.zeros(shape, dtype=np.int64)
        for b, request in enumerate(context.requests):
            assert context.hidden is not None
            self.hidden.setdefault(request.id, []).append(context.hidden[b])
            right = self.answers[request.id][int(context.length_B[b]) - len(request.prompt_token_ids) :]
            place, node = 0, -1  # of the last token of the right branch
            for k in range(shape[1]):
                if place < len(right) and self.rng.random() < 0.5:
                    token_BK[b, k] = right[place]
                    parent_BK[b, k] = node
                    place = place + 1
                    node = k
                else:
                    parent_BK[b, k] = self.rng.integers(-1, k)
        length_B = torch.from_numpy(self.rng.integers(0, context.max_draft_B + 1))
        return Draft(torch.from_numpy(token_BK), length_B, parent_BK=torch.from_numpy(parent_BK))


def walk(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Greedy verification of a tree: from the last committed token go to the child that is the argmax, as long as there is
    one."""
    assert draft.parent_BK is not None
    best_BJ = p_BJV.argmax(-1).tolist()
    path_BK = torch.zeros_like(draft.token_BK)
    count = []
    extra = []
    for b, length in enumerate(draft.length_B.tolist()):
        node = -1
        num_accepted = 0
        for k in range(length):
            if int(draft.parent_BK[b, k]) == node and int(draft.token_BK[b, k]) == best_BJ[b][node + 1]:
                node = k
                path_BK[b, num_accepted] = k
                num_accepted += 1
        count.append(num_accepted)
        extra.append(best_BJ[b][node + 1])
    return Verdict(torch.tensor(count), torch.tensor(extra), path_BK)


def decoded(target: CausalLM, proposer: Any, verifier: Verifier, rows: int, max_tokens: int = 40) -> list[Request]:
    engine = Engine(target, proposer, verifier, max_batch_size=rows, prefill_chunk_size=16)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(str(i), list(range(65, 75 + 3 * i)), params) for i in range(4)]
    return sorted(engine.run(requests), key=lambda request: request.id)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_engine_follows_the_path_of_a_tree(rows: int) -> None:
    """Tokens are those of plain decoding, and the states that the proposer reads those of a prefill over them."""
    target = tiny()
    plain = decoded(target, method.build("none", target), rejection.build("standard"), rows)
    answers = {request.id: request.output_token_ids for request in plain}
    bushes = Bushes(target, answers)
    requests = decoded(target, bushes, Verifier("walk", True, "step", walk), rows)
    assert {request.id: request.output_token_ids for request in requests} == answers
    accepted = [n for request in requests for n in request.stats.accepted]
    assert max(accepted) >= 3
    for request in requests:
        states = torch.cat(bushes.hidden[request.id])
        tokens = np.array([*request.prompt_token_ids, *request.output_token_ids])[: len(states)]
        cache = target.new_cache()
        cache.reserve(1, len(tokens))
        want = target.prefill(cache, 0, tokens, 0, 512, bushes.hidden_layers).hidden_NTD
        torch.testing.assert_close(states, want, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------- every place that takes a draft apart

TREE = Draft(
    torch.tensor([[5, 6, 7], [8, 9, 0]]),
    torch.tensor([3, 2]),
    parent_BK=torch.tensor([[-1, -1, 0], [-1, 0, 0]]),
    finite_BK=torch.ones(2, 3, dtype=torch.bool),
)
P_BJV = torch.full((2, 4, 10), 0.1)
U_BJ = torch.full((2, 4), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("parent_BK", "message"),
    [
        (torch.tensor([[-1, -1, 0], [-1, 0, 0]], dtype=torch.int32), r"torch.int32 \[2, 3\]; it must be torch.int64 \[2, 3\]"),
        (torch.tensor([[-1, -1], [-1, 0]]), r"torch.int64 \[2, 2\]; it must be torch.int64 \[2, 3\]"),
        (torch.tensor([[-1, 1, 0], [-1, 0, 0]]), "node 1 of row 0 has parent 1"),
    ],
)
def test_parents_that_cannot_be(parent_BK: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Mine.propose: .*{message}") as raised:
        replace(TREE, parent_BK=parent_BK).check_tree("Mine.propose")
    assert "\n" not in str(raised.value)


class Fixed(StatelessProposer):
    """Drafts TREE, or its first row."""

    num_speculative_tokens = 3

    def propose(self, context: Context) -> Draft:
        draft = TREE.select_rows(np.arange(len(context.rows)))
        return draft.cut(np.minimum(draft.length_B.numpy(), context.max_draft_B))


def joined(*components: StatelessProposer) -> Draft:
    proposer: Any = method.build(
        "hybrid", tiny(), num_speculative_tokens=3, proposers=[{"method": "ngram", "prompt_lookup_min": 1}] * len(components)
    )
    for component, inner in zip(proposer.components, components, strict=True):
        component.proposer = inner
    proposer.compose()
    for row in range(2):
        proposer.on_start(row, Request(str(row), [1], SamplingParams()))
    draft: Draft = proposer.propose(CONTEXT)
    return draft


CONTEXT = Context(
    rows=np.arange(2),
    requests=[Request(str(row), [1], SamplingParams()) for row in range(2)],
    token_RL=np.ones((2, 8), dtype=np.int64),
    length_B=np.array([4, 4]),
    max_draft_B=np.array([3, 3]),
    last_token_B=torch.tensor([1, 1]),
)
COSTS = CostTable([1, 2], [0, 3], [[1.0, 2.0]] * 2, [[0.0, 1.0]] * 2, {})

# Where drafts are cut, scattered and composed: what comes of their parents
RESPECTED: dict[str, tuple[Callable[[], Draft], list[list[int]]]] = {
    "cut": (lambda: TREE.cut(np.array([2, 1])), [[-1, -1], [-1, 0]]),
    "select_rows": (lambda: TREE.select_rows(np.array([1])), [[-1, 0, 0]]),
    "scatter_rows": (lambda: TREE.scatter_rows(np.array([0, 2]), 3), [[-1, -1, 0], [0, 0, 0], [-1, 0, 0]]),
    "hybrid": (lambda: joined(Fixed()), [[-1, -1, 0], [-1, 0, 0]]),
    "measuring costs": (lambda: PaddedProposer(Fixed(), 4).propose(CONTEXT), [[-1, -1, 0], [-1, 0, 0]]),
}


@pytest.mark.parametrize("place", RESPECTED)
def test_parents_go_where_their_tokens_go(place: str) -> None:
    make, parents = RESPECTED[place]
    draft = make()
    assert draft.parent_BK is not None
    assert draft.parent_BK.tolist() == parents
    assert draft.parent_BK.shape == draft.token_BK.shape


def test_a_scheme_for_chains_may_refuse_a_tree(one_line: Callable[..., str]) -> None:
    one_line(lambda: require_chain(TREE, "my scheme"), "my scheme takes chains", "parent_BK", "use a method that drafts chains")


def test_a_policy_takes_the_first_nodes_that_pay() -> None:
    """Node 2 of row 0 hangs on node 0, and what it learns of a path it learns of these nodes."""
    policy = Adaptive(COSTS, 3, 2, auto=True, prunes=True, num_confidence_features=1, drafts_trees=True)
    for row in range(2):
        policy.on_start(row)
    rows = np.arange(2)
    draft = Draft(TREE.token_BK, TREE.length_B, parent_BK=TREE.parent_BK, confidence_BKF=torch.zeros(2, 3, 1))
    path_BK = np.array([[0, 2, 0], [0, 0, 0]])
    for _ in range(200):
        policy.draft_lengths(rows, np.array([3, 3]))
        verified_B = policy.verify_lengths(rows, draft)
        assert (verified_B <= [3, 2]).all()
        policy.verify_lengths(rows, draft)
        policy.observe(rows, draft, np.array([2, 0]), path_BK)
    assert policy.post_draft is not None
    on_path_BK = policy.pre_draft.predict(policy.feature_BKF[:, :, :1])
    assert on_path_BK[0, 0] > on_path_BK[0, 1] + 0.2  # row 0 always accepts nodes 0 and 2, and never node 1
    assert on_path_BK[0, 2] > on_path_BK[0, 1] + 0.2
    sampled = Draft(TREE.token_BK, TREE.length_B, torch.full((2, 3, 10), 0.1), TREE.parent_BK, torch.zeros(2, 3, 1))
    assert policy.verify_lengths(rows, sampled).tolist() == [3, 2], "sampled trees are verified as a whole"


@pytest.mark.parametrize("name", rejection.names())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_takes_trees_under_every_scheme(name: str, temperature: float) -> None:
    """Also of a proposer that says nothing of trees: its nodes are no more than what may still be emitted."""
    engine = Engine(tiny(), Fixed(), scheme(name, 3), max_batch_size=2)
    params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    requests = list(engine.run([Request(str(i), [65, 66], params) for i in range(2)]))
    assert [len(request.output_token_ids) for request in requests] == [8, 8]
    assert all(len(request.stats.draft_parents) == len(request.stats.drafted) for request in requests)


def test_a_tree_is_no_deeper_than_what_may_be_emitted(one_line: Callable[..., str]) -> None:
    class Deep(Fixed):
        drafts_trees = True

        def propose(self, context: Context) -> Draft:
            draft = super().propose(context)
            return Draft(draft.token_BK, draft.length_B, parent_BK=torch.arange(-1, 2).expand(len(context.rows), 3))

    engine = Engine(tiny(), Deep(), scheme("standard", 3))
    request = Request("0", [65, 66], SamplingParams(temperature=0, max_tokens=3))
    one_line(lambda: list(engine.run([request])), "Deep.propose drafted trees [3] deep", "max_depth_B allows [1]")


def test_a_node_hangs_on_one_before_it(one_line: Callable[..., str]) -> None:
    Draft(TREE.token_BK, TREE.length_B, parent_BK=torch.tensor([[-1, 0, 1], [-1, 0, 7]])).check_tree(
        "mine"
    )  # beyond its length
    wrong = Draft(TREE.token_BK, TREE.length_B, parent_BK=torch.tensor([[-1, 0, 1], [0, 0, 0]]))
    one_line(lambda: wrong.check_tree("mine.propose"), "mine.propose", "node 0 of row 1", "parent 0")


def test_a_proposer_that_does_not_keep_the_protocol(one_line: Callable[..., str]) -> None:
    """Found when the engine is built, not in the middle of a run."""

    class Half:
        num_speculative_tokens = 2

        def propose(self, context: Context) -> Draft:
            return Draft.empty(len(context.rows))

    class Wrong(StatelessProposer):
        hidden_layers: Any = "1, 2"

        def propose(self, context: Context) -> Draft:
            return Draft.empty(len(context.rows))

    one_line(lambda: check_proposer(Half()), "proposer Half has no facts", "StatelessProposer")
    one_line(lambda: check_proposer(StatelessProposer()), "no method propose")
    one_line(lambda: Engine(tiny(), Wrong(), rejection.build("standard")), "hidden_layers='1, 2' must be tuple")
    for name in method.names():
        assert re.fullmatch(r"\w*", method.find(name).name)  # type: ignore[attr-defined]
