"""Models: where they are found, what their folders say before any weight is loaded, and how they
and their tokenizers are loaded. Importing this file loads neither torch nor transformers.

A model is named by a Hugging Face folder, a hub id (owner/name), or the name of an embedded one.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bosch.assets import asset_folder
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint, hash_file

# Of config.json: what decides nothing that the model computes, and changes when it is saved again.
NO_DECISION = ("_name_or_path", "architectures", "transformers_version", "use_cache")


@dataclass(frozen=True)
class ModelInfo:
    """A model's shape, and what tells it from others of the same shape."""

    id: str  # hub id, or the folder's name
    revision: str | None  # commit on the hub; None for a folder that is not a hub snapshot
    # Of the safetensors files; None for a hub snapshot, and where there are no weights yet.
    weight_hash: str | None
    num_layers: int
    num_groups: int  # KV heads a layer
    num_query_heads: int  # a layer
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_groups", "num_query_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{self.id}: {name} is {getattr(self, name)}, it must be 1 or more."
                )
        if self.num_query_heads % self.num_groups:
            raise UserError(
                f"{self.id}: {self.num_query_heads} query heads cannot be shared out evenly among "
                f"{self.num_groups} KV heads."
            )

    def __str__(self) -> str:
        mark = self.revision or self.weight_hash
        return f"{self.id} ({mark[:12]})" if mark else self.id

    def describe(self) -> str:
        """Name and shape, for messages in which two models are told apart."""
        return f"{self} with {self.num_layers} layers x {self.num_groups} groups"

    @property
    def query_heads_per_group(self) -> int:
        return self.num_query_heads // self.num_groups

    def has_shape_of(self, other: "ModelInfo") -> bool:
        names = ("num_layers", "num_groups", "num_query_heads", "head_dim")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def is_same_model(self, other: "ModelInfo") -> bool:
        """By weights where both have a hash; else by id, and revision where both have one. Of a
        model of the hub a folder elsewhere, a copy of it, has the last part of the id."""
        if not self.has_shape_of(other):
            return False
        if self.weight_hash and other.weight_hash:
            return self.weight_hash == other.weight_hash
        revisions = {self.revision, other.revision} - {None}
        is_copy = "/" not in self.id or "/" not in other.id
        names = [m.id.rsplit("/", 1)[-1] if is_copy else m.id for m in (self, other)]
        return names[0] == names[1] and len(revisions) <= 1


class ModelShape(NamedTuple):
    """What a setup must know of a model before it is loaded."""

    num_layers: int
    num_groups: int  # KV heads a layer
    positions: int


# Of the paper's models, so that planning a run fetches nothing.
PAPER_SHAPES = {
    "Qwen/Qwen3-1.7B-Base": ModelShape(28, 8, 32_768),
    "Qwen/Qwen3-8B-Base": ModelShape(36, 8, 32_768),
    "Qwen/Qwen3-14B-Base": ModelShape(40, 8, 32_768),
    "Qwen/Qwen3-30B-A3B-Base": ModelShape(48, 4, 40_960),
}


# ------------------------------------------------------------------------------------ finding it


def find_model(model: str) -> Path | None:
    """The folder of a model that is on this machine; None for a hub id. A path that leads nowhere
    is refused."""
    if Path(model).is_dir():
        return Path(model)
    if "/" not in model and (asset := asset_folder().parent / model).is_dir():
        return asset
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise MissingFileError(
            f"--model {model}: there is no such folder; pass a Hugging Face model folder or a hub "
            "id (owner/name), or an embedded model (tiny-qwen3, tiny-qwen3-2layer)."
        )
    return None


def fetch_model(model: str) -> Path:
    """The folder of a model; one on the hub is fetched, its safetensors files and what is small."""
    if (folder := find_model(model)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    with _explain_hub(model):
        return Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*/*"]))


def fetch_config(model: str) -> Path:
    """A folder with the model's config.json; of a model on the hub nothing else is fetched."""
    if (folder := find_model(model)) is not None:
        return folder
    from huggingface_hub import hf_hub_download

    with _explain_hub(model):
        return Path(hf_hub_download(model, "config.json")).parent


@contextlib.contextmanager
def _explain_hub(model: str) -> Iterator[None]:
    """One sentence in place of the hub's errors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise MissingFileError(
            f"--model {model} is no folder here, and the hub did not give it: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------- what its folder says


def read_shape(model: str) -> ModelShape:
    """Shape of a model from its config.json, which is fetched from the hub if need be."""
    if model in PAPER_SHAPES and find_model(model) is None:
        return PAPER_SHAPES[model]
    config = read_model_config(fetch_config(model))
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        raise UserError(
            f"{model}: its config.json says no max_position_embeddings ({positions!r})."
        )
    return ModelShape(config["num_hidden_layers"], config["num_key_value_heads"], positions)


def read_model_info(folder: Path) -> ModelInfo:
    """Shape and identity of the model in a folder.

    The path of a snapshot in the hub's cache names model and commit; elsewhere weights are hashed.
    """
    config = read_model_config(folder)
    model_id, revision = _hub_name(folder)
    return ModelInfo(
        id=model_id,
        revision=revision,
        weight_hash=None if revision else _hash_weights(folder),
        num_layers=_count(config, "num_hidden_layers", folder),
        num_groups=_count(config, "num_key_value_heads", folder),
        num_query_heads=_count(config, "num_attention_heads", folder),
        head_dim=_count(config, "head_dim", folder),
    )


def describe_source(model: str) -> str | dict[str, Any]:
    """A model as a stage's settings tell it: one on the hub by its id, so that planning a run
    downloads nothing."""
    folder = find_model(model)
    return model if folder is None else describe_model(folder)


def describe_model(folder: Path) -> dict[str, Any]:
    """All that decides what the model in a folder computes, for a stage's settings: its weights and
    its config, of which a window or the stretch of its positions can be edited."""
    config = read_model_config(folder)
    deciding = {name: value for name, value in config.items() if name not in NO_DECISION}
    return {**asdict(read_model_info(folder)), "config": fingerprint(deciding)}


def read_model_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, and what it leaves out of the shape as transformers has it."""
    if not folder.is_dir():
        raise MissingFileError(
            f"{folder} is not a folder; a model is a folder with config.json and safetensors files."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFileError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder."
        )
    config = read_json_object(path)
    needed = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    if any(config.get(name) is None for name in needed):
        config = {**_defaults(config, path), **{k: v for k, v in config.items() if v is not None}}
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose outermost value is an object."""
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist.")
    try:
        content = json.loads(path.read_bytes().decode())
    except ValueError as error:  # a JSONDecodeError or UnicodeDecodeError
        raise UserError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold one JSON object, not a {type(content).__name__}.")
    return content


def _defaults(config: dict[str, Any], path: Path) -> dict[str, int]:
    """What a config.json may leave out. Each family has its own defaults: where it says no
    num_key_value_heads, Llama has as many as query heads, Qwen2 has 32.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{path} leaves out num_hidden_layers, num_attention_heads, num_key_value_heads or "
            f"head_dim, and transformers knows no model_type {model_type!r} that would give it."
        )
    completed = CONFIG_MAPPING[model_type].from_dict(config)
    heads = getattr(completed, "num_attention_heads", None)
    found = {
        "num_hidden_layers": getattr(completed, "num_hidden_layers", None),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(completed, "num_key_value_heads", None) or heads,
        "head_dim": getattr(completed, "head_dim", None)
        or (heads and getattr(completed, "hidden_size", 0) // heads),
    }
    return {name: value for name, value in found.items() if value}


def _count(config: dict[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UserError(
            f"{folder / 'config.json'}: {name} is {value!r}, it must be a whole number from 1 on."
        )
    return value


def _hub_name(folder: Path) -> tuple[str, str | None]:
    """Id and revision from models--Qwen--Qwen3-0.6B/snapshots/<commit>, else the folder's name."""
    parts = folder.absolute().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]
    return folder.resolve().name, None


def _hash_weights(folder: Path) -> str | None:
    files = sorted(folder.glob("*.safetensors"))
    return fingerprint({path.name: hash_file(path) for path in files}) if files else None


# ------------------------------------------------------------------------------------ loading it


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a folder or model; one on the hub is fetched."""
    from transformers import AutoTokenizer

    folder = find_model(str(model))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder or model, local_files_only=folder is not None
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{model} has no tokenizer that can be loaded: {_reason(error)}") from error
    if len(tokenizer) < 2:  # what some classes make of a folder without tokenizer files
        raise UserError(f"{model} has no tokenizer that can be loaded: its vocabulary is empty.")
    return tokenizer


def find_tokenizer(folder: Path) -> Any:
    """None where the folder has none that can be loaded."""
    try:
        return load_tokenizer(folder)
    except ValueError:
        return None


def load_for_search(folder: Path, attention_backend: str = "auto") -> Any:
    """The dense model, ready for search mode: on a GPU in its own number format, on the CPU in
    float32."""
    import torch

    on_gpu = torch.cuda.is_available()
    dtype, device = ("auto", "cuda") if on_gpu else (torch.float32, "cpu")
    return load_model(folder, dtype, device, attention_backend, attn_implementation="bosch")


def load_model(
    folder: Path, dtype: Any, device: str, attention_backend: str = "auto", **arguments: Any
) -> Any:
    """The model of a folder, dense or hybrid, ready to be asked. `attention_backend`: a file of
    bosch/backends; `arguments`: of transformers' from_pretrained."""
    from transformers import AutoModelForCausalLM

    if not any(folder.glob("*.safetensors")):
        raise MissingFileError(f"{folder} holds no safetensors, so the model has no weights.")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, **arguments
    )
    if attention_backend != "auto":
        model.config.bosch_backend = attention_backend
    return model.to(device).eval()
