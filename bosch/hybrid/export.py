"""Writes what a hybrid's folder needs for publishing: model card, picture, loading code. The scores
in a card come later: `put_scores` writes them when the model has been evaluated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from bosch.hybrid.models import PREFIX, family_of, head_size
from bosch.hybrid.remote_code import ENTRY, write_remote_code
from bosch.masks.mask import ORIGIN, GroupMask, MaskFile, describe_bytes
from bosch.masks.picture import draw_mask
from bosch.masks.window import full_layers, own_windows
from bosch.model import ModelInfo
from bosch.run.files import CARD, MANIFEST, read_sealed_json, write_atomically
from bosch.run.plain_text import markdown, markdown_table, yaml_text
from bosch.sink import Sink

PICTURE = "mask.png"
MASK_KEY = "mask"  # in config.bosch: MaskFile.origin(), as materialize.py writes it
SINKS = {  # by kind
    "none": "none",
    "static": "a constant key and value in each group on the window, which take no KV cache",
    "tokens": "the first {} tokens of a text stay in the cache of groups on the window",
}
# Around the scores in a card: between them the text is ours, whatever a user made of the rest.
BEGIN, END = "<!-- scores -->\n", "<!-- end of scores -->\n"
NOT_EVALUATED = ("This model has not been evaluated.",)
CONTEXTS = (4_096, 32_768, 131_072)  # text lengths in the card's table of KV bytes

CARD_TEXT = Path(__file__).with_name("card.txt")


def write_exports(out: Path, config: PretrainedConfig, source: Path) -> None:
    """Write picture, card and the code that loads the folder, and name the code in `config`."""
    # The code before the config, which the caller writes last: a folder with one can be loaded.
    config.auto_map = write_remote_code(out, config)
    record = mask_record(config)
    draw_mask(record, out / PICTURE)
    write_atomically(out / CARD, _model_card(config, record, _license_lines(source, config)))


def put_scores(folder: Path, lines: Sequence[str] = NOT_EVALUATED) -> None:
    """Write lines of Markdown about the scores into a folder's card, if it has a place for them."""
    card = folder / CARD
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    manifest = folder / MANIFEST
    listed = read_sealed_json(manifest, "files")["files"] if manifest.is_file() else {}
    # A manifest of an earlier version has the card's checksum, and a changed card would be damage.
    if end and CARD not in listed:
        new = head + begin + "\n".join(lines) + "\n" + end + tail
        if new != text:
            write_atomically(card, new)


def why_not_served(config: PretrainedConfig) -> str | None:
    """Why vLLM does not serve this hybrid, in a clause; None: it does (docs/serving.md)."""
    sink, family = Sink.of_hybrid(config), config.model_type.removeprefix(PREFIX)
    if not getattr(family_of(config), "served_by_vllm", False):
        return f"its family is {family}, for which the plug-in has no model of vLLM's"
    if getattr(config, "clip_qkv", None) is not None:
        return "vLLM's model of its family ignores clip_qkv"
    if sink.kind == "tokens":
        return f"its sink keeps first tokens ({sink})"
    if all(all(row) for row in full_groups(config)):
        return "it has no group on the window; serve the dense model"
    return None


def full_groups(config: PretrainedConfig) -> list[list[int]]:
    """The mask of a hybrid: of its layers that have no window of their own."""
    hybrid = config.bosch
    places = [(hybrid["permutation"][n], hybrid["num_full"][n]) for n in full_layers(config)]
    return [[int(group in row[:full]) for group in range(len(row))] for row, full in places]


def mask_record(config: PretrainedConfig) -> MaskFile:
    """The mask of a hybrid as in mask.json, with the window that the config has now."""
    origin: Mapping[str, Any] = config.bosch.get(MASK_KEY) or {}
    mask = GroupMask(
        z=tuple(map(tuple, full_groups(config))),
        window_tokens=config.bosch["window"],
        unit=origin.get("unit", "group"),
        sink=Sink.of_hybrid(config),
        own_windows=own_windows(config),
    )
    model = info_of(config, config.model_type)
    if given := origin.get("model"):
        model = ModelInfo(**given)
    record = MaskFile(mask, model, method="unknown")
    return replace(record, **{name: origin[name] for name in ORIGIN if name in origin})


def info_of(
    config: PretrainedConfig, name: str, revision: str | None = None, weight_hash: str | None = None
) -> ModelInfo:
    return ModelInfo(
        name,
        revision,
        weight_hash,
        num_layers=len(full_layers(config)),
        num_groups=config.num_key_value_heads,
        num_query_heads=config.num_attention_heads,
        head_dim=head_size(config),
    )


def _model_card(config: PretrainedConfig, record: MaskFile, license_lines: Sequence[str]) -> str:
    """The text of README.md. The same model gives the same text: it has no date."""
    mask, model = record.mask, record.model
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"base_model: {yaml_text(model.id)}"] if "/" in model.id else []
    front += [*license_lines, "tags:", "- hybrid-attention", "- sliding-window", "- bosch"]
    seed = "" if record.seed is None else f", seed {record.seed}"
    facts: list[tuple[str, object]] = [
        ("base model", model),
        ("license", _license_of(license_lines)),
        ("groups on the window", f"{mask.num_windowed} of {mask.num_total}"),
        ("ratio", f"{mask.ratio:.4g}"),
        ("window", f"{mask.window_tokens:,} tokens, the token itself included"),
        ("sink", SINKS[mask.sink.kind].format(mask.sink.num_tokens)),
        ("chosen by", f"{record.method}{seed}"),
        ("chosen per", mask.unit),
    ]
    if reason := why_not_served(config):
        served = f"vLLM does not serve it: {reason}."
    else:
        served = (
            "With vLLM, the package and the plug-in `serving/vllm` of its repository:\n\n"
            "```sh\nbosch serve --model path/to/this/folder\n```"
        )
    longest = config.max_position_embeddings
    dtype: Any = config.dtype or torch.float32
    size = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    cache = []
    for tokens in [*(tokens for tokens in CONTEXTS if tokens < longest), longest]:
        ours = mask.kv_bytes(tokens, head_size(config), size)
        full = mask.dense_kv_bytes(tokens, head_size(config), size)
        share = f"{ours / full:.3f}"
        cache.append((f"{tokens:,}", describe_bytes(ours), describe_bytes(full), share))
    return CARD_TEXT.read_text("utf-8").format(
        front="\n".join(front),
        name=markdown(model.id.split("/")[-1]),
        facts="\n".join(markdown_table(("", ""), facts)),
        picture=PICTURE,
        cache="\n".join(markdown_table(("tokens", "this model", "full attention", "share"), cache)),
        scores=BEGIN + "\n".join(NOT_EVALUATED) + "\n" + END,
        entry=ENTRY,
        served=served,
    )


def _license_of(lines: Sequence[str]) -> str:
    """That of the base model, in words."""
    fields = dict(line.split(": ", 1) for line in lines)
    found = [fields[name].strip('"') for name in ("license_name", "license") if name in fields]
    return found[0] if found else "unknown: no card of the base model was found that names one"


def _license_lines(source: Path, config: PretrainedConfig) -> list[str]:
    """The lines about the license in the source's own card, each a field with a text; or what its
    config says."""
    card = source / CARD
    # Line by line, not as YAML: whatever a card has in front, the model is written.
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    front = ""
    if text.startswith("---\n"):
        front = text.removeprefix("---\n").partition("\n---")[0]
    fields = re.findall(r"^(license\w*):[ \t]*(\S.*)$", front, re.MULTILINE)
    if not fields and isinstance(stated := getattr(config, "license", None), str):
        fields = [("license", stated)]
    return [name + ": " + yaml_text(value.strip().strip("\"'")) for name, value in fields]
