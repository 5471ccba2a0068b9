"""The models that are shipped with the package: small enough for a laptop without a network. Their
READMEs say how they were trained."""

from pathlib import Path

from bosch.run.errors import UserError

DEFAULT_MODEL = "tiny-qwen3"


def asset_folder(name: str = DEFAULT_MODEL) -> Path:
    """The folder of a shipped model, an ordinary Hugging Face folder."""
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        shipped = sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json"))
        raise UserError(
            f"No model {name!r} is shipped with the package; there are {', '.join(shipped)}."
        )
    return folder
