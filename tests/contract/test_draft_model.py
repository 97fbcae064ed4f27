"""Draft models and PARD: what is trained is what drafts, the rows and attention of mask tokens in plain words, checkpoints that
transformers loads, and what is refused.

`test_methods.py`, `test_exact.py` and `test_engine_distribution.py` hold how they draft to what every method keeps.
"""

from __future__ import annotations

import copy
import json
import signal
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import hub, method
from specdec.checkpoint import causal_lm
from specdec.checkpoint.native import Checkpoint
from specdec.core import Request
from specdec.drafter import unroll
from specdec.drafter.batch import Batch, Sample
from specdec.method.draft_model import DraftModel, Init
from specdec.method.pard import Pard
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.training import data
from specdec.training.features import OnlineFeatures, TokenSource
from specdec.training.loop import fit
from specdec.training.samples import mask_token
from specdec.training.settings import Settings
from support.cli import TRAIN, call, rows_of
from support.drafters import SAMPLES, close, decode, gradients, plain, prompts, sample
from support.methods import context
from support.processes import fork_ranks
from support.table import Restless, TableLM
from support.training import WORKER, conversations, same, same_rows, state_of, stop_at

K = 4
MASK = 259
KINDS: dict[str, type[DraftModel]] = {"draft_model": DraftModel, "pard": Pard}
BOTH = pytest.mark.parametrize("kind", KINDS)
LAYERS = {"layer_ids": [0, 2]}


@dataclass(frozen=True)
class Variant:
    """What is trained for which target: two layers of it, or a model of another kind."""

    target: str = "tiny-llama"
    train_embedding: bool = True
    other: str | None = None


VARIANTS = {
    "llama": Variant(),
    "llama-frozen": Variant(train_embedding=False),
    "qwen3": Variant("tiny-qwen3"),
    "mistral-sliding": Variant("tiny-mistral"),
    "gemma2-capped-tied": Variant("tiny-gemma2"),
    "gemma3-frozen-tied": Variant("tiny-gemma3", train_embedding=False),
    "cohere-capped-tied": Variant(other="cohere"),
    "granite-capped": Variant(other="granite", train_embedding=False),
    "phi-capped": Variant(other="phi"),
}
# a factor on the logits, a divisor and factors inside, a bias of the output layer
OTHERS = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0}, "phi": {}}
EACH = pytest.mark.parametrize("variant", VARIANTS)


@cache
def loaded(name: str = "tiny-llama") -> CausalLM:
    return CausalLM(name, "float32", "cpu")


@cache
def another(kind: str) -> Path:
    """A random model of another architecture with the vocabulary of `tiny`."""
    config = AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=256, eos_token_id=257, pad_token_id=258,
        max_position_embeddings=4096, resid_pdrop=0.5, attention_dropout=0.5, **OTHERS[kind],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (bias := model.get_output_embeddings().bias) is not None:
            torch.nn.init.normal_(bias)
    model.save_pretrained(directory := Path(tempfile.mkdtemp()))
    return directory


def architecture(kind: str, variant: str = "llama") -> dict[str, Any]:
    other = VARIANTS[variant].other
    return ({"model": str(another(other))} if other else LAYERS) | ({"pard_token": MASK} if kind == "pard" else {})


@cache
def grown(kind: str, variant: str) -> Checkpoint:
    """Two layers of the target, moved as if by training."""
    spec = VARIANTS[variant]
    fresh = KINDS[kind].init_checkpoint(loaded(spec.target), architecture(kind, variant), Init())
    noise = torch.Generator().manual_seed(4)
    assert fresh.tensors is not None
    fresh.tensors = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in sorted(fresh.tensors.items())
    }
    return fresh


def trainable(kind: str, variant: str = "llama", num_depths: int = K, **objective: Any) -> Any:
    spec = VARIANTS[variant]
    trained: Any = KINDS[kind](loaded(spec.target), copy.deepcopy(grown(kind, variant)), 1)
    settings = {"loss": {"nll": 0.5, "kl": 0.5}} | objective
    if kind == "pard":
        settings = {"num_depths": num_depths, "down_sample_ratio": 1.0} | settings
    trained.for_training(trained.objective_type(**settings), Init(train_embedding=spec.train_embedding))
    return trained


def written(trained: DraftModel, directory: Path | None = None) -> Path:
    directory = Path(tempfile.mkdtemp()) if directory is None else directory
    trained.write(directory, trained.state_dict(), {"why": "a test"}, "# card\n")
    return directory


def features(target: CausalLM, samples: list[Any]) -> Batch:
    return OnlineFeatures(target, ())(samples)


# --------------------------------------------------------------------------- training and drafting agree


@dataclass
class Proposed:
    """One row of one call of `propose`: committed tokens, what was drafted, and the logits of every place."""

    tokens: list[int]
    drafted: list[int]
    logits: list[Tensor]


def watched(proposer: Any) -> list[Proposed]:
    """Make a draft model write down what happens while it proposes."""
    proposals: list[Proposed] = []
    seen: list[Tensor] = []
    forward = proposer.forward_tokens
    propose = proposer.propose

    def forward_tokens(*args: Any) -> Tensor:
        seen.append(forward(*args).clone())
        return seen[-1]

    def watching(context: Any) -> Any:
        seen.clear()
        draft = propose(context)
        first = 0
        for b, length in enumerate(draft.length_B.tolist() if seen else ()):
            # a draft model gives every row a line in every step, PARD every place of every row in one
            row_steps = (
                [step[b] for step in seen[:length]] if proposer.name == "draft_model" else seen[0][first : first + length]
            )
            first += length
            if length:
                proposals.append(Proposed(context.tokens(b).tolist(), draft.token_BK[b, :length].tolist(), list(row_steps)))
        return draft

    proposer.forward_tokens = forward_tokens
    proposer.propose = watching
    return proposals


@EACH
@BOTH
@pytest.mark.parametrize("restless", [False, True])
def test_what_is_trained_is_what_drafts(kind: str, variant: str, restless: bool) -> None:
    """Every draft of a decoding in a batch, against training over (committed tokens, draft) as a document of a packed batch:
    logits at every step and position."""
    trained = trainable(kind, variant)
    target = loaded(VARIANTS[variant].target)
    proposer: Any = method.build(kind, target, model=str(written(trained)), num_speculative_tokens=K)
    proposals = watched(proposer)
    lengths = (3, 130, 20, 2, 9)
    policy = Restless(K) if restless else None
    assert decode(target, proposer, prompts(*lengths), policy=policy) == plain(VARIANTS[variant].target, lengths)
    assert len({len(one.drafted) for one in proposals}) > 1, "some rows draft less, at their end"

    documents = []
    for i, one in enumerate(proposals):
        tokens = np.array([*one.tokens, *one.drafted, 0])
        documents.append(Sample(str(i), tokens, np.arange(len(tokens)) >= len(one.tokens)))
    batch = TokenSource(torch.device("cpu"))(documents)
    compared = 0
    plan = trained.plan(batch, trained.objective.steps_at(1.0), 0)
    first_B = np.cumsum(batch.length_B) - batch.length_B
    with torch.no_grad():
        states = trained.unrolled(batch, plan)
        for i, one in enumerate(proposals):
            for k, logits_V in enumerate(one.logits):
                row = first_B[i] + len(one.tokens) - 1
                step = k
                if kind == "draft_model":  # its later drafts are later rows of the one step
                    row = row + k
                    step = 0
                place = int(np.searchsorted(plan.steps[step].rows, row))
                assert plan.steps[step].rows[place] == row
                (weight_VD,) = trained.heads()
                expected_V = states[step][place] @ weight_VD.t()
                expected_V = expected_V if trained.scale_draft_logits is None else trained.scale_draft_logits(expected_V)[0]
                close(expected_V, logits_V, 1e-4, f"{one.tokens[-3:]} at {k}")
                compared += 1
    assert compared > 30
    assert (trained.scale_draft_logits is not None) == ("capped" in variant)


@EACH
@BOTH
def test_the_attention_of_training_is_that_of_its_twin(kind: str, variant: str) -> None:
    """Values and gradients. Where a layer looks back a number of positions, or bends its scores, the way through masks is
    taken anyway, and is held against drafting above."""
    trained = trainable(kind, variant)
    batch = features(trained.target, SAMPLES)
    ours = gradients(trained, batch)
    unrolled = trained.unrolled
    trained.unrolled = lambda batch, plan, seed: unrolled(batch, plan, seed, unroll.attention_reference)
    close(ours, gradients(trained, batch), 1e-5)
    trained.unrolled = lambda batch, plan, seed: unrolled(batch, plan, seed, unroll.masked_attention(None, None))
    close(ours, gradients(trained, batch), 1e-5)


@EACH
@BOTH
def test_packed_is_unpacked(kind: str, variant: str) -> None:
    """Loss, sums and gradients of a batch are those of its documents, one by one: nothing looks into another document."""
    trained = trainable(kind, variant, **({"down_sample_ratio": 0.6} if kind == "pard" else {}))
    loss, sums, grads = gradients(trained, features(trained.target, SAMPLES), seed="s")
    parts = [gradients(trained, features(trained.target, [sample]), seed="s") for sample in SAMPLES]
    close(loss, sum(part[0] for part in parts))
    close(sums, sum(part[1] for part in parts))
    for name, grad in grads.items():
        close(grad, sum(part[2][name] for part in parts), 1e-5, name)


# ------------------------------------------------------------------------------------------------ mask tokens


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_mask_tokens_in_plain_words(variant: str) -> None:
    """PARD with all rows, against K copies of a document, of which the i-th has mask tokens only, and one dense mask over
    [K L, K L]: row (i, p) sees the tokens up to p - i, and the mask tokens (j, p - i + j) of its own chain."""
    num_depths = 3
    decay = 0.7
    trained = trainable("pard", variant, num_depths, loss={"nll": 1.0}, step_loss_decay=decay)
    document = sample("two turns", 21, [(5, 12), (15, 21)])
    loss, _, grads = gradients(trained, TokenSource(torch.device("cpu"))([document]))

    length = len(document.token_n)
    reference = hub.load_model(written(trained), attn_implementation="eager").train()
    ids = torch.from_numpy(np.concatenate([document.token_n, np.full((num_depths - 1) * length, MASK)]))
    place = [(i, p) for i in range(num_depths) for p in range(length)]
    sees = torch.zeros(len(place), len(place), dtype=torch.bool)
    for row, (i, p) in enumerate(place):
        for column, (j, r) in enumerate(place):
            real = j == 0 and r <= p - i
            chain = 0 < j <= i and r == p - i + j
            sees[row, column] = real or chain or row == column  # a row before its document sees itself, and counts for nothing
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    position = torch.tensor([p for _, p in place])
    logits = reference(
        input_ids=ids[None], position_ids=position[None], attention_mask=mask[None, None], use_cache=False
    ).logits
    log_q = logits[0].log_softmax(-1)
    want = torch.zeros(())
    for row, (i, p) in enumerate(place):
        if i <= p < length - 1 and document.mask_n[p + 1]:
            want = want - decay**i * log_q[row, document.token_n[p + 1]]
    want.backward()
    close(loss, want.detach())
    named = dict(reference.named_parameters())
    for name, grad in grads.items():
        close(grad, named[name.removeprefix("lm.")].grad, 1e-5, name)


def test_deeper_rows_are_fewer_and_nested() -> None:
    trained = trainable("pard", down_sample_ratio=0.5, down_sample_ratio_min=0.2, num_depths=5)
    length = 100
    batch = TokenSource(torch.device("cpu"))([sample("a", length, [(0, length)]), sample("b", length, [(0, length)])])
    plan = trained.plan(batch, 5, "seed 3")
    assert len(plan.steps[0].rows) == 2 * (length - 1)
    for k, (step, share) in enumerate(zip(plan.steps, (1.0, 0.5, 0.25, 0.2, 0.2), strict=True)):
        assert k == 0 or set(step.rows) <= set(plan.steps[k - 1].rows)
        for first in (0, length):
            sample_rows = step.rows[(step.rows >= first) & (step.rows < first + length)] - first
            assert share * length - (k + 1) <= len(sample_rows) <= share * length, "but for those at the end"
            assert sample_rows.max() + 1 + k < length
    again = trained.plan(batch, 5, "seed 3")
    other = trained.plan(batch, 5, "seed 4")
    assert all((a.rows == b.rows).all() for a, b in zip(plan.steps, again.steps, strict=True))
    assert not np.array_equal(plan.steps[2].rows, other.steps[2].rows)


def test_a_warm_up_trains_a_draft_model() -> None:
    trained = trainable("pard", depth_warmup=0.5)
    plain_ = trainable("draft_model")
    batch = features(trained.target, SAMPLES)
    assert [trained.num_steps(progress) for progress in (0.0, 0.49, 0.5, 1.0)] == [1, 1, K, K]
    close(gradients(trained, batch, progress=0.2), gradients(plain_, batch))


# ------------------------------------------------------------------------------------------- a step of training


@EACH
@BOTH
def test_everything_that_is_trained_learns(kind: str, variant: str) -> None:
    trained = trainable(kind, variant, loss={"nll": 1.0})
    before = {name: tensor.clone() for name, tensor in trained.to_checkpoint().tensors.items()}
    _, _, grads = gradients(trained, TokenSource(torch.device("cpu"))(SAMPLES))
    assert sum("layers.1" in name for name in grads) > 5
    assert all(grad.abs().max() > 0 for grad in grads.values()), [n for n, g in grads.items() if not g.abs().max()]
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 1e-3)
    optimizer.step()
    for name, tensor in trained.to_checkpoint().tensors.items():
        outside = name.startswith(("model.embed_tokens", "lm_head"))
        stays = (outside and not VARIANTS[variant].train_embedding) or name == "lm_head.bias"
        assert torch.equal(tensor, before[name]) == stays, name


@BOTH
def test_nothing_to_learn_is_a_clean_step(kind: str) -> None:
    trained = trainable(kind, loss={"nll": 1.0})
    loss, sums, grads = gradients(
        trained, TokenSource(torch.device("cpu"))([sample("a prompt", 9, []), sample("b", 4, [(0, 1)])])
    )
    assert loss == 0
    assert not sums.any()
    assert grads
    assert not any(grad.any() for grad in grads.values())


def test_the_target_runs_only_for_its_probs() -> None:
    trained = trainable("draft_model")
    assert not trained.needs_target(trained.objective_type(loss={"nll": 1.0, "kl": 0.0}))
    assert trained.needs_target(trained.objective_type(loss={"nll": 1.0, "tv": 0.1}))
    both = [source(SAMPLES) for source in (TokenSource(torch.device("cpu")), OnlineFeatures(trained.target, ()))]
    close(*(gradients(trainable("draft_model", loss={"nll": 1.0}), batch)[2] for batch in both), 1e-6)


# ------------------------------------------------------------------------------------------------------ the loop


def train(out_dir: Path, kind: str, variant: str = "llama", **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    trained = trainable(kind, variant, **({"down_sample_ratio": 0.6} if kind == "pard" else {}))
    rows = []
    settings = Settings(
        max_steps=20, global_batch_size=4, micro_batch_size=2, lr=1e-3, mixed_precision="no", log_every=1, eval_every=6,
        save_every=7, warmup_ratio=0.2,
    )  # fmt: skip
    samples = [sample(f"s{i}", 10 + 5 * (i % 6), [(4 + i % 3, 90)]) for i in range(14)]
    values = iter(range(1, 99))
    result = fit(
        trained, OnlineFeatures(trained.target, (), 1 << 28), samples, samples[:3], settings, out_dir, log=rows.append,
        evaluate=lambda saved: {"mean_acceptance_length": float(next(values))}, **more,
    )  # fmt: skip
    return result, rows, trained


@pytest.mark.parametrize(("kind", "variant"), [("draft_model", "llama-frozen"), ("pard", "gemma2-capped-tied")])
def test_stopped_and_resumed_equals_straight(kind: str, variant: str, tmp_path: Path) -> None:
    target = loaded(VARIANTS[variant].target)
    before = {key: tensor.clone() for key, tensor in target.model.state_dict().items()}
    distribution = target.head_rows()[0].clone()
    _, straight, trained = train(tmp_path / "straight", kind, variant)
    first, interrupted, _ = train(tmp_path / "parts", kind, variant, advance=stop_at(10, signal.SIGTERM))
    assert (first["interrupted"], first["step"]) == (True, 10)
    second, ended_rows, again = train(tmp_path / "parts", kind, variant, resume=True)
    assert not second["interrupted"]
    same(again.state_dict(), trained.state_dict(), 1e-7)
    same(state_of(tmp_path / "parts" / "last"), state_of(tmp_path / "straight" / "last"), 1e-7)
    for row in (*straight, *interrupted, *ended_rows):
        row.pop("mean_acceptance_length", None)
    same_rows([*interrupted, *ended_rows][-8:], straight[-8:])
    assert all(torch.equal(tensor, before[key]) for key, tensor in target.model.state_dict().items())
    assert torch.equal(target.head_rows()[0], distribution)
    assert straight[-1]["loss"] < straight[0]["loss"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = conversations(tmp_path_factory.mktemp("data") / "tiny.jsonl")
    return [
        "model=tiny", "model.dtype=float32", "model.device=cpu", "data=jsonl", f"data.path={path}", "data.held_out=4",
        "train.max_steps=6", "train.global_batch_size=4", "train.micro_batch_size=2", "train.mixed_precision=no",
        "train.log_every=1", "train.eval_every=3", "train.save_every=3", "eval.num_prompts=2", "eval.max_tokens=8",
        "train.drafter.layer_ids=[0,3]", "train.objective.loss={nll: 0.5, kl: 0.5}",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "embedding"), [("draft_model", "true"), ("pard", "false")])
def test_two_processes_are_one(kind: str, embedding: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    overrides = [*arguments, f"method={kind}", f"train.init.train_embedding={embedding}"]
    one = call(kind, *overrides, f"out_dir={tmp_path / 'one'}", cwd=tmp_path, folder=TRAIN)
    assert one.code == 0, one.err
    jobs = [["", *overrides, f"out_dir={tmp_path / how}", f"train.sharding={how}"] for how in ("ddp", "fsdp")]
    done = fork_ranks(tmp_path / "worker.py", TRAIN / f"{kind}.py", json.dumps(jobs), cwd=tmp_path)
    assert done.code == 0, done.err
    for how in ("ddp", "fsdp"):
        assert (tmp_path / how / "last").exists(), done.out
        same_rows(rows_of(tmp_path / how / "metrics.jsonl"), rows_of(tmp_path / "one" / "metrics.jsonl"))
        same(state_of(tmp_path / how / "last"), state_of(tmp_path / "one" / "last"))
        weights = [load_file(tmp_path / name / "last" / "model.safetensors") for name in (how, "one")]
        same(*weights)


def test_from_a_draft_model_to_pard(arguments: list[str], tmp_path: Path) -> None:
    """The scripts, without method=: a draft model, then PARD from it, then PARD again, which keeps its mask token. Decoding
    from the run's directory is lossless."""
    go = partial(call, cwd=tmp_path, folder=TRAIN)
    first_run = go("draft_model", *arguments, "method=draft_model", f"out_dir={tmp_path / 'a'}")
    assert first_run.code == 0, first_run.err
    small = [*arguments, "method=pard", "train.objective.num_depths=3", "method.num_speculative_tokens=3"]
    done = go("pard", *small, f"checkpoint={tmp_path / 'a'}", f"out_dir={tmp_path / 'b'}")
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "b" / "best" / "config.json").read_text())
    assert (config["pard_token"], config["specdec"]) == (MASK, {"num_depths": 3})
    assert str(hub.cache_dir()) not in json.dumps(config)
    first = [row["loss"] for row in rows_of(tmp_path / "b" / "metrics.jsonl")]
    done = go("pard", *small, f"checkpoint={tmp_path / 'b'}", f"out_dir={tmp_path / 'c'}")
    assert done.code == 0, done.err
    assert rows_of(tmp_path / "c" / "metrics.jsonl")[0]["loss"] < first[0]

    (seen,) = loaded().tokenizer("t")["input_ids"]
    for words in (["train.drafter.pard_token=260"], ["train.drafter.layer_ids=[0]"], [f"train.drafter.pard_token={seen}"]):
        refused = go("pard", *small, f"checkpoint={tmp_path / 'b'}", f"out_dir={tmp_path / 'd'}", *words)
        assert refused.code == 1
        assert refused.err.startswith("error: "), refused.err
        assert refused.err.count("\n") == 1
        assert not (tmp_path / "d").exists()
    assert "occurs in sample" in refused.err

    target = loaded()
    lengths = (3, 40, 9)
    for kind, name in (("draft_model", "a"), ("pard", "b"), ("pard", "c/last")):
        proposer = method.build(kind, target, model=str(tmp_path / name), num_speculative_tokens=3)
        assert decode(target, proposer, prompts(*lengths)) == plain("tiny-llama", lengths)


# ------------------------------------------------------------------------------------------------------ at rest


@EACH
@BOTH
def test_a_checkpoint_is_a_plain_model(kind: str, variant: str) -> None:
    """transformers loads it, with a tokenizer, and says what our engine says; tied weights are there once; opened again it is
    the same draft model."""
    trained = trainable(kind, variant)
    directory = written(trained)
    target = loaded(VARIANTS[variant].target)
    names = set(load_file(directory / "model.safetensors"))
    tied = json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in names) == (not tied)
    reference = hub.load_model(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ours = CausalLM(directory, "float32", "cpu")
    tokens = prompts(60)[0]
    cache_ = ours.new_cache()
    cache_.reserve(1, 64)
    logits = ours.forward(cache_, torch.tensor(tokens), np.array([0]), np.array([60])).logits
    close(logits, reference(torch.tensor([tokens])).logits[0].detach(), 1e-4)
    assert ours.eos_token_ids == target.eos_token_ids
    assert hub.load_tokenizer(directory)("a mat")["input_ids"] == target.tokenizer("a mat")["input_ids"]
    assert {"README.md", "provenance.json", "generation_config.json"} <= {path.name for path in directory.iterdir()}
    again = KINDS[kind].load_checkpoint(target, str(directory), None)
    assert again.tensors is not None
    same(again.tensors, trained.to_checkpoint().tensors, 0)
    assert again.config["pard_token"] == (MASK if kind == "pard" else None)


def test_layers_of_the_target() -> None:
    """The chosen layers, in order, beside its embedding, final norm and output layer, whatever type the target runs in."""
    target = CausalLM("tiny-mistral", "bfloat16", "cpu")
    target_tensors = load_file(target.path / "model.safetensors")
    checkpoint = DraftModel.init_checkpoint(target, {"layer_ids": [1, 3]}, Init())
    assert checkpoint.tensors is not None
    for name, tensor in checkpoint.tensors.items():
        target_name = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.1.")
        assert torch.equal(tensor, target_tensors[target_name]), name
    assert DraftModel.init_checkpoint(target, {}, Init()).config["num_hidden_layers"] == 1, "a quarter of four"
    gemma = DraftModel.init_checkpoint(loaded("tiny-gemma3"), {"num_hidden_layers": 3}, Init()).config
    assert gemma["num_hidden_layers"] == gemma["hf_config"]["num_hidden_layers"] == len(gemma["hf_config"]["layer_types"]) == 3
    other = DraftModel.init_checkpoint(target, {"model": "tiny-qwen3"}, Init())
    assert other.config["hf_config"]["model_type"] == "qwen3"


def test_layers_of_a_target_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shape whose weights are drawn at load."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    monkeypatch.setitem(hub.SHAPES, "small", hub.SHAPES["llama-135m"] | small | {"num_key_value_heads": 1})
    target = CausalLM("random-small", "bfloat16", "cpu")
    checkpoint = DraftModel.init_checkpoint(target, {"num_hidden_layers": 2}, Init())
    assert checkpoint.tensors is not None
    norm = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(checkpoint.tensors["model.embed_tokens.weight"], target.head_rows()[0].float())
    assert norm.std() > 0
    CausalLM(written_of(target, checkpoint), "float32", "cpu")


def written_of(target: CausalLM, checkpoint: Checkpoint) -> Path:
    trained = DraftModel(target, checkpoint, 1)
    trained.for_training(trained.objective_type(), Init(train_embedding=False))
    return written(trained)


# ----------------------------------------------------------------------------------------------- what vLLM feeds


def fed(proposer: Any, prompts_: list[list[int]], committed: list[list[int]], max_draft: list[int] | None = None) -> list[Any]:
    """(ids, where each row begins, places of the logits) of every forward of one draft, after prefills of the prompts."""
    calls = []
    forward = proposer.model.forward

    def watching(cache_: Any, token_N: Tensor, start_B: np.ndarray, length_B: np.ndarray, **more: Any) -> Any:
        calls.append((token_N.tolist(), start_B.tolist(), more["logits_at_N"].tolist()))
        return forward(cache_, token_N, start_B, length_B, **more)

    proposer.reserve(2, 64)
    for row, prompt in enumerate(prompts_):
        proposer.on_start(row, Request(str(row), prompt, SamplingParams()))
    proposer.model.forward = watching
    texts = {row: [*a, *b] for row, (a, b) in enumerate(zip(prompts_, committed, strict=True))}
    try:
        proposer.propose(context(proposer, texts, max_draft))
    finally:
        del proposer.model.forward
    return calls


PROMPTS = [[1, 2, 3, 4, 5], list(range(30, 40))]
NEW = [[10, 11, 100], [20, 21, 200]]


def test_a_draft_model_is_fed_as_in_vllm() -> None:
    """The tokens since last time, not shifted, the new one appended; its logits; then token by token."""
    calls = fed(DraftModel(loaded(), "tiny-qwen3", 3), PROMPTS, NEW)
    assert calls[0] == ([10, 11, 100, 20, 21, 200], [5, 10], [2, 5])
    assert [(len(ids), start, keep) for ids, start, keep in calls[1:]] == [(2, [8, 13], [0, 1]), (2, [9, 14], [0, 1])]


def test_pard_is_fed_as_in_vllm() -> None:
    """The same, and K-1 mask tokens behind, in one forward; logits at the new token and at the masks. A row that may draft less
    has fewer of them."""
    make = partial(Pard, loaded(), "tiny-qwen3", 3, pard_token=MASK)
    ids = [10, 11, 100, MASK, MASK, 20, 21, 200, MASK, MASK]
    assert fed(make(), PROMPTS, NEW) == [(ids, [5, 10], [2, 3, 4, 7, 8, 9])]
    assert fed(make(), PROMPTS, NEW, [1, 2]) == [([10, 11, 100, 20, 21, 200, MASK], [5, 10], [2, 5, 6])]
    assert fed(make(), PROMPTS, NEW, [0, 2]) == [([20, 21, 200, MASK], [5, 10], [2, 3])]


def test_what_mask_tokens_left_is_overwritten() -> None:
    """After a draft, everything behind the committed tokens is fed again, though the draft was accepted."""
    proposer: Any = Pard(loaded(), "tiny-qwen3", 3, pard_token=MASK)
    fed(proposer, PROMPTS, NEW)
    texts = {row: [*a, *b, 60, 61, 62, 63][: 12 + 3 * row] for row, (a, b) in enumerate(zip(PROMPTS, NEW, strict=True))}
    proposals: list[Any] = []
    forward = proposer.forward_tokens
    proposer.forward_tokens = lambda *args: proposals.append(args) or forward(*args)
    proposer.propose(context(proposer, texts))
    assert proposals[0][1].tolist() == [60, 61, 62, 63, MASK, MASK, 60, 61, MASK, MASK]
    assert proposals[0][2].tolist() == [8, 13]


def test_a_row_past_the_context_of_pard_stops_drafting_alone() -> None:
    proposer = Pard(loaded(), "tiny-qwen3", 4, max_model_len=30, pard_token=MASK)
    proposer.reserve(4, 64)
    texts = {row: list(range(40, 40 + length)) for row, length in enumerate([20, 29, 30, 45])}
    for row, tokens in texts.items():
        proposer.on_start(row, Request(str(row), tokens[:-1], SamplingParams()))
    assert proposer.propose(context(proposer, texts)).length_B.tolist() == [4, 2, 1, 0]


def test_pard_draws_each_place_from_its_own_distribution() -> None:
    proposer = Pard(loaded(), "tiny-qwen3", 3, "probabilistic", pard_token=MASK)
    proposer.reserve(2, 64)
    for row, prompt in enumerate(PROMPTS):
        proposer.on_start(row, Request(str(row), prompt, SamplingParams()))
    texts = {row: [*a, *b] for row, (a, b) in enumerate(zip(PROMPTS, NEW, strict=True))}
    proposals = watched(proposer)
    draft = proposer.propose(context(proposer, texts, [3, 2], temperature=0.7))
    assert draft.q_BKV is not None
    assert draft.length_B.tolist() == [3, 2]
    for b, one in enumerate(proposals):
        for k, logits_V in enumerate(one.logits):
            close(draft.q_BKV[b, k], (logits_V / 0.7).softmax(-1), 1e-5)
    assert not draft.q_BKV[1, 2].any(), "of a place that is not there"


# ------------------------------------------------------------------------------------------- choosing a mask token


def test_choosing_a_mask_token(one_line: Any) -> None:
    tokenizer = copy.deepcopy(loaded().tokenizer)  # 256 bytes, <s>, </s>, <pad>
    samples = [
        Sample("one", np.array([5, 6, 319]), np.ones(3, bool)),
        Sample("two", np.array([7, 259]), np.ones(2, bool)),
    ]
    assert mask_token(samples, tokenizer, 320) == 260, "the lowest beyond the tokenizer that does not occur"
    assert mask_token(samples[:1], tokenizer, 320) == 259
    assert mask_token([], tokenizer, 259) == 255, "nothing beyond, and all special tokens have a role: the highest free id"
    assert mask_token(samples, None, 320) == 318, "no tokenizer"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_1|>", "<|reserved_2|>", "<|tool|>"]})
    assert len(tokenizer) == 262
    assert mask_token([], tokenizer, 262) == 260, "a reserved one before one with another name"
    used = Sample("u", np.array([260]), np.ones(1, bool))
    assert mask_token([used], tokenizer, 262) == 259
    tokenizer.chat_template = tokenizer.chat_template + "<|reserved_2|>"
    assert mask_token([], tokenizer, 262) == 259, "the template brings the other one"

    assert mask_token(samples, tokenizer, 320, 300) == 300
    one_line(lambda: mask_token(samples, tokenizer, 320, 259), "259", "sample two")
    one_line(lambda: mask_token(samples, tokenizer, 320, 320), "320", "0..319")
    full = Sample("f", np.arange(320), np.ones(320, bool))
    one_line(lambda: mask_token([full], None, 320), "320", "none is left")


@pytest.mark.embedded
def test_the_mask_token_of_the_demo_data() -> None:
    """SmolLM2's tokenizer fills its vocabulary, so it is a special token without a meaning in a conversation."""
    path = hub.resolve(hub.DEFAULT)
    tokenizer = hub.load_tokenizer(path)
    samples = data.load(data.DEMO, tokenizer, 49152, 1024, limit=50).samples
    token = mask_token(samples, tokenizer, 49152)
    assert tokenizer.added_tokens_decoder[token].special
    assert token not in {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}


# ------------------------------------------------------------------------------------------------- what is refused


def test_mask_tokens_of_a_config(one_line: Any, tmp_path: Path) -> None:
    """The keys that vLLM looks up, in its order; none is an error; K over what was trained is one."""
    directory = written(trainable("pard", num_depths=4), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for keys, want in (
        ({"pard_token": 270}, 270),
        ({"ptd_token_id": 271}, 271),
        ({"mask_token_id": 272, "pard_token": 270, "ptd_token_id": 271}, 272),
    ):
        rest = {key: value for key, value in config.items() if key != "pard_token"}
        (directory / "config.json").write_text(json.dumps(rest | keys))
        assert Pard(loaded(), str(directory), 2).pard_token == want
    assert Pard(loaded(), str(directory), 2, pard_token=280).pard_token == 280
    one_line(lambda: Pard(loaded(), str(directory), 5), "num_speculative_tokens=5", "over the 4")
    one_line(lambda: Pard(loaded(), str(directory), 2, pard_token=320), "pard_token=320", "0..319")
    one_line(lambda: Pard(loaded(), "tiny-qwen3", 2), "tiny-qwen3", "no mask token", "train/pard.py", "pard_token")
    assert Pard(loaded(), "tiny-qwen3", 99, pard_token=MASK).num_speculative_tokens == 99, "who trained it did not say"
    trained = Pard(loaded(), copy.deepcopy(grown("pard", "llama")), 6)
    one_line(
        lambda: trained.for_training(trained.objective_type(num_depths=4), Init()), "num_speculative_tokens=6", "num_depths=4"
    )


def test_what_is_no_draft_model(one_line: Any, tmp_path: Path) -> None:
    table = TableLM.random(7)
    one_line(lambda: DraftModel(table, "tiny-llama", 2), "vocabulary of 320", "one of 7")
    one_line(lambda: DraftModel.load_checkpoint(table, "tiny-llama", None), "vocabulary of 320", "one of 7")
    one_line(lambda: DraftModel(loaded(), "tiny-llama", 0), "num_speculative_tokens=0")
    one_line(lambda: DraftModel(loaded(), "tiny-llama", 2, "often"), "draft_sample_method='often'")
    one_line(lambda: DraftModel(loaded(), "tiny-llama", 2, max_model_len=0), "max_model_len=0")
    fresh = partial(DraftModel.init_checkpoint, loaded(), init=Init())
    one_line(lambda: fresh({"num_hidden_layers": 5}), "num_hidden_layers=5", "has 4")
    one_line(lambda: fresh({"layer_ids": [2, 1]}), "[2, 1]", "ascending", "0..3")
    one_line(lambda: fresh({"layer_ids": []}), "layer_ids=[]")
    one_line(lambda: fresh({"layer_ids": [0], "num_hidden_layers": 2}), "num_hidden_layers=2")
    one_line(lambda: fresh({"layer_ids": [0], "model": "tiny"}), "model")
    one_line(lambda: fresh({"num_layers": 2}), "'num_layers'", "num_hidden_layers")
    one_line(lambda: fresh({"model": str(tmp_path / "nowhere")}), "nowhere")

    encoder, pickled, cut = (tmp_path / name for name in ("encoder", "pickled", "cut"))
    for directory in (encoder, pickled, cut):
        directory.mkdir()
        config = json.loads((loaded().path / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({"model_type": "t5"} if directory is encoder else config))
    torch.save(load_file(loaded().path / "model.safetensors"), pickled / "pytorch_model.bin")
    (cut / "model.safetensors").write_bytes((loaded().path / "model.safetensors").read_bytes()[:5000])
    for directory, word in ((encoder, "encoder"), (pickled, "cannot be read"), (cut, "cannot be read")):
        for action in (
            lambda d=directory: DraftModel.load_checkpoint(loaded(), str(d), None),
            lambda d=directory: DraftModel(loaded(), str(d), 2),
        ):
            one_line(action, str(directory), word)
    wide = grown("draft_model", "llama")
    broken = Checkpoint("draft_model", wide.config, {}, {**wide.tensors, "model.norm.weight": torch.ones(3)}, "it")  # type: ignore[dict-item]
    one_line(lambda: causal_lm.build(broken), "it", "model.norm.weight [3]")


def test_a_parallel_one_that_learns_to_draft_token_by_token_is_no_parallel_one(tmp_path: Path) -> None:
    """What it was is not kept: neither the mask token nor the depths."""
    target = loaded()
    parallel = Pard.init_checkpoint(target, LAYERS | {"pard_token": MASK}, Init())
    parallel.config["num_depths"] = K
    causal_lm.save(tmp_path, parallel, target.path, {}, "")
    assert causal_lm.load(str(tmp_path)).config["pard_token"] == MASK
    config = DraftModel.load_checkpoint(target, str(tmp_path), None).config
    assert config["pard_token"] is None
    assert "num_depths" not in config
    assert Pard.load_checkpoint(target, str(tmp_path), None).config["num_depths"] == K
