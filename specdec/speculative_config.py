"""`speculative_config`, the object that says how to speculate: its schema, and the plan that it resolves to.

`SpeculativeConfig` is the one schema of a method and its rejection scheme: the YAML groups of these names have its keys.
`resolve` checks everything that can be checked without a target, reads what it names (a checkpoint's config.json, a cost table)
once, and gives a `SpeculativePlan`; whoever builds or reports something reads the plan.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import create_model

from specdec import method, rejection
from specdec.checked import Checked, short_repr
from specdec.core import Policy, Proposer
from specdec.drafter import tree
from specdec.files import parse_json
from specdec.model.target import CausalLM
from specdec.policy import adaptive, cost_table, profiling
from specdec.policy.adaptive import Adaptive, Scheduled
from specdec.policy.cost_table import CostTable
from specdec.rejection import Verifier

# keys of vLLM's object whose feature is not built, with the values that ask for nothing
NOT_BUILT_KEYS: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (None, True),
    "quantization": (None,),
    "moe_backend": (None,),
    "attention_backend": (None, "auto"),
    "kv_cache_dtype": (None, "auto"),
    "draft_lm_head_quantization": (None,),
    "code_revision": (None,),
    "index_share_for_mtp_iteration": (None, False),
    "disable_padded_drafter_batch": (None, False),
    "disable_eagle_block_drop": (None, False),
    "disable_lookahead_block_hashes": (None, False),
    "use_local_argmax_reduction": (None, False),
    "dspark_draft_topk": (None,),
    "xpress_topc": (None,),
    "fly_window_size": (None,),
    "fly_entropy_threshold": (None, 0.3),
    "fly_entropy_top_k": (None, 3),
}
POLICY_KEYS = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "cost_table")  # how much is drafted
TREE_KEYS = ("tree_topk", "tree_depth", "tree_builder", "speculative_token_tree")
# keys with the value that holds for every method without the key
UNIVERSAL_VALUES = {"draft_sample_method": "greedy", "use_heterogeneous_vocab": False, "draft_tensor_parallel_size": 1}


_FIELDS: dict[str, Any] = {key: (kind | None, None) for key, kind in rejection.all_settings().items()}
SchemeSettings: Any = create_model("SchemeSettings", __base__=Checked, **_FIELDS)  # what the schemes' `check` declares


def scheme_keys() -> set[str]:
    """Keys of the rejection scheme."""
    return {"rejection_sample_method", *rejection.all_settings()}


class SpeculativeConfig(SchemeSettings, Checked):
    """The object of vLLM's `--speculative-config`, with its names, defaults and inference of an omitted `method`.

    A key whose feature is not built is an error. Keys that vLLM lacks:

    prompt_lookup_latest: the rightmost match counts
    pard_token: the mask token of a parallel draft model whose config.json lacks it
    min_score: of suffix decoding, the fewest tokens that a draft is expected to have accepted
    tree_topk, tree_depth, tree_builder: of tree drafts, whose nodes num_speculative_tokens counts
    proposers: of a composed method, objects like this one, without policy and rejection scheme
    num_speculative_tokens="auto": as many as pay, by row and step
    num_speculative_tokens_per_batch_size: also a file that holds a schedule
    cost_table: a file of eval/profile_cost.py, for decisions by cost; without it, costs are measured at the start
    shared_storage_path, include_output_tokens: in vLLM, settings of the connector that stores hidden states
    """

    what = "speculative_config key"
    aliases = (*NOT_BUILT_KEYS, "tensor_parallel_size")

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | Literal["auto"] | None = None
    num_speculative_tokens_per_batch_size: list[Any] | str | None = None
    enable_adaptive_verification: bool | None = None
    cost_table: str | None = None
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    revision: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_latest: bool | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    min_score: float | None = None
    proposers: list[dict[str, Any]] | None = None
    tree_topk: int | None = None
    tree_depth: int | None = None
    tree_builder: str | None = None
    speculative_token_tree: str | list[list[int]] | None = None
    draft_sample_method: str | None = None
    parallel_drafting: bool | None = None
    pard_token: int | None = None
    use_heterogeneous_vocab: bool | None = None
    draft_model_config: dict[str, Any] | None = None
    shared_storage_path: str | None = None
    include_output_tokens: bool | None = None
    rejection_sample_method: str = "standard"

    def __init__(self, **values: Any) -> None:
        if "tensor_parallel_size" in values:
            raise ValueError("speculative_config key 'tensor_parallel_size' is the target's; use draft_tensor_parallel_size")
        for key, ignored_values in NOT_BUILT_KEYS.items():
            if key in values and values.pop(key) not in ignored_values:
                raise ValueError(f"speculative_config key {key!r}: this feature is not built yet; leave the key out")
        length = values.get("num_speculative_tokens")
        if isinstance(length, str) and length != "auto":
            raise ValueError(f"speculative_config key num_speculative_tokens={length!r}: give an integer, or 'auto'")
        super().__init__(**values)

    @classmethod
    def parse(cls, config: str | dict[str, Any] | None) -> SpeculativeConfig:
        """From JSON text, or the object itself; None means no speculation."""
        if isinstance(config, str):
            try:
                config = parse_json(config, "speculative_config")
            except ValueError as error:
                example = '{"method": "ngram", "num_speculative_tokens": 5}'
                raise ValueError(f"{error}: {short_repr(config)}; give an object, such as {example}") from None
        if config is None:
            return cls(method=method.PLAIN)
        if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
            raise ValueError(
                f"speculative_config={short_repr(config)} must be a JSON object, such as {{'method': 'ngram', ...}}"
            )
        return cls(**config)

    def infer_method(self) -> str:
        """The method, by our name. Reads the config.json of a checkpoint that is given as `model` without a method."""
        if self.method is not None:
            name = method.of_alias(self.method)
        elif self.model is None:
            raise ValueError("speculative_config has neither method nor model; name one, such as method='ngram'")
        else:
            name = method.of_alias(method.of_model(self.model, self.revision))
            if self.parallel_drafting is False:
                name = method.serial(name, self.model)
        return method.parallel(name) if self.parallel_drafting else name

    def resolve(self) -> SpeculativePlan:
        """What is built, measured and reported, all of it decided. Raises ValueError, one line, for what cannot work with any
        target."""
        name = self.infer_method()
        policy = self._policy(name)
        settings = self._settings(name)
        length = settings.get("num_speculative_tokens")
        if length is not None and length < 1 and "num_speculative_tokens" in method.settings(name):
            raise ValueError(f"num_speculative_tokens={length}: at least 1 is needed; method 'none' drafts nothing")
        for key, fix in method.required(name).items():
            if key not in settings:
                raise ValueError(f"method {name!r} needs {key}; {fix}")
        components: tuple[SpeculativePlan, ...] = ()
        if method.facts(name).composes:
            components = self._components(name, settings)
            settings["proposers"] = [{"method": plan.method} | plan.settings for plan in components]
            settings.pop("model", None)  # of one of the components
        method.check(name, settings)
        method.check_model(name, settings.get("model"))
        _check_tree(name, settings)
        scheme_params = {key: value for key, value in self.as_dict().items() if key in rejection.all_settings()}
        rejection.find(self.rejection_sample_method)
        if length is not None:
            rejection.build(self.rejection_sample_method, length, **scheme_params)
        return SpeculativePlan(self, name, settings, self.rejection_sample_method, scheme_params, policy, components)

    def as_dict(self) -> dict[str, Any]:
        """The keys that have a value."""
        return self.model_dump(exclude_none=True)

    def _settings(self, name: str) -> dict[str, Any]:
        """What the method's constructor is given."""
        other_keys = {"method", "parallel_drafting", *POLICY_KEYS, *scheme_keys()}
        settings = {k: v for k, v in self.as_dict().items() if k not in other_keys}
        if self.num_speculative_tokens == "auto":
            del settings["num_speculative_tokens"]
            if method.needs_length(name):
                settings["num_speculative_tokens"] = self._auto_max()
        if str(settings.get("model")).lower() in method.facts(name).model_spellings:
            del settings["model"]
        for key, value_of_others in UNIVERSAL_VALUES.items():
            if key not in settings or key in method.settings(name):
                continue
            if settings[key] != value_of_others:
                takers = ", ".join(other for other in method.names() if key in method.settings(other))
                value = "true" if settings[key] is True else settings[key]
                raise ValueError(f"{key}={value} is for {takers}, not for {name!r}; leave it out")
            del settings[key]
        return settings

    def _auto_max(self) -> int:
        """The most tokens of a draft whose number is chosen."""
        if self.speculative_token_tree is not None:
            return len(tree.read_shape(self.speculative_token_tree))
        return adaptive.AUTO_MAX_DRAFT if self.tree_topk is None else adaptive.AUTO_MAX_NODES

    def _components(self, name: str, settings: dict[str, Any]) -> tuple[SpeculativePlan, ...]:
        """The plans of a composed method's proposers, in order."""
        composed: Any = method.find(name)
        plans = []
        for place, proposer in enumerate(composed.assign_model(settings["proposers"], settings.get("model"))):
            try:
                plans.append(self._component(name, settings["num_speculative_tokens"], proposer))
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
        return tuple(plans)

    def _component(self, composed: str, max_length: int, proposer: dict[str, Any]) -> SpeculativePlan:
        """The plan of one proposer of a composed method, whose drafts have up to max_length tokens."""
        inner = proposer.get("method")
        if inner in method.names() and method.facts(inner).composes:
            raise ValueError(f"a {inner} inside a {composed}; write its proposers into the list itself")
        if inner in method.names() and not method.facts(inner).drafts:
            raise ValueError(f"method {inner!r} drafts nothing; leave it out")
        for key, value in proposer.items():
            if key in {*POLICY_KEYS, "proposers", *scheme_keys()} or value == "auto":
                raise ValueError(f"{key}={value} is not a proposer's; give it beside the list")
        if not {"method", "model"} & set(proposer):
            raise ValueError("it has neither method nor model; give its model (eval/run.py: checkpoint=DIR)")
        plan = SpeculativeConfig(**({"num_speculative_tokens": max_length} | proposer)).resolve()
        if "num_speculative_tokens" not in proposer:  # as many as the drafter was made for, up to max_length
            return replace(plan, settings={k: v for k, v in plan.settings.items() if k != "num_speculative_tokens"})
        if proposer["num_speculative_tokens"] > max_length:
            length = proposer["num_speculative_tokens"]
            raise ValueError(f"num_speculative_tokens={length} is over the {max_length} of {composed}; lower it")
        return plan

    def _policy(self, name: str) -> PolicyPlan:
        """How much is drafted and verified. Raises ValueError for keys that do not go together."""
        auto = self.num_speculative_tokens == "auto"
        keys = [key for key in POLICY_KEYS if getattr(self, key) not in (None, False)]
        keys += ["num_speculative_tokens=auto"] if auto else []
        if keys and not method.facts(name).drafts:
            raise ValueError(f"method {name!r} drafts nothing, so {keys[0]} says nothing; leave it out")
        if auto and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError("num_speculative_tokens=auto and num_speculative_tokens_per_batch_size both choose K; give one")
        if auto and rejection.has_fixed_length(scheme := self.rejection_sample_method):
            raise ValueError(f"num_speculative_tokens=auto: {scheme} acceptance needs a number, which its settings are for")
        adaptive_verification = bool(self.enable_adaptive_verification)
        if self.cost_table is not None and not auto and not adaptive_verification:
            raise ValueError(
                "cost_table is for num_speculative_tokens=auto and enable_adaptive_verification=true; leave it out, or add one"
            )
        table = None if self.cost_table is None else cost_table.load(self.cost_table)
        return PolicyPlan(auto, adaptive_verification, self._schedule(), table)

    def _schedule(self) -> list[list[int]] | None:
        """K by batch size, in order, if it is given."""
        schedule = self.num_speculative_tokens_per_batch_size
        if isinstance(schedule, str):
            try:
                proposed = cost_table.load(schedule).schedule
            except ValueError as error:
                key_value = f"num_speculative_tokens_per_batch_size={schedule!r}"
                raise ValueError(f"{key_value} is no list [[first, last, K], ...], and as a file: {error}") from None
            if proposed is None:
                raise ValueError(f"{schedule} holds no schedule; eval/profile_cost.py proposes one with acceptance=DIR")
            schedule = proposed
        return None if schedule is None else adaptive.check_schedule(schedule)


def _check_tree(name: str, settings: dict[str, Any]) -> None:
    """Raises ValueError, one line, for settings of trees that cannot work with any drafter of the method."""
    tree_settings = {key: settings.get(key) for key in TREE_KEYS}
    if builder := getattr(method.find(name), "tree_builder", None):
        is_sampled = settings.get("draft_sample_method") == "probabilistic"
        length = settings.get("num_speculative_tokens", method.parameters(name)["num_speculative_tokens"].default)
        tree.plan(length, **tree_settings, builder=builder, is_sampled=is_sampled)


@dataclass(frozen=True)
class PolicyPlan:
    """What decides how much is drafted and verified.

    auto: the number of draft tokens is chosen by cost and acceptance
    adaptive_verification: so is how many of them are verified
    schedule: [first batch size, last, K] in order; None: K at every batch size
    cost_table: costs for these decisions; None: they are measured when the policy is built
    """

    auto: bool = False
    adaptive_verification: bool = False
    schedule: list[list[int]] | None = None
    cost_table: CostTable | None = None

    @property
    def needs_costs(self) -> bool:
        return self.auto or self.adaptive_verification

    def build(self, target: CausalLM, proposer: Proposer, max_batch_size: int) -> Policy | None:
        """The engine's policy; None: everything that may be drafted is drafted and verified."""
        max_draft = proposer.num_speculative_tokens
        scheduled = None if self.schedule is None else Scheduled(self.schedule, max_draft)
        if not self.needs_costs or not max_draft:
            return scheduled
        if self.cost_table is not None:
            table = self.cost_table
            cost_table.check_fits(table, target, proposer)
        else:
            if target.processes.is_first:
                print("note: measuring costs; cost_table=FILE of eval/profile_cost.py saves that", file=sys.stderr)
            table = profiling.measure(target, proposer, profiling.sizes_up_to(max_batch_size))
        auto = self.auto
        prunes = self.adaptive_verification
        if auto and proposer.num_confidence_features and adaptive.drafts_are_free(table, max_draft):
            auto = False  # the draft is there before its length is chosen
            prunes = True
        return Adaptive(
            table,
            max_draft,
            max_batch_size,
            auto,
            prunes,
            proposer.num_confidence_features,
            scheduled,
            proposer.drafts_trees,
            proposer.predicts_acceptance,
        )


@dataclass(frozen=True)
class SpeculativePlan:
    """What a SpeculativeConfig means, with everything decided that does not depend on the target.

    config: as it was given
    method: the method's name
    settings: of its constructor, but for the target
    scheme, scheme_params: the rejection scheme's name and parameters
    policy: how much is drafted and verified
    components: the plans of a composed method's proposers, in order
    """

    config: SpeculativeConfig
    method: str
    settings: dict[str, Any]
    scheme: str
    scheme_params: dict[str, Any]
    policy: PolicyPlan
    components: tuple[SpeculativePlan, ...] = ()

    def check_processes(self, size: int) -> None:
        """Raise ValueError, one line, if a drafter cannot be split as its settings say. size: the target's
        tensor_parallel_size."""
        split = self.settings.get("draft_tensor_parallel_size")
        if split not in (None, 1, size):
            raise ValueError(f"draft_tensor_parallel_size={split} must be 1 or the target's tensor_parallel_size={size}")
        for place, component in enumerate(self.components):
            try:
                component.check_processes(size)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None

    def build(self, target: CausalLM) -> tuple[Proposer, Verifier]:
        """The proposer and the rejection scheme. Raises ValueError, one line, for what cannot work with this target."""
        self.check_processes(target.processes.size)
        for plan in (self, *self.components):
            max_model_len = plan.settings.get("max_model_len")
            if max_model_len is not None and max_model_len > target.max_model_len:
                raise ValueError(
                    f"max_model_len={max_model_len} of the draft is over the target's {target.max_model_len}; lower it"
                )
        settings = dict(self.settings)
        length = settings.get("num_speculative_tokens")
        if length is not None and length >= target.max_model_len:
            raise ValueError(
                f"num_speculative_tokens={length} is beyond the {target.max_model_len} tokens that {target.name} can hold; "
                "lower it"
            )
        if self.policy.auto and length is not None:
            proposer = method.build_up_to(settings.pop("num_speculative_tokens"), self.method, target, **settings)
        else:
            proposer = method.build(self.method, target, **settings)
        return proposer, rejection.build(self.scheme, proposer.num_speculative_tokens, **self.scheme_params)

    @property
    def drafters(self) -> list[str]:
        """The models that draft, by the names that `model` gives them."""
        plans = self.components or (self,)
        return [plan.settings["model"] for plan in plans if method.is_trained(plan.method) and plan.settings.get("model")]
