"""What the documents say to run: every command parses, with keys and choices that there are; and the scripts that measure or
prove, which no other test calls, run at a small size (of the comparison with vLLM, what needs no vLLM)."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams, checkpoint, config, hub, method
from specdec.config import CONF
from support import peer_vllm

ROOT = CONF.parent
SCRIPTS = sorted(path for folder in ("eval", "train") for path in (ROOT / folder).glob("*.py"))
# method= and checkpoint= of the documents are placeholders; such a drafter replaces them
EXAMPLE_METHOD = "eagle3"


def commands(text: str) -> Iterator[list[str]]:
    """Script and arguments of every command in a text: lines of a code block, and what is between backticks."""
    text = re.sub(r"\$\([^)]*\)", "false", text.replace("\\\n", " "))  # a recipe's resume=$(test ... )
    lines = [line.strip() for line in text.splitlines()]
    inline = [
        " ".join(command.split()) for command in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    for line in lines + inline:
        if not re.match(r"([\w./]*python|torchrun)\s", line):
            continue
        if re.search("method=(repeat|heads)|rejection=relaxed", line):  # of docs/extending.md, yet to be written
            continue
        words = shlex.split(line, comments=True)
        script = next((i for i, word in enumerate(words) if re.fullmatch(r"(eval|train)/\w+\.py", word)), None)
        if script is not None:
            yield words[script:]


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> list[tuple[str, ...]]:
    texts = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in SCRIPTS]
    texts += [path.read_text() for path in DOCUMENTS]
    return sorted({tuple(words) for text in texts for words in commands(text)})


def parse(words: list[str] | tuple[str, ...], directory: Path) -> None:
    """Take a command as far as its config, or its arguments, and no further. SystemExit if it is refused."""

    def stop_after(parser: argparse.ArgumentParser, *args: Any, **named: Any) -> None:
        parsed(parser, *args, **named)
        raise SystemExit(0)

    def resolve_only(page: str, run: Any, *defaults: str) -> None:
        if any(word.startswith("-") or "hydra" in word for word in sys.argv[1:]):
            launch(page, lambda cfg: None, *defaults)
        else:  # the same checks without Hydra's own start, which composes everything once more
            typed = [word.partition("=")[0] for word in sys.argv[1:]]
            config.compose(page, *(word for word in defaults if word.partition("=")[0] not in typed), *sys.argv[1:])

    words = [word for word in words if not word.startswith("hydra")]  # there is no cluster
    for key, _, value in (word.partition("=") for word in words):
        if key in config.INPUT_FILES:
            (directory / value).parent.mkdir(parents=True, exist_ok=True)
            (directory / value).touch()
    parsed = argparse.ArgumentParser.parse_args
    launch = config.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "argv", [str(ROOT / words[0]), *words[1:]])
        patch.setattr(config, "launch", resolve_only)
        patch.setattr(hub, "locate", lambda name, what: None)
        patch.setattr(checkpoint, "target_of", lambda path: None)
        patch.setattr(method, "of_checkpoint", lambda path: EXAMPLE_METHOD)
        if "config.launch" not in (ROOT / words[0]).read_text():
            patch.setattr(argparse.ArgumentParser, "parse_args", stop_after)
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_a_documented_command_is_one_that_there_is(words: tuple[str, ...], tmp_path: Path) -> None:
    parse(words, tmp_path)


def test_the_documents_have_commands() -> None:
    assert {words[0] for words in documented()} == {f"{path.parent.name}/{path.name}" for path in SCRIPTS}


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "LOG.md"], ids=lambda path: path.name)
def test_a_document_names_files_and_headings_that_there_are(path: Path) -> None:
    text = path.read_text()
    examples = {Path(title).stem for title in re.findall(r"^# (\S+\.(?:py|yaml))$", text, re.MULTILINE)}  # yet to be written
    for name in re.findall(r"(?:specdec|conf|tests|eval|train|notebooks|docs)/[\w./]*\w", text):
        if Path(name).stem.removesuffix("_demo") not in examples:
            assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([\w-]+))?\)", prose):
        linked = path.parent / link if link else path
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked.read_text()), f"{link}#{anchor}"


def targets() -> list[str]:
    return re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", targets())
def test_what_make_runs_is_there(target: str, tmp_path: Path) -> None:
    """As make says it without doing it."""
    dry_run = subprocess.run(
        ["make", "-n", target, "VENV=.venv", f"DRAFTERS={tmp_path / 'none'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for words in commands(dry_run):
        parse([word.strip(";") for word in words], tmp_path)
    assert f"## make {target}" in (ROOT / "Makefile").read_text() or target in ("help", "lint", "style", "types", "tests"), (
        "make help leaves it out"
    )


def test_a_command_that_there_is_not_is_found(tmp_path: Path) -> None:
    for wrong in ("eval/run.py metod=ngram", "eval/prove.py --promts 3", "train/eagle.py train.max_step=3"):
        with pytest.raises(SystemExit) as ended:
            parse(shlex.split(wrong), tmp_path)
        assert ended.value.code not in (None, 0)


# ------------------------------------------------------------------------------------------------- train/bench.py


def bench_arguments(**values: Any) -> argparse.Namespace:
    small = {"length": 40, "prompt": 8, "steps": 3, "vocab": 64, "draft_vocab": 48, "width": 64}
    return argparse.Namespace(**(small | values))


@pytest.mark.parametrize("draft_vocab", [48, 0])
def test_the_direct_implementation_is_ours(draft_vocab: int) -> None:
    """What the benchmark compares is one function: the same loss and the same gradients."""
    script = runpy.run_path(str(ROOT / "train" / "bench.py"), run_name="bench")
    drafter, _, batch = script["prepare"](bench_arguments(draft_vocab=draft_vocab))
    results = {}
    for name in ("ours", "direct"):
        drafter.zero_grad()
        loss = script[name](drafter, batch)
        loss.backward()
        results[name] = loss.item(), {key: x.grad.clone() for key, x in drafter.named_parameters() if x.grad is not None}
    (ours, our_grad), (direct, direct_grad) = results.values()
    assert ours > 1
    assert ours == pytest.approx(direct, rel=2e-3)  # the target's states are bfloat16
    assert our_grad.keys() == direct_grad.keys()
    for key, grad in our_grad.items():
        torch.testing.assert_close(grad, direct_grad[key], rtol=0.02, atol=0.02 * float(grad.abs().max()))


def test_the_training_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = ROOT / "train" / "bench.py"
    flags = "--length 40 --prompt 8 --steps 2 --vocab 64 --draft-vocab 48 --width 64 --repeats 2 --only direct"
    monkeypatch.setattr(sys, "argv", [str(script), *flags.split()])
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(r"direct: +\d+ supervised tokens/s, peak memory of a step \d+\.\d+ GiB", capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------- eval/prove.py, eval/gpu.py


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """eval/prove.py with two short prompts, one batch size."""
    script = runpy.run_path(str(ROOT / "eval" / "prove.py"), run_name="prove")
    inside = script["prove"].__globals__
    monkeypatch.setitem(inside, "BATCH_SIZES", (2,))
    monkeypatch.setitem(inside, "conversations", lambda *_: [[5, 6, 7, 5, 6, 7, 5], [9, 8, 7]])
    return inside


def test_the_proof_runs_for_every_method(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert proof["prove"]("tiny", 2, 6, None, []) == 0
    shown = capsys.readouterr().out
    assert {name: shown.count(f"ok   {name} ") for name in method.names()} == {
        name: (5 if "tree_topk" not in method.settings(name) or name == "mtp" else 10) for name in method.names()
    }, "greedily, and by two schemes at two temperatures: chains, and trees"
    assert "left out: mtp trees: " in shown


def test_the_proof_fails_where_a_token_differs(proof: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof["decode"]

    def wrong(target: Any, settings: dict[str, Any], *arguments: Any) -> list[list[int]]:
        outputs = right(target, settings, *arguments)
        if settings["method"] == "ngram":
            outputs[0][-1] += 1
        return outputs

    monkeypatch.setitem(proof, "decode", wrong)
    assert proof["prove"]("tiny", 2, 6, ["ngram"], []) == 10


def test_what_the_gpu_script_measures_runs_without_one() -> None:
    script = runpy.run_path(str(ROOT / "eval" / "gpu.py"), run_name="gpu")
    lines = script["measure"]("tiny", "cpu", 4)
    assert len(lines) == 1 + 3 * 2 * 3, "batch sizes; eager and with graphs; cost, plain and drafts"
    assert all("tokens/s" in value or "1:1.00" in value for _, value in lines)


# ------------------------------------------------------------------------------------------------- tests/support/peer_vllm.py


@pytest.mark.parametrize("drafter", peer_vllm.SCRIPTS)
def test_the_drafters_of_the_comparison_can_be_trained(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands are parsed as documented ones are; what they would train is not."""
    commands_run: list[tuple[str, ...]] = []
    monkeypatch.setattr(peer_vllm, "script", lambda name, *arguments: commands_run.append((f"train/{name}.py", *arguments)))
    peer_vllm.train(drafter, tmp_path / "data.jsonl", tmp_path, 4)
    assert commands_run
    for words in commands_run:
        parse(words, tmp_path)


def test_the_last_steps_of_vllm_are_cut_as_ours_are() -> None:
    """K = 3 and all accepted: 13 of 16 tokens after three steps, so that a draft of 2 is left; then a stop in a draft."""
    assert peer_vllm.cut([(3, 3)] * 4, 16, 16) == [(3, 3), (3, 3), (3, 3), (2, 2)]
    assert peer_vllm.cut([(3, 1), (3, 3)], 5, 16) == [(3, 1), (3, 2)]
    assert peer_vllm.cut([(3, 2), (0, 0), (3, 1)], 6, 6) == [(3, 2), (0, 0), (0, 0)]


def test_cutting_says_what_our_engine_does() -> None:
    """The steps of a longer request, as far as they go, are those of vLLM for a shorter one: it never looks ahead."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=ngram)
    narrow = {97: 30.0, 98: 30.0}  # text that repeats itself

    def steps(max_tokens: int) -> list[tuple[int, int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logit_bias=narrow)
        stats = llm.generate("to be or not to be", params, use_tqdm=False)[0].request.stats
        return list(zip(stats.drafted, stats.accepted, strict=True))

    full = steps(80)
    cuts = 0
    for max_tokens in range(4, 40):
        emitted = 1
        reached = []
        for step in full:
            if emitted < max_tokens:
                reached.append(step)
                emitted += step[1] + 1
        assert peer_vllm.cut(reached, max_tokens, max_tokens) == steps(max_tokens)
        cuts += reached != steps(max_tokens)
    assert cuts > 10


def test_the_table_fits_a_terminal() -> None:
    case = peer_vllm.Case("peagle, speculators", {})
    counters = {"vllm:generation_tokens": 4800, "vllm:spec_decode_num_drafts": 1}
    vllm_counters = counters | {"vllm:spec_decode_num_draft_tokens": 30000, "vllm:spec_decode_num_accepted_tokens": 12345}
    ours = peer_vllm.Run([[1, 2, 3]] * 12, [[(3, 1)]] * 12, counters)
    row = peer_vllm.row(case, ours, peer_vllm.Run([[1, 2, 3]] * 12, [[(3, 1)]] * 12, vllm_counters), 3)
    assert peer_vllm.equal(row | {"steps_equal": 12})
    assert not peer_vllm.equal(row | {"tokens_equal": 11, "steps_equal": 12})
    assert not peer_vllm.equal(row | {"steps_equal": 12, "counters_equal": False})
    row |= {"drafted": [123456, 123456, 1], "accepted": [12345, 12345, 1]}
    text = peer_vllm.table([row, {"case": "suffix", "reason": "left out: " + "x" * 100}], "0.32.0", "about " * 11)
    assert max(map(len, text.splitlines())) <= 80
