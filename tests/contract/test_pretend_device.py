"""On a device: every method decodes as on the CPU, no tensor is on the wrong side, and the host waits once per step.

A device that is registered once stays, and torch, accelerate and transformers then look for it everywhere: what runs on it
has a process of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from specdec import sampling
from specdec.core import Request
from specdec.drafter.tree import Grower
from specdec.engine import Engine
from specdec.method import find
from specdec.model import packed_linear
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy.cost_table import CostTable
from specdec.speculative_config import SpeculativeConfig
from specdec.training.features import OnlineFeatures, TokenSource
from support.methods import METHODS, TREE_METHODS, settings, tiny_prompts, tree_settings
from support.processes import FORKS
from support.training import SAMPLES

NUM_REQUESTS = 4
MAX_TOKENS = 7
# what more than the verdict the host waits for: (whenever the method drafts, when a request has finished); a drafter's tree is
# built on the host, which reads the children of every level
MORE_READS = {
    "ngram_gpu": (1, 0),  # how much was found: the width of the draft
    "extract_hidden_states": (0, 1),  # the states, for the file
}
SCHEMES = ["standard", "block", "match", "gumbel"]


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., None]]:
    """Calls a function of this file in the process with the device."""
    with ProcessPoolExecutor(1, mp_context=FORKS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda function, *arguments, **more: pool.submit(function, *arguments, **more).result()


@functools.cache
def target(on_device: bool) -> CausalLM:
    with mock.patch.object(packed_linear, "can_pack", return_value=False):
        target = CausalLM("tiny-llama", "float32", "cpu")
    if on_device:
        from support.pretend_device import DEVICE, pretend_device

        with pretend_device():
            target.model.to(DEVICE)
        target.device = DEVICE
    return target


def decode(
    target: CausalLM, values: dict[str, Any], enforce_eager: bool = True, **params: Any
) -> tuple[dict[str, list[int]], int, int]:
    """The tokens of some requests, how often the host must wait for a verdict, and how often the method drafted."""
    plan = SpeculativeConfig(**values).resolve()
    proposer, verifier = plan.build(target)
    policy = plan.policy.build(target, proposer, 3)
    engine = Engine(target, proposer, verifier, max_batch_size=3, policy=policy, enforce_eager=enforce_eager)
    params = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | params
    prompts = tiny_prompts()[:NUM_REQUESTS]
    engine.add(*(Request(str(i), ids, SamplingParams(**params), seed=i) for i, ids in enumerate(prompts)))
    done: list[Request] = []
    num_verdicts = NUM_REQUESTS  # after their prefills
    with mock.patch.object(proposer, "propose", wraps=proposer.propose) as propose:
        while engine.waiting or engine.num_running:
            done += engine.step()
            num_verdicts += engine.last_step is not None
    return {request.id: request.output_token_ids for request in done}, num_verdicts, propose.call_count


def holds(values: dict[str, Any], more: tuple[int, int] = (0, 0), **params: Any) -> None:
    from support.pretend_device import pretend_device

    expected, _, _ = decode(target(on_device=False), values, **params)
    children = mock.patch.object(Grower, "_children", autospec=True, side_effect=Grower._children)
    with pretend_device() as device, children as levels:
        tokens, num_verdicts, num_drafts = decode(target(on_device=True), values, **params)
    assert tokens == expected
    num_reads = num_verdicts + more[0] * num_drafts + more[1] * NUM_REQUESTS + levels.call_count
    assert len(device.reads) == num_reads, Counter(device.reads)


@pytest.mark.parametrize("method", METHODS)
def test_chains(apart: Callable[..., None], method: str) -> None:
    apart(chain, method)


def chain(method: str) -> None:
    holds(settings(method, target(on_device=False)), MORE_READS.get(method, (0, 0)))


@pytest.mark.parametrize("method", TREE_METHODS)
def test_trees(apart: Callable[..., None], method: str) -> None:
    apart(tree, method)


def tree(method: str) -> None:
    holds(tree_settings(method, target(on_device=False)))


def test_hybrid_trees(apart: Callable[..., None]) -> None:
    """Of the tokens that were found and the drafter's tree one is made on the host, which reads both at once."""
    apart(hybrid)


def hybrid() -> None:
    drafter = tree_settings("eagle3", target(on_device=False))
    lookup = {"method": "ngram", "prompt_lookup_min": 2}
    holds({"method": "hybrid", "num_speculative_tokens": 7, "proposers": [lookup, drafter]}, (1, 0))


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "eagle3", "medusa", "dflash"])
@pytest.mark.parametrize("drafts_trees", [False, True])
def test_fixed_shapes(apart: Callable[..., None], method: str, drafts_trees: bool) -> None:
    """What a graph captures neither reads the device nor copies to it."""
    if method in TREE_METHODS or not drafts_trees:
        apart(fixed, method, drafts_trees)


def fixed(method: str, drafts_trees: bool) -> None:
    from support.pretend_device import PretendDevice

    run = CausalLM.run
    traffic = []

    def watched(self: CausalLM, *args: Any, **more: Any) -> Any:
        device = torch.utils._python_dispatch._get_current_dispatch_mode()
        before = (len(device.reads), device.num_writes) if isinstance(device, PretendDevice) else None
        output = run(self, *args, **more)
        if before is not None:
            traffic.append((len(device.reads) - before[0], device.num_writes - before[1]))
        return output

    values = (tree_settings if drafts_trees else settings)(method, target(on_device=False))
    with mock.patch.object(CausalLM, "run", watched):
        holds(values, enforce_eager=False)
    assert set(traffic) == {(0, 0)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3", "draft_model", "dspark"])
def test_sampled(apart: Callable[..., None], method: str, scheme: str) -> None:
    apart(sampled, method, scheme)


def sampled(method: str, scheme: str) -> None:
    values = settings(method, target(on_device=False)) | {"rejection_sample_method": scheme}
    if method in ("eagle3", "draft_model", "dspark"):
        values["draft_sample_method"] = "probabilistic"
    holds(values, temperature=0.8)


POLICIES = {
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]},
    "adaptive": {"enable_adaptive_verification": True},
    "auto": {"num_speculative_tokens": "auto"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["ngram", "eagle3", "dspark"])
def test_policies(apart: Callable[..., None], method: str, policy: str, tmp_path: Path) -> None:
    """What is cut by a drafter's confidence is decided on the host, which reads it once for every draft."""
    apart(adapts, method, policy, tmp_path / "cost.json")


def adapts(method: str, policy: str, path: Path) -> None:
    values = settings(method, target(on_device=False)) | POLICIES[policy]
    if policy != "schedule":
        verify_s = [[1.0, 1.1, 1.4], [1.1, 1.5, 3.0]]
        about = {"target": "tiny-llama", "method": method}
        CostTable([1, 3], [0, 2, 5], verify_s, [[0.0, 0.1, 0.2]] * 2, about).save(path)
        values["cost_table"] = str(path)
    reads_confidence = policy == "adaptive" and method != "ngram"
    holds(values, (int(reads_confidence), 0))


@pytest.mark.parametrize("method", [name for name in METHODS if find(name).facts.train_script])
def test_training(apart: Callable[..., None], method: str) -> None:
    """A step's loss and gradients are the CPU's. The host reads once for each sample whose features are computed, and never
    while the loss and its gradients are."""
    apart(trains, method)


def trains(method: str) -> None:
    from support.pretend_device import pretend_device

    expected_loss, expected, _ = loss_and_gradients(method, target(on_device=False), lambda: 0)
    with pretend_device() as device:
        loss, gradients, num_reads = loss_and_gradients(method, target(on_device=True), lambda: len(device.reads))
        loss = loss.cpu()
        gradients = {name: gradient.cpu() for name, gradient in gradients.items()}
    torch.testing.assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        gap = (gradient - expected[name]).abs().max()
        assert gap <= 2e-5 * expected[name].abs().max(), name
    num_features = 0 if method in ("draft_model", "pard") else 3
    assert num_reads == [num_features, 0, 0], Counter(device.reads)


def loss_and_gradients(
    method: str, target: CausalLM, num_reads: Callable[[], int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Of one batch; and how often the host waited for features, loss and gradients."""
    kind: Any = find(method)
    init = kind.init_type()
    checkpoint = kind.init_checkpoint(target, {"pard_token": 7} if method == "pard" else {}, init)
    drafter = kind(target, checkpoint, 1)
    objective = drafter.objective_type()
    has_features = drafter.needs_target(objective)
    features = OnlineFeatures(target, drafter.hidden_layers) if has_features else TokenSource(target.device)
    drafter.for_training(objective, init, features(SAMPLES[:4]).hidden(drafter.hidden_layers) if has_features else None)
    counts = [num_reads()]
    batch = features(SAMPLES[4:7])
    counts.append(num_reads())
    loss, _ = drafter(batch, 0.5, "a seed")
    counts.append(num_reads())
    loss.backward()
    counts.append(num_reads())
    gradients = {name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients, np.diff(counts).tolist()


MUTANTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a hidden item": lambda max_N: max_N.max().item(),
    "a mask on the CPU": lambda max_N: max_N + torch.zeros(max_N.shape),
    "a boolean index": lambda max_N: max_N[max_N > 0],
    "a number as a condition": lambda max_N: bool(max_N.sum() > 0),
    "an array of a tensor": lambda max_N: max_N.cpu().numpy(),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_engine_are_noticed(apart: Callable[..., None], mutant: str) -> None:
    apart(notices, mutant)


def notices(mutant: str) -> None:
    finite = sampling.finite

    def mutated(max_N: torch.Tensor) -> torch.Tensor:
        MUTANTS[mutant](max_N)
        return finite(max_N)

    values = settings("ngram", target(on_device=False))
    with mock.patch.object(sampling, "finite", mutated), pytest.raises((AssertionError, RuntimeError)):
        holds(values)
    holds(values)


def test_faults_are_noticed(apart: Callable[..., None]) -> None:
    apart(notices_faults)


def notices_faults() -> None:
    from support.pretend_device import DEVICE, pretend_device

    with pretend_device() as device:
        x = torch.arange(4, device=DEVICE)
        with pytest.raises(RuntimeError, match="tensors on the CPU"):
            x[torch.tensor([0, 1])]
        with torch.inference_mode():
            for read in (x[0].item, x.cpu, lambda: x[x > 1], lambda: bool(x[0] > 0), x.nonzero):
                before = len(device.reads)
                read()
                assert len(device.reads) > before, read
        arriving = x.to("cpu", non_blocking=True)
        assert arriving.tolist() != [0, 1, 2, 3]
        x[1].item()
        assert arriving.tolist() == [0, 1, 2, 3]
