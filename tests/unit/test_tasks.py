"""Prompts: data sets by name from local copies, the forms of a file's rows, and what is said where there is no network."""

from __future__ import annotations

import gzip
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specdec import hub, rows
from specdec.config import CONF, pages, read
from specdec.measure import task_sets, tasks
from specdec.measure.tasks import Task
from support.cli import TRAIN, Cli, call
from support.errors import refused

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
STARTER = "class Solution:\n    def f(self):"
SOLVE = "Solve this problem by a Python program. Answer with the program in one code block, and with nothing else.\n\nAdd.\n\n"
# task and style: rows of the data set, and the tasks that they are: (id, category, turns)
CASES: dict[tuple[str, str], tuple[list[dict[str, Any]], list[tuple[Any, ...]]]] = {
    ("gsm8k", "deepspec"): (
        [{"question": "What is {x}?", "answer": "#### 1"}, {"question": "And {answer}?", "answer": "#### 2"}],
        [("0", "gsm8k", (f"What is {{x}}?{REASON}",)), ("1", "gsm8k", (f"And {{answer}}?{REASON}",))],
    ),
    ("gsm8k", "eagle"): ([{"question": "1 + 1?", "answer": "2"}], [("0", "gsm8k", ("1 + 1?",))]),
    ("math500", "deepspec"): (
        [{"problem": "$x^{2}$?", "solution": "s", "answer": "a", "subject": "Algebra", "level": 1, "unique_id": "test/1.json"}],
        [("test/1.json", "math500", (f"$x^{{2}}$?{REASON}",))],
    ),
    ("humaneval", "deepspec"): (
        [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": "f"}],
        [
            (
                "HumanEval/0",
                "humaneval",
                (
                    "Write a solution to the following problem and make sure that it passes the tests:\n"
                    "```python\ndef f():\n\n```",
                ),
            )
        ],
    ),
    ("humaneval", "eagle"): (
        [{"task_id": "HumanEval/0", "prompt": "\n\ndef f():\n"}],
        [("HumanEval/0", "humaneval", ("Complete the code I provided.\n\ndef f():\n",))],
    ),
    ("mbpp", "deepspec"): (
        [{"task_id": 11, "prompt": "Write a function.", "code": "def f(): ..."}],
        [("11", "mbpp", ("Write a function.",))],
    ),
    ("mt_bench", "deepspec"): (
        [{"prompt_id": 81, "category": "writing", "prompt": ["one", "two"], "reference": []}],
        [("81", "writing", ("one",))],
    ),
    ("mt_bench", "eagle"): (
        [{"prompt_id": 81, "category": "writing", "prompt": ["one", "two"], "reference": []}],
        [("81", "writing", ("one", "two"))],
    ),
    ("alpaca", "deepspec"): (
        [{"instruction": "Sort.", "input": "b a", "output": "a b"}, {"instruction": "Sing.", "input": "", "output": "la"}],
        [("0", "alpaca", ("Sort.\n\nInput:\nb a",)), ("1", "alpaca", ("Sing.",))],
    ),
    ("alpaca", "eagle"): ([{"instruction": "Sort.", "input": "b a", "output": ""}], [("0", "alpaca", ("Sort.",))]),
    ("arena_hard", "deepspec"): (
        [{"uid": "u1", "category": "hard_prompt", "subcategory": "coding", "prompt": "Prove it."}],
        [("u1", "hard_prompt", ("Prove it.",))],
    ),
    ("livecodebench", "deepspec"): (
        [
            {"question_id": "a", "question_content": "Add.", "starter_code": STARTER},
            {"question_id": "b", "question_content": "Add.", "starter_code": ""},
        ],
        [
            ("a", "livecodebench", (f"{SOLVE}Begin with this code:\n```python\n{STARTER}\n```",)),
            ("b", "livecodebench", (f"{SOLVE}Read from standard input and write to standard output.",)),
        ],
    ),
    ("cnn_dailymail", "eagle"): (
        [{"article": "It rains.", "highlights": "Rain.", "id": "h1"}],
        [("h1", "cnn_dailymail", ("Summarize: It rains.",))],
    ),
    ("spec_bench", "spec_bench"): (
        [{"question_id": 81, "category": "writing", "turns": ["one", "two"]}],
        [("81", "writing", ("one", "two"))],
    ),
    ("speed_bench", "speed_bench"): (
        [{"question_id": "q", "category": "math", "sub_category": "x", "turns": ["one"]}],
        [("q", "math", ("one",))],
    ),
}


def task_of(name: str, **settings: Any) -> pages.Task:
    return pages.Task(**read(CONF / "task" / f"{name}.yaml") | settings)


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    """The rows in the form that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return path
    text = json.dumps(table) if ".json" in path.suffixes else "".join(f"{json.dumps(row)}\n" for row in table)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


# ------------------------------------------------------------------------------------------- data sets by name


def test_every_style_of_every_task_is_tested() -> None:
    styles = {(path.stem, style) for path in (CONF / "task").glob("*.yaml") for style in read(path).get("styles") or {}}
    assert styles == set(CASES)


@pytest.mark.parametrize("file", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "main/part-0.parquet", "saved"])
@pytest.mark.parametrize(("name", "style"), CASES)
def test_a_local_copy_makes_the_prompts_of_the_papers(name: str, style: str, file: str, tmp_path: Path) -> None:
    table, expected = CASES[name, style]
    path = tmp_path / "copy" / file
    if file == "saved":
        datasets.Dataset.from_list(table).save_to_disk(str(path))
    else:
        write(path, table)
    for source in {path, tmp_path / "copy"} if file != "saved" else {path}:
        chosen = task_of(name, style=style, path=str(source)).load()
        assert [(task.id, task.category, task.turns) for task in chosen] == expected
        assert {task.thinking for task in chosen} == {False}


def test_a_directory_with_splits_and_configs_gives_the_right_one(tmp_path: Path) -> None:
    for folder, split in (("main", "test"), ("main", "train"), ("socratic", "test")):
        write(tmp_path / "gsm8k" / folder / f"{split}-00000.parquet", [{"question": f"{folder} {split}"}])
    (task,) = task_of("gsm8k", style="eagle", path=str(tmp_path / "gsm8k")).load()
    assert task.turns == ("main test",)
    write(tmp_path / "other" / "train.jsonl", [{"question": "q"}])
    words = "its files are of train, none of split test"
    refused(lambda: task_of("gsm8k", path=str(tmp_path / "other")).load(), words)
    for name in ("contest", "latest"):  # no split by the letters inside
        write(tmp_path / "other" / f"{name}.jsonl", [{"question": "q"}])
    refused(lambda: task_of("gsm8k", path=str(tmp_path / "other")).load(), words)
    for name in ("test.jsonl", "test2.jsonl", "other.jsonl"):
        table = [{"question_id": name, "question_content": "q", "starter_code": ""}]
        write(tmp_path / "lcb" / name, table)
    assert [task.id for task in task_of("livecodebench", path=str(tmp_path / "lcb")).load()] == ["test.jsonl", "test2.jsonl"]
    (tmp_path / "empty").mkdir()
    refused(lambda: task_of("gsm8k", path=str(tmp_path / "empty")).load(), "no .parquet, .jsonl, .json files")
    refused(lambda: task_of("gsm8k", path=str(tmp_path / "gone")).load(), "task.path=", "no such file or directory")
    refused(lambda: task_of("gsm8k", styles=None), "task.styles=null: gsm8k needs a style")
    for value in (None, ["a"]):
        path = write(tmp_path / "wrong.jsonl", [{"question": value}])
        refused(lambda path=path: task_of("gsm8k", path=str(path)).load(), "question=", "must be text")


def test_the_rows_of_a_style_are_deepspecs_choice(tmp_path: Path) -> None:
    """A shuffle with its seed, and only where there are more; `limit` takes from them."""
    path = write(tmp_path / "a.jsonl", [{"question": f"q{i}"} for i in range(700)])
    order = list(range(700))
    random.Random(980406).shuffle(order)
    assert [task.id for task in task_of("gsm8k", path=str(path)).load()] == [str(i) for i in order[:500]]
    assert [task.id for task in task_of("gsm8k", path=str(path)).load(3)] == [str(i) for i in order[:3]]
    few = write(tmp_path / "b.jsonl", [{"question": f"q{i}"} for i in range(500)])
    assert [task.id for task in task_of("gsm8k", path=str(few)).load()] == [str(i) for i in range(500)]


def test_a_papers_own_file_has_prompts_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = [{"question_id": 7, "category": "math", "turns": ["as it is", "again"], "reference": ["x"]}]
    path = write(tmp_path / "question.jsonl", table)
    (task,) = task_of("gsm8k", style="eagle", path=str(path)).load()
    assert (task.id, task.category, task.turns) == ("7", "math", ("as it is", "again"))
    assert "reference (1 rows)" in capsys.readouterr().err
    (task,) = task_of("mt_bench", path=str(path)).load()
    assert task.turns == ("as it is",), "DeepSpec's first turn"


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("gsm8k", [{"problem": "q"}], ["row 1", "no column 'question'", "it has problem"]),
        ("mt_bench", [{"prompt_id": 1, "category": "c", "prompt": "text"}], ["prompt='text'", "list of non-empty user turns"]),
        ("mt_bench", [{"category": "c", "prompt": ["text"]}], ["no column 'prompt_id'"]),
        ("mbpp", [{"task_id": 1, "prompt": "a"}, {"task_id": 1, "prompt": "b"}], ["row 2", "'1'", "unique"]),
        ("mbpp", [{"task_id": 1, "prompt": " "}], ["row 1", "empty"]),
        ("mbpp", [], ["no rows"]),
        (
            "speed_bench",
            [{"question_id": 1, "category": "c", "turns": [PLACEHOLDER]}],
            ["row 1", "a placeholder", "script"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_refused(name: str, table: list[Any], words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", table)
    refused(lambda: task_of(name, path=str(path)).load(), *words)


def test_a_task_without_a_source_or_a_style() -> None:
    refused(lambda: task_of("speed_bench").load(), "task=speed_bench has no source of its own", "task.path=")
    refused(lambda: task_of("gsm8k", style="egle"), "task.style=egle", "did you mean 'eagle'?")
    refused(lambda: task_sets.Style(), "either prompt (a template) or turns")


def test_the_hub_is_asked_for_what_the_file_declares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        calls.append((arguments, options))
        return CASES["gsm8k", "deepspec"][0]

    def hf_hub_download(hub_id: str, file: str, **options: Any) -> str:
        calls.append((hub_id, file, options))
        return str(write(tmp_path / "blobs" / "5f3e.jsonl", CASES["arena_hard", "deepspec"][0]))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    assert len(task_of("gsm8k", revision="abc").load()) == 2
    assert [task.id for task in task_of("arena_hard").load()] == ["u1"]
    assert calls == [
        (("openai/gsm8k", "main"), {"split": "test", "revision": "abc"}),
        ("lmarena-ai/arena-hard-auto", "data/arena-hard-v2.0/question.jsonl", {"repo_type": "dataset", "revision": None}),
    ]


def test_a_file_of_an_address_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    source = write(tmp_path / "question.jsonl", CASES["spec_bench", "spec_bench"][0])
    for _ in range(2):
        (task,) = task_of("spec_bench", files=[source.as_uri()]).load()
        assert task.turns == ("one", "two")
        source.unlink(missing_ok=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("task=spec_bench", "not in the cache, and HF_HUB_OFFLINE is set", "task.path=")
    refused(lambda: task_of("spec_bench").load(), *words)


@pytest.mark.parametrize("name", ["gsm8k", "arena_hard", "spec_bench"])
def test_without_a_network_a_run_ends_before_a_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    error = call("run", "model.path=no/model", f"task={name}", cwd=tmp_path).error
    assert f"task={name}" in error
    assert "give task.path=, a file or directory with the same columns" in error


# --------------------------------------------------------------------------------------------------- thinking


def test_thinking_reaches_the_template_and_the_fingerprint(tmp_path: Path) -> None:
    tokenizer = hub.load_tokenizer(hub.tiny())
    task = Task("a", "c", ("hi",))
    plain, off, on = (Task("a", "c", ("hi",), thinking=thinking) for thinking in (None, False, True))
    assert len({tasks.fingerprint([each]) for each in (plain, off, on)}) == 3
    assert tasks.fingerprint([plain]) == tasks.fingerprint([task])
    tasks.check_shown(tokenizer, off)
    with pytest.raises(ValueError, match="has no enable_thinking"):
        tasks.check_shown(tokenizer, on)
    tokenizer.chat_template += "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    text = {each.thinking: tokenizer.decode(tasks.first_prompt_ids(tokenizer, each)) for each in (plain, off, on)}
    assert text[None] == text[True] == text[False] + "<think>"
    tasks.check_shown(tokenizer, on)


# ----------------------------------------------------------------------------------------- rows of a file

QA = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
FORMS = [
    ({"turns": ["a", "b"]}, ("a", "b"), None),
    ({"prompt": "a"}, ("a",), None),
    ({"prompt": ["a", "b"]}, ("a", "b"), None),
    ({"question": "a"}, ("a",), None),
    ({"instruction": "a"}, ("a",), None),
    ({"instruction": "a", "input": "b"}, ("a\n\nInput:\nb",), None),
    ({"messages": [{"role": "user", "content": "a"}]}, ("a",), None),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, ("a",), "s"),
    ({"conversations": [*QA, {"from": "human", "value": "b"}]}, ("Q", "b"), None),
    ({"messages": [{"role": "user", "content": PARTS}]}, ("ab",), None),
]  # fmt: skip


@pytest.mark.parametrize("file", ["a.jsonl", "a.json", "a.txt", "a.parquet"])
@pytest.mark.parametrize(("row", "turns", "system"), FORMS, ids=lambda value: str(value)[:30])
def test_the_forms_of_a_row(
    row: dict[str, Any], turns: tuple[str, ...], system: str | None, file: str, tmp_path: Path, capsys: Any
) -> None:
    path = write(tmp_path / file, [{"id": "mine", "category": "c", **row}])
    assert tasks.load(path) == [Task("mine", "c", turns, system)]
    note = f"note: {path}: fields that are not used: answers in conversations (1 rows)\n"
    assert capsys.readouterr().err == (note if "conversations" in row else "")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "user", "content": IMAGE}]},
            ["row 1", "'image_url'", "text"],
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, ["row 1", "'tool'"]),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ["row 1", "user turns"]),
        ({"answer": "a"}, ["row 1", "'turns'", "prompt, question, instruction"]),
        ({"prompt": 5}, ["row 1", "'turns'"]),
    ],
)
def test_a_row_that_is_no_prompt(row: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [row])
    refused(lambda: tasks.load(path), *words)


def test_an_array_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a"}, {"prom')
    refused(lambda: tasks.load(path), "a.json", "not JSON")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    refused(lambda: tasks.load(tmp_path / "a.parquet"), "a.parquet", "cannot be read")
    assert list(rows.local_rows(write(tmp_path / "empty.json", []), "task.path", "test")) == []


# ------------------------------------------------------------------------------------------- training sets by name

TRAINING_ROWS = {
    "sharegpt": {"id": "i", "conversations": QA},
    "open_perfectblend": {"conversations": QA, "source": "s"},
    "magpie": {
        "uuid": "u",
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
        "instruction": "Q",
    },
    "ultrachat": {
        "prompt": "Q",
        "prompt_id": "p",
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
    },
    "alpaca": {"instruction": "Q", "input": "", "output": "A", "text": "Below is ..."},
}


def test_every_training_set_is_tested() -> None:
    assert {path.stem for path in (CONF / "data").glob("*.yaml")} - {"demo", "jsonl"} == set(TRAINING_ROWS)


@pytest.mark.parametrize("file", ["a.json", "a.jsonl", "train_sft.parquet"])
@pytest.mark.parametrize("name", TRAINING_ROWS)
def test_a_training_set_by_name_from_a_local_copy(name: str, file: str, tmp_path: Path, target: Any) -> None:
    path = write(tmp_path / file, [TRAINING_ROWS[name]])
    settings = read(CONF / "data" / f"{name}.yaml")
    loaded = pages.Data(**settings | {"path": str(path)}).load(target)
    assert loaded.notes == [], "columns that are not declared are not read, and not counted"
    (sample,) = loaded.samples
    text = target.tokenizer.decode(sample.token_n[sample.mask_n])
    assert text.startswith("A")
    write(tmp_path / "other.json", [{"unknown": 1}])
    data = pages.Data(**settings | {"path": str(tmp_path / "other.json")})
    refused(lambda: data.load(target), "row 1", f"no column {settings['columns'][0]}", "it has unknown", "data=jsonl")


def test_a_training_set_without_a_network(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("ultrachat", "sharegpt"):
        data = pages.Data(**read(CONF / "data" / f"{name}.yaml"))
        refused(lambda data=data: data.load(target), "cannot be loaded", "give data.path=, a local copy")


@pytest.fixture(scope="module")
def target() -> Any:
    from specdec.model.target import CausalLM

    return CausalLM(hub.tiny(), "float32", "cpu")


# ------------------------------------------------------------------------------------- recipes and experiments


@pytest.fixture
def train(tmp_path: Path) -> Cli:
    return partial(call, cwd=tmp_path, folder=TRAIN)


def test_the_demo_is_no_default_for_a_larger_target(train: Cli, tmp_path: Path) -> None:
    error = train("eagle", "model=qwen3", "model.size=8b").error
    assert "train=eagle3_demo data=demo" in error
    assert "not for Qwen/Qwen3-8B; give train=eagle3 (the published recipe) and data=" in error
    assert "error: data=demo: the defaults" in train("eagle", "model=qwen3", "train=eagle3").error
    assert "error: train=mtp_demo: the defaults" in train("mtp", "model.path=org/name", "data=demo").error
    chosen = train("eagle", "model=qwen3", "train=eagle3_demo", "data=demo").error
    assert "can't be reached" in chosen, "a choice is a choice"
    large = tmp_path / "large"
    large.mkdir()
    for sizes in ({"hidden_size": 4096}, {"text_config": {"hidden_size": 2560}}):
        (large / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
        assert "the defaults are for a target of 135M" in train("eagle", f"model.path={large}").error


PAGES = {path.stem: "eval" for path in (CONF / "experiment").glob("*.yaml")}


@pytest.mark.parametrize("name", PAGES)
def test_an_experiment_composes(name: str) -> None:
    """And sets what it says: its choices and values are those of the composed config."""
    written = read(CONF / "experiment" / f"{name}.yaml")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(compose(PAGES[name], [f"experiment={name}"]), resolve=True)
    composed.pop("experiment", None)
    for entry in written.pop("defaults"):
        for group, choice in entry.items():
            assert composed[group.removeprefix("override /")]["name"] == choice
    page = pages.PAGES[PAGES[name]](**composed)
    for key, value in written.items():
        if isinstance(value, dict):
            assert {inner: composed[key][inner] for inner in value} == value
        else:
            assert composed[key] == value
    if page.method.settings.get("model", "") is not None:  # those of a trained drafter want its checkpoint
        page.plan()


# ------------------------------------------------------------------------------------------- the wrong key


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("model=org/name", "model=org/name: no such choice; for a hub id or a directory write model.path=org/name"),
        ("task=file.jsonl", "task=file.jsonl: no such choice; for a file write task=jsonl task.path=file.jsonl"),
        ("task=a/b.json", "for a file write task=jsonl task.path=a/b.json"),
        ("task=gsm", "task=gsm: no such choice; did you mean 'gsm8k'?"),
        ("model.size=9b", "model.size=9b: llama has no such size; its sizes are 135m, 1b, 3b, 8b, 70b, 70b-3.1, 405b"),
    ],
)
def test_a_path_in_place_of_a_choice(word: str, advice: str, tmp_path: Path) -> None:
    assert advice in call("run", word, cwd=tmp_path).error
