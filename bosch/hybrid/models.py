"""Config and model of a hybrid: what the classes of all families share.

A family's classes are transformers' own with these two mixins in front. Modules, parameter names
and forward are the plain family's; new are `config.bosch`, the attention function and the cache.

    config.bosch = {"window": W, "num_full": [groups with full attention, one entry a layer],
                    "permutation": [[old places of the groups, in their new order], ...],
                    ...provenance}

`config.bosch["window"]` may be changed on a loaded model, for the next forward with a new cache.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.masking_utils import create_masks_for_generate

from bosch.attention.cache import CACHE, hybridize_cache
from bosch.attention.documents import nothing_hidden
from bosch.attention.register import NAME
from bosch.masks.window import check_window, full_layers, own_window
from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError
from bosch.sink import KEY, VALUE, Sink

PREFIX = "bosch_"  # of the model_type
FULL_LAYERS = "full_attention"  # in layer_types, and where each type has positions of its own
# In place of num_key_value_heads in a saved config: the rows of `permutation` have that length.
# Plain families want a whole number, so that only our classes can load the checkpoint. If only the
# model_type differed, transformers would log it and run the dense model.
GUARD = "bosch_hybrid"


# Causal models of transformers whose attention is like that of our families, and why they are none.
REFUSED = {
    **dict.fromkeys(
        ("nemotron", "stablelm"),
        "their layers do not pass what a call is given on to attention, so that masks and packed "
        "documents would be lost",
    ),
    **dict.fromkeys(
        ("gemma2", "vaultgemma"), "their attention scores have a soft cap, which no backend has"
    ),
    **dict.fromkeys(("phi", "phimoe"), "their head has a bias, which no loss of a training has"),
    "gpt_oss": "its attention has sinks of its own (s_aux), which no backend has",
    "diffllama": "its attention is the difference of two",
    "gpt_neox": "its projections have queries, keys and values in turn, head by head",
}


@dataclass
class HybridConfig:
    """In front of a family's config class."""

    bosch: dict[str, Any] | None = None
    # Writes the code of a hybrid into a folder and returns its auto_map; set by registration.py. A
    # class that itself comes from such a folder has none: transformers copies its code.
    write_code: ClassVar[Callable[[Path, Any], dict[str, str]] | None] = None

    def __post_init__(self, **kwargs: Any) -> None:
        if vars(self)["num_key_value_heads"] == 0:
            match self.bosch:
                case {"permutation": [list() as first, *_]}:
                    super().__setattr__("num_key_value_heads", len(first))
        super().__post_init__(**kwargs)  # type: ignore[misc]
        if self.bosch is not None:
            check_hybrid(self)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        # vLLM's --hf-overrides, or a hand-edited config.json
        if name == "architectures" and any(hasattr(transformers, each) for each in value or ()):
            problem = f"{', '.join(value)} would compute this hybrid with full attention everywhere"
            raise UserError(f"{problem}: fluent, but wrong. Leave the architecture as it is.")
        # Fields are set in their order, this one before `bosch`, whose permutation says the number:
        # it is 0 until __post_init__.
        if name == "num_key_value_heads" and value == GUARD:
            value = 0
        super().__setattr__(name, value)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if (write_code := type(self).write_code) is not None:
            self.auto_map = write_code(Path(save_directory), self)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def to_json_string(self, use_diff: bool = True) -> str:
        saved: str = super().to_json_string(use_diff)  # type: ignore[misc]
        if self.bosch is None:
            return saved
        content = json.loads(saved) | {"num_key_value_heads": GUARD}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


class HybridCausalLM:
    """In front of a family's `ForCausalLM` class."""

    config: Any
    training: bool
    window_sink: Sink

    def __init__(self, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
        if config.bosch is None:
            problem = f"a {config.model_type} needs config.bosch (window, num_full, permutation)"
            raise UserError(f"{problem}; make one with `bosch materialize`.")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        read_sink(self)

    def forward(
        self,
        *,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # the older name of `cache`
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Any:
        family: Any = super()
        # Where it was set in the config, or on the model inside, transformers did not ask.
        if self.config._attn_implementation != NAME:
            raise other_attention(self.config._attn_implementation)
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        # Before the family's forward: it makes the mask by the sizes that the layers of a cache
        # say.
        if cache is not None:
            mask, inputs = kwargs.get("attention_mask"), kwargs.get("input_ids")
            inputs = inputs if isinstance(inputs, Tensor) else kwargs.get("inputs_embeds")
            if mask is None and isinstance(inputs, Tensor) and is_step(cache, inputs):
                kwargs["attention_mask"] = nothing_hidden(inputs.device)
            hybridize_cache(cache, self.config, self.window_sink, mask)
        return family.forward(use_cache=use_cache, **{CACHE: cache}, **kwargs)

    def _prepare_cache_for_generation(self, settings: Any, inputs: Any, *args: Any) -> Any:
        result = super()._prepare_cache_for_generation(settings, inputs, *args)  # type: ignore[misc]
        if (cache := inputs.get(CACHE)) is not None:
            hybridize_cache(cache, self.config, self.window_sink)
            if settings.is_assistant:  # was set on the plain layers, now replaced
                cache.activate_past_recording()
        return result

    def create_masks_for_generate(self, attention_mask: Tensor | None, **others: Any) -> Any:
        """`generate` makes the masks of a static cache before it calls the compiled model."""
        inputs = others["inputs_embeds"]
        if is_step(others[CACHE], inputs) and (attention_mask is None or attention_mask.all()):
            return nothing_hidden(inputs.device)
        make_masks = getattr(super(), "create_masks_for_generate", create_masks_for_generate)
        return make_masks(attention_mask=attention_mask, **others)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers searches the file of the class, and ours has none of the family's code: the
        # experts would be computed one by one.
        plain: Any = cls.__mro__[cls.__mro__.index(HybridCausalLM) + 1]
        return bool(plain._can_set_experts_implementation())

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        # What transformers asks for when nobody has named one is None, or sdpa.
        if requested_attention not in (None, "sdpa", NAME):
            raise other_attention(requested_attention)
        return NAME

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info)  # type: ignore[misc]
        lost = [name for name in loading_info.missing_keys if name.endswith((KEY, VALUE))]
        if lost:  # transformers would leave whatever the memory holds
            problem = f"{len(lost)} constants of sinks are not among the weights ({min(lost)} ...)"
            raise UserError(f"{problem}: the tool that saved this hybrid has left them out.")

    def init_continuous_batching(self, *args: object, **kwargs: object) -> Any:
        problem = "continuous batching (generate_batch) has one kind of cache for a layer"
        raise UserError(f"{problem}, and a hybrid two; use generate, or vLLM (docs/serving.md).")


def other_attention(name: str) -> UserError:
    problem = f"attn_implementation={name!r} would drop the windows"
    return UserError(f"{problem}. Leave it out; to choose a kernel, use bosch_backend.")


def is_step(cache: Cache, inputs: Tensor) -> bool:
    """Whether this call decodes one token over a static cache, which needs no mask without
    padding."""
    return bool(cache.is_compileable) and inputs.shape[1] == 1


def read_sink(model: Any) -> None:
    """Give a hybrid and its attention modules the sink of its config, and room for the constants of
    a static one: parameters, which are loaded or trained like any others."""
    config, num_groups = model.config, model.config.num_key_value_heads
    model.window_sink = sink = Sink.of_hybrid(config)
    if sink.kind == "static" and has_other_stretch(config, config.bosch):
        raise UserError(
            f"the static sinks of this hybrid were measured with rotary positions of the type "
            f"{config.bosch['sink_rope']}, and its config has {describe_stretch(config)}, which "
            "makes keys larger. Search and materialize the dense model with these positions, or "
            "evaluate with --yarn."
        )
    for number in full_layers(config):
        attention = model.base_model.layers[number].self_attn
        num_full = config.bosch["num_full"][number]
        attention.window_sink = sink
        if sink.kind == "static" and num_full < num_groups:
            weight = attention.o_proj.weight
            shape = (num_groups - num_full, head_size(config))
            attention.register_parameter(KEY, nn.Parameter(weight.new_zeros(shape)))
            attention.register_parameter(VALUE, nn.Parameter(weight.new_zeros(shape)))


def has_other_stretch(config: Any, hybrid: Mapping[str, Any]) -> bool:
    """Whether a hybrid's static sinks were measured with other rotary positions than those of this
    config. `hybrid`: its facts. Those of earlier versions do not say, or say `default` of any
    family that has positions for each type of layer."""
    stretch = describe_stretch(config)
    not_known = "default" if stretch.startswith(FULL_LAYERS) else stretch
    return hybrid.get("sink_rope", stretch) not in (stretch, not_known)


def describe_stretch(config: Any) -> str:
    """How rotary positions are stretched: `yarn 4`. Some ways make every key larger that passes the
    rotation, which the constant of a static sink does not."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma 3 and OLMo-3 have others in layers with windows of their own, which get no mask.
    has_types = FULL_LAYERS in rope
    rope = rope[FULL_LAYERS] if has_types else rope
    parts: list[Any] = [FULL_LAYERS] if has_types else []
    parts += [rope.get("rope_type", "default"), rope.get("factor")]
    return " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts if part)


class BlockNorms(NamedTuple):
    """The names of a block's norms, None where there is none. A block adds its attention and then
    its MLP to the hidden states: h + after(part(before(h)))."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORM = BlockNorms(  # of most families, Llama's among them
    before_attention="input_layernorm", before_mlp="post_attention_layernorm"
)


def hybrid_classes(
    module: str, plain_config: type[PretrainedConfig], plain_model: type[PreTrainedModel]
) -> tuple[Any, Any]:
    """The config and the model class of a family's hybrid. Its file, `module`, must also give them
    their own names, by which pickle and the loading code of a hybrid's folder find them."""
    _, *names = inspect.signature(plain_model.forward).parameters  # no self

    @functools.wraps(plain_model.forward)  # its signature says a model's arguments to transformers
    def forward(self: Any, *args: Any, **kwargs: Any) -> object:
        # HybridCausalLM takes named arguments only, so that it can pick out the cache.
        return HybridCausalLM.forward(self, **dict(zip(names, args, strict=False)), **kwargs)

    # `type` and not a class statement, for a name per family: saved configs, auto_map and vLLM find
    # the classes by it.
    config: Any = type(
        f"Bosch{plain_config.__name__}",
        (HybridConfig, plain_config),
        {"__module__": module, "model_type": PREFIX + plain_config.model_type},
    )
    model: Any = type(
        f"Bosch{plain_model.__name__}",
        (HybridCausalLM, plain_model),
        {"__module__": module, "config_class": config, "forward": forward},
    )
    return config, model


def head_size(config: PretrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def logit_factor(config: PretrainedConfig) -> float:
    """What a model of our families multiplies the output of its head by."""
    of_family = getattr(family_of(config), "logit_factor", None)
    return 1.0 if of_family is None else float(of_family(config))


def logits_of(model: PreTrainedModel, hidden_NC: Tensor) -> Tensor:
    """The logits of a model's last hidden states."""
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(hidden_NC) * logit_factor(model.config)
    return logits


def apply_norm(block: nn.Module, name: str | None, hidden_BTC: Tensor) -> Tensor:
    return hidden_BTC if name is None else getattr(block, name)(hidden_BTC)


def family_of(config: PretrainedConfig) -> ModuleType:
    """The file in bosch/families for a plain or a hybrid config."""
    name = config.model_type.removeprefix(PREFIX)
    known = list_plugins("bosch.families")
    if name in REFUSED and name not in known:
        raise UserError(f"models of type {name} cannot become hybrids: {REFUSED[name]}.")
    if name not in known:
        problem = f"model_type {config.model_type!r} is no family that this package knows"
        raise UserError(f"{problem}; it knows {', '.join(known)}. docs/extending.md adds one.")
    return load_plugin("bosch.families", name)


def families_with(fact: str) -> list[str]:
    """The families whose files say that this is so of them (bosch/families/__init__.py)."""
    names = list_plugins("bosch.families")
    return [name for name in names if getattr(load_plugin("bosch.families", name), fact, False)]


def share_conversions(plain_class: Any, hybrid_class: Any) -> None:
    """Load and save a hybrid's files in the way of the plain family. transformers has a table of it
    by model_type: files have the experts of a Qwen3-MoE one by one, its modules in one tensor."""
    conversions = get_checkpoint_conversion_mapping(plain_class.model_type)
    if conversions is not None:
        register_checkpoint_conversion_mapping(hybrid_class.model_type, conversions, overwrite=True)


def check_native_window(config: PretrainedConfig) -> None:
    """Refuse a model that has a window of its own in every layer, or layers of further kinds."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None and window is None:
        return
    if others := {*(layer_types or ())} - {FULL_LAYERS, "sliding_attention"}:
        problem = f"this {config.model_type} has layers of the type {min(others)}"
        raise UserError(f"{problem}; those of a hybrid have full attention or a sliding window.")
    if layer_types is None or FULL_LAYERS not in layer_types:
        raise UserError(
            f"this {config.model_type} has a sliding window of its own in every layer "
            f"(sliding_window={window}), so nothing is left to choose. To use full attention in "
            "every layer, set sliding_window to null in a copy of config.json."
        )


def check_hybrid(config: PretrainedConfig) -> None:
    """Refuse a `config.bosch` that does not match the rest of its config."""
    num_layers, num_groups = config.num_hidden_layers, config.num_key_value_heads
    for key in ("window", "num_full", "permutation"):
        if key not in config.bosch:
            raise UserError(f"config.bosch has no {key!r}; materialize the model again.")
    check_window(config.bosch["window"])
    Sink.of_hybrid(config)
    num_full, rows = config.bosch["num_full"], config.bosch["permutation"]
    if not (isinstance(num_full, list) and len(num_full) == num_layers) or any(
        type(number) is not int or not 0 <= number <= num_groups for number in num_full
    ):
        problem = f"config.bosch['num_full'] is {num_full}"
        raise UserError(f"{problem}; it needs {num_layers} numbers from 0 to {num_groups}.")
    groups = sorted(range(num_groups), key=str)  # by text, so that a row of anything is sorted too
    if not (isinstance(rows, list) and len(rows) == num_layers) or any(
        not isinstance(row, list) or sorted(row, key=str) != groups for row in rows
    ):
        raise UserError(
            f"config.bosch['permutation'] must reorder the {num_groups} groups of each of "
            f"{num_layers} layers."
        )
    check_native_window(config)
    for layer in range(num_layers):
        if own_window(config, layer) is not None and num_full[layer]:
            problem = f"config.bosch['num_full'] says {num_full[layer]} for layer {layer}"
            raise UserError(f"{problem}, which has a window of its own; it must be 0.")
