"""Models: how they are found, what their config says, and how models and tokenizers are loaded.
Importing this file loads neither torch nor transformers.

A model is named by a Hugging Face folder, a hub id (owner/name), or the name of an embedded one.
"""

import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from bosch.assets import asset_folder
from bosch.known_models import PAPER_MODELS, SHAPES
from bosch.masks.window import full_layers, own_windows
from bosch.model_files import INDEX, TOKENIZER_CONFIG, hash_weights, read_json_object, weight_names
from bosch.plugins import KINDS, list_plugins, own_files
from bosch.run.errors import MissingFileError, UserError, is_user_error
from bosch.run.files import path_inside, refuse_foreign_links
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.hub import is_offline, prepare_hub
from bosch.run.memory import has_gpu, is_old_gpu
from bosch.run.progress import say

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = Path(__file__).parent
FAMILIES = KINDS["families"]
# A model's shape: the names in config.json, and those of our fields in ModelInfo.
NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPE = ("num_layers", "num_query_heads", "num_groups", "head_dim")
# Fields of config.json that do not affect what the model computes, but change when it is saved.
NO_DECISION = ("_name_or_path", "architectures", "transformers_version", "use_cache")
# Files that decide which texts a model reads and writes, besides config.json.
GENERATION = "generation_config.json"
TOKENIZERS = ("*token*", "vocab*", "merges*", "*.model", "tekken*")
TEXT_FILES = (GENERATION, "*token*", "vocab*", "merges*", "chat_template*")
# Weights beside the safetensors files, which are never loaded.
OTHER_WEIGHTS = ".bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .ot".split()

# For every from_pretrained of transformers. Code in a model's folder is never run: without False,
# transformers would ask on a terminal.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
NEVER_RUN = "Code in a model's folder is never run; use a model that transformers loads without it"


@dataclass(frozen=True)
class ModelInfo:
    """A model's shape, and what distinguishes it from other models of this shape."""

    id: str  # hub id, or the folder's name
    revision: str | None  # commit on the hub; None for a folder that is not a hub snapshot
    # Of the safetensors files; None for a hub snapshot, and where there are no weights yet.
    weight_hash: str | None
    num_layers: int  # without those that have a window of their own
    num_groups: int  # KV heads a layer
    num_query_heads: int  # a layer
    head_dim: int

    def __post_init__(self) -> None:
        for name in SHAPE:
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{self.id}: {name} is {value}; it must be 1 or more.")
        if self.num_query_heads % self.num_groups:
            heads = f"{self.num_query_heads} query heads cannot share {self.num_groups} KV heads"
            raise UserError(f"{self.id}: {heads} evenly.")

    def __str__(self) -> str:
        mark = self.revision or self.weight_hash
        return f"{self.id} ({mark[:12]})" if mark else self.id

    def describe(self) -> str:
        heads = f"{self.num_query_heads} query heads of {self.head_dim}"
        return f"{self} with {self.num_layers} layers x {self.num_groups} groups, {heads}"

    def is_same_model(self, other: "ModelInfo") -> bool:
        """By weights if both have a hash; otherwise by id, and by revision if both have one. A
        folder may be a copy of a hub model: then its name is the last part of the id."""
        if any(getattr(self, name) != getattr(other, name) for name in SHAPE):
            return False
        if self.weight_hash and other.weight_hash:
            return self.weight_hash == other.weight_hash
        revisions = {self.revision, other.revision} - {None}
        is_copy = "/" not in self.id or "/" not in other.id
        names = [m.id.rsplit("/", 1)[-1] if is_copy else m.id for m in (self, other)]
        return names[0] == names[1] and len(revisions) <= 1


class ModelShape(NamedTuple):
    num_layers: int
    num_groups: int  # KV heads a layer
    positions: int


def find_model(model: str, option: str = "--model") -> Path | None:
    """The folder of a model on this machine; None for a hub id."""
    if Path(model).is_dir():
        return Path(model)
    if "/" not in model and (asset := asset_folder().parent / model).is_dir():
        return asset
    # Not a hub id: a path, or a name with no slash or several.
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        what = "a model's folder, a hub id (owner/name), or tiny-qwen3 or tiny-qwen3-2layer"
        raise MissingFileError(f"{option} {model}: there is no such folder; pass {what}.")
    return None


def fetch_model(model: str, option: str = "--model") -> Path:
    """The folder of a model. A hub model is downloaded: safetensors files and all small files."""
    # Mistral's repositories hold all weights a second time, as consolidated.safetensors.
    others = ["*/*", "consolidated*", *(f"*{suffix}" for suffix in OTHER_WEIGHTS)]
    # The ranks of a machine fetch one after another: all but the first find the model there.
    name = re.sub(r"\W", "-", f"bosch-{os.getuid()}-{model}")

    def fetch(hub: Any) -> str:
        with FileLock(Path(tempfile.gettempdir()) / f"{name}.lock"):
            return str(hub.snapshot_download(model, ignore_patterns=others))

    folder = _find_or_fetch(model, option, fetch)
    # Offline the hub's library gives what there is of a model: its config.json, after a --dry-run.
    if find_model(model, option) is None and is_offline() and not any(folder.glob("*.safetensors")):
        raise MissingFileError(
            f"{option} {model}: the cache of the hub has only a part of it, and the hub cannot be "
            f"reached. Run `hf download {model}` where it can."
        )
    return folder


def fetch_config(model: str) -> Path:
    """A folder with the model's config.json. Of a hub model only that file is downloaded."""
    found = _find_or_fetch(model, "--model", lambda hub: hub.hf_hub_download(model, "config.json"))
    return found.parent if found.is_file() else found


def _find_or_fetch(model: str, option: str, fetch: Callable[[Any], str]) -> Path:
    if (folder := find_model(model, option)) is not None:
        return folder
    import huggingface_hub

    prepare_hub()
    problem = f"{option} {model} is not a folder on this machine and cannot be fetched from the hub"
    with explain_library_errors(problem, MissingFileError):
        return Path(fetch(huggingface_hub))


@contextmanager
def explain_library_errors(problem: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn any error of a library that is called inside into `PROBLEM: its reason`: they raise
    errors of every type on damaged files. An error of our own code that the library calls, such as
    a family's config class, is left alone."""
    try:
        yield
    except Exception as error:
        # The first two frames are this function and the `with` block.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        is_ours = frames and frames[-1].filename.startswith(f"{PACKAGE}{os.sep}")
        if is_user_error(error) or is_ours:
            raise
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            text = f"it needs code of its own. {NEVER_RUN}."
        elif type(error).__name__ == "LocalEntryNotFoundError":
            text = "the hub cannot be reached."
        elif not text or isinstance(error, LookupError | TypeError | AttributeError):
            text = f"{type(error).__name__} {text}".strip()
        raise kind(f"{problem}: {text if len(text) <= 300 else f'{text[:300]}...'}") from error


def read_shape(model: str) -> ModelShape:
    """From its config.json, which is fetched if necessary; that of the paper's models is known."""
    if model in PAPER_MODELS and find_model(model) is None:
        folder, config = Path(model), SHAPES[PAPER_MODELS[model]]
    else:
        folder = fetch_config(model)
        config = read_model_config(folder)
    return ModelShape(
        _count_full_layers(config, folder),
        _count(config, "num_key_value_heads", folder),
        _count(config, "max_position_embeddings", folder),
    )


def check_length(option: str, tokens: int, model: str) -> None:
    """Refuse texts that are longer than the model's positions. `option`: what asks for them."""
    if tokens > (positions := read_shape(model).positions):
        raise UserError(f"{option} {tokens}: {model} has {positions:,} positions; ask for less.")


def check_window_fits(window: int, model: str, positions: int | None = None) -> None:
    """Refuse a window that every text of the model fits into. `positions`: if not the model's."""
    if window >= (positions := positions or read_shape(model).positions):
        raise UserError(f"--window {window}: {model} has {positions:,} positions; choose less.")


def read_model_info(folder: Path) -> ModelInfo:
    config, (hub_id, revision) = read_model_config(folder), known_to_hub(folder)
    return ModelInfo(
        num_layers=_count_full_layers(config, folder),
        num_query_heads=_count(config, "num_attention_heads", folder),
        num_groups=_count(config, "num_key_value_heads", folder),
        head_dim=_count(config, "head_dim", folder),
        id=hub_id or folder.resolve().name,
        revision=revision,
        weight_hash=None if revision else hash_weights(folder),
    )


def known_to_hub(folder: Path) -> tuple[str, str] | tuple[None, None]:
    """Id and commit of a model in the hub's cache: models--Qwen--Qwen3-0.6B/snapshots/<commit>.
    Weights elsewhere are hashed."""
    cached = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", str(folder.absolute()))
    return (cached[1].replace("--", "/"), cached[2]) if cached else (None, None)


def read_own_windows(folder: Path) -> tuple[int, ...]:
    """Of the layers of a model that have windows of their own, in tokens."""
    return own_windows(_with_windows(read_model_config(folder)))


def _count_full_layers(config: dict[str, Any], folder: Path) -> int:
    """The layers that are a mask's."""
    count = _count(config, "num_hidden_layers", folder)
    # A model without any is refused later, with a sentence of its own.
    return len(full_layers(_with_windows(config))) or count


def _with_windows(config: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{"layer_types": None, "sliding_window": None, **config})


def describe_source(model: str) -> str | dict[str, object]:
    """For a stage's settings. A hub model is its id, so that planning a run downloads nothing; but
    with families of the user's own it has to be known which one it is of."""
    folder = find_model(model)
    if folder is not None:
        return describe_model(folder)
    there_are_own = own_files(*((FAMILIES, name) for name in list_plugins(FAMILIES)))
    family = own_family(read_model_config(fetch_config(model))) if there_are_own else {}
    return {"model": model, **family} if family else model


def describe_model(folder: Path) -> dict[str, object]:
    """What decides the output of the model in a folder, for a stage's settings."""
    config = read_model_config(folder)
    deciding = {name: value for name, value in config.items() if name not in NO_DECISION}
    info = asdict(read_model_info(folder))
    return {**info, "config": fingerprint(deciding), **own_family(config)}


def own_family(config: dict[str, Any]) -> dict[str, object]:
    """The content of the family's file if it is the user's own: it decides what the model
    computes."""
    name = str(config.get("model_type", "")).removeprefix("bosch_")  # of a hybrid
    own = own_files((FAMILIES, name))
    return {"plugins": own} if own else {}


def hash_text_files(model: str) -> dict[str, str]:
    """Checksums of a model's tokenizer and generation settings; none for a hub model."""
    folder = find_model(model)
    paths = {path for pattern in TEXT_FILES for path in folder.glob(pattern)} if folder else set()
    return {path.name: hash_file(path) for path in sorted(paths) if path.is_file()}


def read_model_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; missing fields of the shape are completed by transformers."""
    path = folder / "config.json"
    if not path.is_file():
        remedy = "pass a Hugging Face model folder"
        if models := [found.parent for found in sorted(folder.glob("*/config.json"))]:
            remedy = f"pass a model in it, as {models[-1]}"
        if trained := [found.parent for found in sorted(folder.glob("train/step-*/config.json"))]:
            remedy = f"it is the folder of a run; pass a model in it, as {trained[-1]}"
        raise MissingFileError(f"{folder} has no config.json; {remedy}.")
    if not folder.is_relative_to(PACKAGE):  # installers may link the package's own files
        refuse_foreign_links(folder)
    if (folder / INDEX).is_file():
        weight_names(folder / INDEX)  # refuses names of files elsewhere
    config = read_json_object(path)
    # transformers silently ignores a file that it cannot read, and with it the end tokens.
    generation = folder / GENERATION
    ends = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    if not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends or 0])):
        raise UserError(f"{generation}: eos_token_id is {ends!r:.60}; it must be token ids.")
    # In place of its number of groups a hybrid has a word that plain families refuse.
    missing = [name for name in NEEDED if config.get(name) in (None, "bosch_hybrid")]
    # Some families say which of their layers have windows in a pattern of their own.
    has_pattern = config.get("layer_types") is None and bool(config.get("sliding_window"))
    has_pattern &= config.get("use_sliding_window") is not False
    if not missing and not has_pattern:
        return config
    # Each family has its own defaults: without num_key_value_heads, Llama has as many as query
    # heads, Qwen2 has 32.
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        if not missing:
            return config
        lacks = f"{path} lacks one of {', '.join(NEEDED)}"
        raise UserError(f"{lacks}, and transformers does not know its model_type {model_type!r}.")
    with explain_library_errors(f"{path} is not a valid config"):
        completed = CONFIG_MAPPING[model_type].from_dict(config)
    values = {name: getattr(completed, name, None) for name in NEEDED}
    if heads := values["num_attention_heads"]:
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["head_dim"] = values["head_dim"] or getattr(completed, "hidden_size", 0) // heads
    if has_pattern:
        values["layer_types"] = getattr(completed, "layer_types", None)
    known = {k: v for k, v in config.items() if v is not None and k not in missing}
    return {name: value for name, value in values.items() if value} | known


def names_code(path: Path) -> bool:
    """Whether a config.json or tokenizer_config.json names code for transformers to run. Code that
    we wrote beside a hybrid does not count."""
    content = read_json_object(path) if path.is_file() else {}
    if "auto_map" not in content:
        return False
    from bosch.hybrid.models import PREFIX  # imports torch

    return not str(content.get("model_type")).startswith(PREFIX)


def _count(config: dict[str, object], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UserError(f"{folder / 'config.json'}: {name} is {value!r}; it must be 1 or more.")
    return value


def load_tokenizer(model: str | Path, **arguments: Any) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or of a hub model, which is fetched, for the model beside it.
    `arguments` go to from_pretrained of transformers."""
    tokenizer, folder = _read_tokenizer(model, **arguments), find_model(str(model))
    # Such tokenizers would train and score without an error, or end on a GPU in one that names
    # neither.
    vocabulary = tokenizer.get_vocab()
    if len({*vocabulary.values()}) < len(vocabulary):
        raise UserError(f"the tokenizer of {folder or 'the model'} has two tokens of one id.")
    config = folder / "config.json" if folder is not None else None
    size = read_json_object(config).get("vocab_size") if config and config.is_file() else None
    # Some classes add special tokens that no text has.
    ids = tokenizer("a")["input_ids"]
    special = {*tokenizer.all_special_ids} - {*ids}
    highest = max({*vocabulary.values()} - special)
    if isinstance(size, int) and highest >= size:
        problem = f"ids up to {highest:,}, but the model's vocab_size is {size:,}"
        raise UserError(f"the tokenizer of {folder} has {problem}: remove added tokens.")
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # NIAH fell from 79 to 4 % by it
        raise UserError(
            f"the tokenizer of {folder or model} puts its end token behind every text, so that "
            "prompts would be over before their answers. Set add_eos_token to false in "
            f"{TOKENIZER_CONFIG}, or take the token out of post_processor in tokenizer.json."
        )
    return tokenizer


def _read_tokenizer(model: str | Path, **arguments: Any) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    folder = find_model(str(model))
    if folder is not None:
        path = folder / TOKENIZER_CONFIG
        files = read_json_object(path).get("fast_tokenizer_files") if path.is_file() else None
        for name in files if isinstance(files, list) else []:
            path_inside(folder, name, path, flat=True)
    else:
        prepare_hub()
    problem = f"{folder or model} has no tokenizer that can be loaded"
    if folder is not None and not any(
        path.is_file() for one in TOKENIZERS for path in folder.glob(one)
    ):
        read_model_config(folder)  # of a run's folder it names the model in it
        lacks = f"{folder} has no tokenizer: neither tokenizer.json nor another file of one"
        raise MissingFileError(f"{lacks}; copy those of the model that the weights are from.")
    with explain_library_errors(problem):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder or model, **{**LOCAL, "local_files_only": folder is not None}, **arguments
        )
    if len(tokenizer) < 2:  # some classes accept a folder without tokenizer files
        raise UserError(f"{problem}: there are no tokens in it.")
    if folder is not None:
        _mention_code(folder / TOKENIZER_CONFIG)
    return tokenizer


def _mention_code(path: Path) -> None:
    if names_code(path):
        say(f"{path} names code of its own; transformers' own classes are used instead")


def find_tokenizer(folder: Path, **arguments: Any) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a folder; None if it has none that can be loaded."""
    with suppress(UserError):
        return _read_tokenizer(folder, **arguments)
    return None


def load_for_search(
    folder: Path, attention_backend: str = "auto", precision: str = "auto"
) -> "PreTrainedModel":
    """The dense model, ready for search mode. precision: `auto` is its own dtype on a GPU, float32
    on the CPU. All masks and the dense model are scored by the same kernels."""
    import torch

    from bosch.kernels import fuse_forward

    device, usual = ("cuda", "auto") if has_gpu() else ("cpu", torch.float32)
    if is_old_gpu():
        usual = torch.float32
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision, usual)
    model = load_model(folder, dtype, device, attention_backend, attn_implementation="bosch")
    fuse_forward(model)
    return model


def check_weights(model: str) -> None:
    """Refuse, before work begins, a folder whose weights are missing, damaged or not those of its
    config.json, by names and shapes. A hub model is not fetched for it."""
    folder = find_model(model)
    if folder is not None and not read_model_config(folder).get("quantization_config"):
        _load_weights(folder, dtype="auto", device_map="meta")


def load_model(
    folder: Path,
    dtype: "torch.dtype | str",
    device: str,
    attention_backend: str = "auto",
    **arguments: Any,
) -> "PreTrainedModel":
    """The model of a folder, dense or hybrid, in evaluation mode. `attention_backend`: a file of
    bosch/attention/backends. `arguments` go to from_pretrained of transformers."""
    import torch

    from bosch.hybrid.models import PREFIX
    from bosch.hybrid.remote_code import is_of_this_version

    if str(device).startswith("cuda"):  # or libraries would take memory of GPU 0 on every rank
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Each weight goes straight to its device: ranks of a machine share its memory.
    model = _load_weights(folder, dtype=dtype, device_map=device, **arguments)
    _mention_code(folder / "config.json")
    if model.config.model_type.startswith(PREFIX) and not is_of_this_version(folder, model.config):
        say(
            f"the code in {folder} is of another version of this package. It is not used here, but "
            "without the package it may keep the whole KV cache under a newer transformers: `bosch "
            f"materialize --model {folder} --out NEW` renews it"
        )
    if attention_backend != "auto":
        model.config.bosch_backend = attention_backend
    return model.eval()


def _load_weights(folder: Path, **arguments: Any) -> Any:
    """transformers would only warn of missing weights and start with random ones."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from bosch.hybrid.shards import weight_files  # imports torch

    weight_files(folder)  # refuses a folder that lacks some
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is said below
    try:
        with explain_library_errors(f"The model in {folder} cannot be loaded"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **LOCAL, **arguments
            )
    finally:
        logging.set_verbosity(verbosity)
    model, found = loaded
    known, unused = set(model.state_dict()), sorted(found["unexpected_keys"])
    problem = ""
    if mismatched := sorted(found["mismatched_keys"]):
        name, there, expected = mismatched[0]
        problem = f"{name} has the shape {list(there)}, by config.json {list(expected)}"
    elif missing := sorted(found["missing_keys"]):
        problem = f"{len(missing)} weights of config.json are missing, such as {missing[0]}"
    elif beyond := [n for n in unused if re.sub(r"\.\d+\.", ".0.", n, count=1) in known]:
        problem = f"config.json has fewer layers than the weights, such as that of {beyond[0]}"
    if problem:
        advice = "Pass a folder whose config.json belongs to its weights."
        raise UserError(f"The model in {folder} cannot be loaded: {problem}. {advice}")
    if unused:
        say(f"{folder}: {len(unused)} weights have no place in the model, such as {unused[0]}")
    return model
