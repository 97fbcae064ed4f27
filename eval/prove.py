"""The full proof on a real model: every method, every batch size, in float32 on the CPU, one line per combination.

    python eval/prove.py
    python eval/prove.py --prompts 40 --max-tokens 128 --model tiny-gemma3
    python eval/prove.py --methods eagle3 --checkpoint outputs/eagle3_demo-llama-demo/latest

Every method drafts chains and, where it can, trees. At temperature 0 the tokens must be those of Hugging Face `generate`; at
0.7 and at 1, under the schemes that repeat plain sampling (`match`, `gumbel`), those of plain sampling with the same seeds. A
method that needs a drafter takes the checkpoint that is given for it, or one with random weights, whose drafts are hardly ever
accepted. Exit code 1 if a single token differs. `make prove` runs the long statistical tests after it.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    import itertools
    import sys
    import tempfile
    import time
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    import torch

    from specdec import config, hub, method, rejection
    from specdec.core import Request
    from specdec.engine import Engine
    from specdec.measure import tasks
    from specdec.measure.report import console
    from specdec.model.target import CausalLM
    from specdec.params import SamplingParams
    from specdec.speculative_config import SpeculativeConfig

BATCH_SIZES = (1, 3, 8)
TEMPERATURES = (0.7, 1.0)
# whose uniforms are a position's, so that they sample what plain decoding does
REPEATING = [
    name for name in rejection.names() if rejection.find(name).lossless and rejection.find(name).keyed_by == "position"
]
TREES = {"tree_topk": 3, "tree_depth": 3, "num_speculative_tokens": 8}


def main() -> None:
    parser = script.Parser(__doc__)
    parser.add_argument("--model", default=hub.DEFAULT, help="directory, hub id or embedded name")
    parser.add_argument(
        "--prompts", type=script.count, default=8, help="conversations of the demo task, from its categories in turn"
    )
    parser.add_argument("--max-tokens", type=script.count, default=32)
    parser.add_argument("--methods", nargs="*", help="only these")
    parser.add_argument("--checkpoint", nargs="*", default=[], help="trained drafters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.exit(prove(arguments.model, arguments.prompts, arguments.max_tokens, arguments.methods, arguments.checkpoint))


def prove(model: str, count: int, max_tokens: int, methods: list[str] | None, checkpoints: list[str]) -> int:
    """Number of combinations that failed (0 is a proof)."""
    with tempfile.TemporaryDirectory() as scratch:
        return compare(model, count, max_tokens, methods, checkpoints, Path(scratch))


def compare(model: str, count: int, max_tokens: int, methods: list[str] | None, checkpoints: list[str], scratch: Path) -> int:
    """As `prove`; scratch: a directory for untrained drafters."""
    for name in methods or ():
        method.find(name)
    drafters = {method.of_checkpoint(path): path for path in checkpoints}
    target = CausalLM(model, "float32", "cpu")
    prompts = conversations(target, count, max_tokens)
    greedy = generated(target, prompts, max_tokens)
    claims = [("T=0 equals HF generate", SamplingParams(temperature=0, max_tokens=max_tokens), {}, greedy)]
    for name in REPEATING:
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            scheme = {"rejection_sample_method": name}
            plain = decode(target, {"method": method.PLAIN} | scheme, prompts, params, 1)
            claims.append((f"T={temperature} {name} equals sampling", params, scheme, plain))

    failures = 0
    print(f"{len(prompts)} prompts, {max_tokens} new tokens, {model}, float32, cpu, one thread")
    for label, settings in variants(target, methods, drafters, scratch):
        for batch_size, (claim, params, scheme, reference) in itertools.product(BATCH_SIZES, claims):
            begin = time.perf_counter()
            is_probabilistic = batch_size != 3 and scheme and "draft_sample_method" in method.settings(settings["method"])
            more = scheme | ({"draft_sample_method": "probabilistic"} if is_probabilistic else {})
            outputs = decode(target, settings | more, prompts, params, batch_size)
            same = sum(a == b for a, b in zip(outputs, reference, strict=True))
            failures += same < len(prompts)
            verdict = "ok  " if same == len(prompts) else "FAIL"
            result = f"{same}/{len(prompts)}  {time.perf_counter() - begin:6.1f} s"
            print(f"{verdict} {label:21} batch {batch_size}  {claim:28}  {result}", flush=True)
    return failures


def variants(
    target: CausalLM, methods: list[str] | None, drafters: dict[str, str], scratch: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method that drafts chains, and trees where its drafter can, with its settings."""
    for path in sorted((config.CONF / "method").glob("*.yaml")):
        if methods and path.stem not in methods:
            continue
        settings = {key: value for key, value in config.read(path).items() if value is not None}
        settings |= missing_settings(settings.pop("name"), target, drafters, scratch)
        yield path.stem, settings
        if "tree_topk" not in method.settings(settings["method"]):
            continue
        try:
            SpeculativeConfig(**settings | TREES).resolve().build(target)
        except ValueError as error:  # an MTP checkpoint with a module for each token drafts no trees
            print(f"left out: {path.stem} trees: {error}", flush=True)
        else:
            yield f"{path.stem} trees", settings | TREES


def generated(target: CausalLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What Hugging Face says, greedily, one prompt at a time."""
    reference = hub.load_model(target.path, dtype=torch.float32).eval()
    answers = []
    with console.progress(len(prompts), generate=0) as advance:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
            )
            answers.append(out[0, len(prompt) :].tolist())
            advance("generate")
    return answers


def missing_settings(name: str, target: CausalLM, drafters: dict[str, str], scratch: Path) -> dict[str, Any]:
    """Settings that a method's YAML leaves to the user."""
    if name in drafters:
        return {"method": name, "model": drafters[name]}
    if drafters and method.facts(name).composes:
        return {"method": name, "model": next(iter(drafters.values()))}
    directory = scratch / name
    directory.mkdir()
    proposer: Any = method.find(name)
    return {"method": name} | proposer.example_settings(target, directory)


def conversations(target: CausalLM, count: int, max_tokens: int) -> list[list[int]]:
    """First turns of demo tasks, and second turns after a short answer; one prompt is made longer than a prefill chunk."""
    prompts = []
    for task in tasks.load(tasks.DEMO, count):
        prompts.append(tasks.prompt_ids(target.tokenizer, [task.turns[0]], []))
        if len(task.turns) > 1:
            prompts.append(tasks.prompt_ids(target.tokenizer, list(task.turns[:2]), ["Gladly. Here is what I would do."]))
    texts = [task.turns[0] for task in tasks.load(tasks.DEMO) if task.category == "summarization"]
    prompts.append(tasks.prompt_ids(target.tokenizer, ["\n\n".join(texts[:4])], []))
    return prompts


def decode(
    target: CausalLM, settings: dict, prompts: list[list[int]], params: SamplingParams, batch_size: int
) -> list[list[int]]:
    engine = Engine(target, *SpeculativeConfig(**settings).resolve().build(target), max_batch_size=batch_size)
    requests = [Request(str(i), ids, params, seed=i) for i, ids in enumerate(prompts)]
    done = {request.id: request.output_token_ids for request in engine.run(requests)}
    return [done[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    with script.one_line():
        main()
