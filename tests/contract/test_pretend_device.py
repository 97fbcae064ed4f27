"""On a device: every method decodes as on the CPU, no tensor is on the wrong side, and the host waits once per step.

A device that is registered once stays, and torch, accelerate and transformers then look for it everywhere: what runs on it
has a process of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.core import Request
from specdec.drafter.tree import Grower
from specdec.engine import Engine
from specdec.model import packed_linear
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.methods import METHODS, TREE_METHODS, settings, tiny_prompts, tree_settings
from support.processes import FORKS

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


def decode(target: CausalLM, values: dict[str, Any], **params: Any) -> tuple[dict[str, list[int]], int, int]:
    """The tokens of some requests, how often the host must wait for a verdict, and how often the method drafted."""
    plan = SpeculativeConfig(**values).resolve()
    proposer, verifier = plan.build(target)
    policy = plan.policy.build(target, proposer, 3)
    engine = Engine(target, proposer, verifier, max_batch_size=3, policy=policy)
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3", "draft_model", "dspark"])
def test_sampled(apart: Callable[..., None], method: str, scheme: str) -> None:
    apart(sampled, method, scheme)


def sampled(method: str, scheme: str) -> None:
    values = settings(method, target(on_device=False)) | {"rejection_sample_method": scheme}
    if method in ("eagle3", "draft_model", "dspark"):
        values["draft_sample_method"] = "probabilistic"
    holds(values, temperature=0.8)


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
