"""The rules of the house that a machine can check: imports run downwards, groups mirror files, names."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specdec import method, rejection
from specdec.checked import Checked
from specdec.config import CONF, pages, read
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from specdec.training.settings import Settings
from support.tree import MODULES, PACKAGE, ROOT, SCRIPTS, TESTS, YAMLS, imports, module_name, short

MIRRORED = ("method", "rejection")  # groups with a Python file for every YAML file

# A module imports from those to its left only. A dotted entry places one module of a room apart from the rest of it.
# A module that is not here fails the test: it needs a place.
ORDER = (
    "checked", "compiled", "files", "fold", "chat", "params", "tree", "core", "gumbel", "sampling", "prompts", "rejection",
    "lock", "tiny_trained", "hub", "rows", "model", "script", "run_dir", "row_state", "stop_rules", "engine", "policy",
    "checkpoint", "drafter", "artifact", "measure.stats", "method", "speculative_config", "measure", "training", "config",
    "measure.task_run", "training.recipe", "training.synthesize", "training.prepare", "sharing", "llm",
)  # fmt: skip


def place(name: str) -> str | None:
    """The longest entry of ORDER that a dotted name begins with; None for other packages and for the version."""
    parts = name.split(".")
    if parts[0] != "specdec" or len(parts) == 1 or parts[1].startswith("__"):
        return None
    inner = parts[1:]
    return next((entry for n in range(len(inner), 0, -1) if (entry := ".".join(inner[:n])) in ORDER), inner[0])


# ------------------------------------------------------------------------------------------------ imports


def test_every_module_has_a_place() -> None:
    assert {place(module_name(path)) for path in MODULES} - {None} == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_imports_run_downwards(path: Path) -> None:
    entry = place(module_name(path))
    if entry is None:
        return  # the front door imports the rest when it is asked for
    lower = {None, *ORDER[: ORDER.index(entry) + 1]}
    upward = [(line, name) for line, name in imports(path) if place(name) not in lower]
    assert not upward, f"{short(path)} may import {lower} only"


@pytest.mark.parametrize("group", MIRRORED)
def test_files_of_a_group_do_not_know_each_other_in_a_circle(group: str) -> None:
    """A scheme may lean on another's functions (`block` on `standard`), but not the other way round too."""
    seen: dict[str, set[str]] = {}
    for path in (PACKAGE / group).glob("*.py"):
        names = {name.split(".")[2] for _, name in imports(path) if name.startswith(f"specdec.{group}.")}
        seen[path.stem] = {name for name in names if (PACKAGE / group / f"{name}.py").exists()}
    while leaves := {name for name, uses in seen.items() if not uses & set(seen)}:
        seen = {name: uses for name, uses in seen.items() if name not in leaves}
    assert not seen, f"a circle among {sorted(seen)}"


def test_the_library_never_imports_a_script_or_a_test() -> None:
    scripts = {path.stem for path in SCRIPTS} | {"eval", "train", "tests", "support"}
    for path in MODULES:
        for line, name in imports(path):
            assert name.split(".")[0] not in scripts, f"{short(path)}:{line} imports {name}"


def test_no_test_file_imports_another() -> None:
    """What two of them need is in tests/support."""
    for path in TESTS:
        for line, name in imports(path):
            assert not name.startswith(("test_", "conftest")), f"{short(path)}:{line} imports {name}"


def test_hydra_is_imported_by_config_and_scripts_only() -> None:
    for path in MODULES:
        if path.parent == PACKAGE / "config":
            continue
        for line, name in imports(path):
            assert name.split(".")[0] not in ("hydra", "omegaconf"), f"{short(path)}:{line} imports {name}"


def test_scripts_shadow_nothing() -> None:
    """`python eval/x.py` puts eval/ first on the path: a script named like a module would be taken for it."""
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    assert {"run", "compare", "bench"} <= {path.stem for path in SCRIPTS}
    shadows = [short(path) for path in SCRIPTS if path.stem in taken and path.stem != "__init__"]
    assert not shadows


def test_a_script_does_its_work_when_called_not_when_imported() -> None:
    for path in SCRIPTS:
        assert "__main__" in path.read_text(), f"{short(path)} has no main guard"


# ------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("path", YAMLS, ids=short)
def test_name_is_the_stem(path: Path) -> None:
    if path.parent.name == "experiment":
        assert "@package _global_" in path.read_text().splitlines()[0], "it sets keys of other groups"
        return
    if path.parent.name == "sampling":  # its keys are those of vLLM's SamplingParams, which has no name
        return
    assert read(path)["name"] == path.stem


@pytest.mark.parametrize("group", MIRRORED)
def test_a_yaml_for_every_file_and_a_file_for_every_yaml(group: str) -> None:
    files = {path.stem for path in (PACKAGE / group).glob("*.py")} - {"__init__"}
    assert {path.stem for path in (CONF / group).glob("*.yaml")} == files
    assert importlib.import_module(f"specdec.{group}").names() == sorted(files)


@pytest.mark.parametrize("path", [path for path in YAMLS if path.parent.name in MIRRORED], ids=short)
def test_keys_of_method_and_rejection_are_those_of_speculative_config(path: Path) -> None:
    """One schema, not two: what a YAML offers, the JSON object takes under the same name."""
    keys = set(read(path)) - {"name"}
    assert keys <= set(SpeculativeConfig.model_fields)


@pytest.mark.parametrize("name", method.names())
def test_a_method_is_one_class_with_propose(name: str) -> None:
    module = importlib.import_module(f"specdec.method.{name}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    proposers = [c for c in classes if callable(getattr(c, "propose", None))]
    assert len(proposers) == 1
    assert method.find(name) is proposers[0]
    for attribute in ("hidden_layers", "needs_logits", "on_start", "on_finish", "reserve", "bytes_to_grow"):
        assert hasattr(proposers[0], attribute), f"{name} lacks {attribute} of core.Proposer"


@pytest.mark.parametrize("name", method.names())
def test_the_settings_of_a_method_are_what_its_yaml_lists(name: str) -> None:
    """The constructor is the schema: the YAML shows every setting, and none that the constructor lacks. parallel_drafting, as
    vLLM has it, says that another method is meant."""
    assert set(read(CONF / "method" / f"{name}.yaml")) - {"name", "parallel_drafting"} == set(method.settings(name))


@pytest.mark.parametrize("name", rejection.names())
def test_the_settings_of_a_scheme_are_what_its_yaml_lists(name: str) -> None:
    """With the same defaults: one that the YAML leaves at null is the scheme's own."""
    listed = read(CONF / "rejection" / f"{name}.yaml")
    assert set(listed) - {"name"} == set(rejection.settings(name))
    for key in rejection.settings(name):
        default = inspect.signature(rejection.find(name).check).parameters[key].default
        assert listed[key] in (None, default), f"{key} is {listed[key]} in the YAML, and {default} in check"


@pytest.mark.parametrize("name", rejection.names())
def test_a_scheme_says_what_it_is(name: str) -> None:
    module = importlib.import_module(f"specdec.rejection.{name}")
    assert isinstance(module.lossless, bool)
    assert module.keyed_by in ("step", "position")
    parameters = list(inspect.signature(module.verify).parameters)
    assert parameters[:3] == ["draft", "p_BJV", "u_BJ"]
    assert inspect.getdoc(module.verify), "a public function has a docstring"


# -------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("path", MODULES + SCRIPTS, ids=short)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def test_no_room_for_everything() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    for path in MODULES + SCRIPTS:
        assert not drawers & set(path.relative_to(ROOT).with_suffix("").parts), short(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                vague = node.name.startswith("Base") or node.name.endswith("Manager")
                assert not vague, f"{short(path)}: the name {node.name} does not say what the class is"


# --------------------------------------------------------------------------------------- doors to what others wrote


def parsed() -> Iterator[tuple[str, ast.AST]]:
    """Every file of the tree that holds Python, notebooks too."""
    for folder in ("specdec", "eval", "train", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield short(path), ast.parse(path.read_text())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        yield short(path), ast.parse("\n".join("".join(source) for source in cells))


def unsafe(call: ast.Call) -> str | None:
    """What a call may run or unpickle that came with a model; None for any other call."""
    name = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("torch.load", "joblib.load", "np.load", "numpy.load", "yaml.load"):
        return f"{name} unpickles"
    if not name.endswith(".from_pretrained") or name.startswith(("GenerationConfig.", "speculators.")):
        return None  # the first reads JSON alone; the second reads what a test has just written, and has no such options
    if keywords.get("trust_remote_code") != "False":
        return f"{name} without trust_remote_code=False"
    if "Model" in name and keywords.get("use_safetensors") != "True" and "gguf_file" not in keywords:
        return f"{name} without use_safetensors=True"
    return None


def test_nothing_of_a_model_is_unpickled_or_run() -> None:
    """`hub.load_model`, `load_tokenizer` and `load_config` are the doors of whoever needs no CausalLM."""
    unsafe_calls = [
        (where, reason)
        for where, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (reason := unsafe(node))
    ]
    assert not unsafe_calls


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("AutoModelForCausalLM.from_pretrained(path)", "trust_remote_code"),
        ("transformers.AutoModel.from_pretrained(path, trust_remote_code=False)", "use_safetensors"),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
        ("torch.load(path)", "unpickles"),
    ],
)
def test_an_open_door_is_found(line: str, words: str) -> None:
    call = ast.parse(line).body[0].value  # type: ignore[attr-defined]
    assert words in (unsafe(call) or "")


# ------------------------------------------------------------------------------------------- a YAML mirrors its class


@pytest.mark.parametrize("path", sorted((CONF / "sampling").glob("*.yaml")), ids=short)
def test_sampling_has_the_keys_of_its_class(path: Path) -> None:
    """All of them: a key that the YAML lacks cannot be set on the command line."""
    # of a request among others, where a run has its own; and what a run has no use for
    per_request = {"speculative_config", "n", "logprobs", "prompt_logprobs", "detokenize"}
    assert set(read(path)) == {*SamplingParams.model_fields, *SamplingParams.aliases} - per_request


def test_costs_depend_on_sampling_parameters_that_there_are() -> None:
    assert set(read(CONF / "profile_cost.yaml")["sampling"]) <= set(SamplingParams.model_fields)


def test_train_has_the_keys_of_its_class() -> None:
    assert set(read(CONF / "train.yaml")["train"]) - {"objective"} == set(Settings.model_fields)


@pytest.mark.parametrize("path", sorted((CONF / "train").glob("*.yaml")), ids=short)
def test_a_recipe_has_the_keys_of_its_method(path: Path) -> None:
    """Every key of the drafter, of how it begins and of its objective."""
    name = path.stem.removesuffix("_demo")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        recipe: Any = OmegaConf.to_container(compose(f"train/{path.stem}").train)
    trained: Any = method.find(name)
    recipe["objective"] |= read(CONF / "train.yaml")["train"]["objective"]  # of every recipe
    for key, record in (
        ("drafter", trained.architecture_type),
        ("init", trained.init_type),
        ("objective", trained.objective_type),
    ):
        assert set(recipe[key]) == set(record.model_fields), key
    assert set(recipe) - {"name", "defaults", "drafter", "init", "objective"} <= set(Settings.model_fields)


GROUPS = {"model": pages.Model, "task": pages.Task, "data": pages.Data, "logger": pages.Logger}


@pytest.mark.parametrize("group", GROUPS)
def test_the_choices_of_a_group_have_the_keys_of_its_class(group: str) -> None:
    """Together all of them; none has another. A key that a choice lacks has a default in the class."""
    fields = GROUPS[group].model_fields
    keys = [set(read(path)) for path in sorted((CONF / group).glob("*.yaml"))]
    assert set.union(*keys) == set(fields)
    required = {name for name, field in fields.items() if field.is_required()}
    assert all(required <= each for each in keys)


@pytest.mark.parametrize("page", sorted(pages.PAGES))
def test_a_page_has_the_keys_of_its_class(page: str) -> None:
    yaml = read(CONF / f"{page}.yaml")
    record = pages.PAGES[page]
    groups = {str(key) for entry in yaml.pop("defaults") if isinstance(entry, dict) for key in entry}
    groups = {key for key in groups if not key.startswith("override ")} - {"experiment"}
    assert (set(yaml) | groups) - {"hydra"} == set(record.model_fields)
    for key in set(yaml) - groups - {"hydra", "sampling"}:  # groups without a directory; sampling has a test of its own
        inside = record.model_fields[key].annotation
        if inspect.isclass(inside) and issubclass(inside, Checked):
            assert set(yaml[key]) == set(inside.model_fields), key


def test_every_page_has_a_class() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(pages.PAGES)
