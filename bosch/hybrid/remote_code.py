"""Writes the code that loads a hybrid without this package into the hybrid's folder.

With `trust_remote_code=True` transformers runs Python files of a checkpoint. They must be in one
flat folder, and only relative imports are followed. So the modules that a family needs are copied
under flat names (`bosch/attention/cache.py` becomes `bosch_attention_cache.py`), with imports
rewritten.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from transformers import PretrainedConfig

from bosch.attention.dispatch import BACKENDS
from bosch.hybrid.models import family_of
from bosch.plugins import KINDS, own_files
from bosch.run.files import write_atomically

ENTRY = "modeling_bosch.py"
PLUGINS = "bosch.plugins"  # finds files in folders; replaced by a list in a flat folder
# At the end of the entry file: what `import bosch` does (bosch/hybrid/registration.py).
REGISTER = """

from bosch.attention.register import register  # noqa: E402
from bosch.hybrid.models import share_conversions  # noqa: E402

register()
share_conversions(plain_config_class, config_class)
"""
BACKENDS_PACKAGE = KINDS["backends"]
PLUGINS_TEXT = Path(__file__).with_name("remote_plugins.txt")  # of an own PLUGINS

PACKAGE = Path(__file__).parents[1]
OUR_IMPORT = re.compile(r"^( *)from (bosch\.[\w.]+) import", re.MULTILINE)


def write_remote_code(out: Path, config: PretrainedConfig) -> dict[str, str]:
    """Write the files, and return the `auto_map` that makes transformers find the classes."""
    family = family_of(config)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in remote_code(family.__name__).items():
        write_atomically(out / name, text)
    module = ENTRY.removesuffix(".py")
    return {
        "AutoConfig": f"{module}.{family.config_class.__name__}",
        "AutoModelForCausalLM": f"{module}.{family.model_class.__name__}",
    }


def is_of_this_version(folder: Path, config: PretrainedConfig) -> bool:
    """Whether the code in a hybrid's folder is what this version writes; true if it has none."""
    return not (folder / ENTRY).is_file() or all(
        (folder / name).is_file() and (folder / name).read_text("utf-8", errors="replace") == text
        for name, text in remote_code(family_of(config).__name__).items()
    )


def remote_code(family_module: str) -> Mapping[str, str]:
    """File name -> text: the family's module and all of our modules that it needs."""
    # transformers follows imports by reading the files, and copies no other file of the folder: so
    # what is needed is found in the same way, from the entry on.
    files: dict[str, str] = {}
    waiting = [family_module]
    while waiting:
        module = waiting.pop()
        name = ENTRY if module == family_module else f"{module.replace('.', '_')}.py"
        if name in files:
            continue
        if module == PLUGINS:  # the imports make transformers fetch the backends' files
            # Not those of one's own: the folder must not depend on them, and none is needed.
            names = sorted(name for name in BACKENDS if not own_files((BACKENDS_PACKAGE, name)))
            imports = [
                f"from bosch.attention.backends.{name} import attend as _{name}" for name in names
            ]
            functions = ", ".join(f"{name!r}: _{name}" for name in names)
            text = PLUGINS_TEXT.read_text("utf-8").format(
                imports="\n".join(imports), functions=functions
            )
        else:
            path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
            if module == family_module:  # which may lie in a folder of one's own
                path = Path(str(sys.modules[module].__file__))
            text = path.read_text("utf-8") + (REGISTER if module == family_module else "")
        waiting += [needed for _, needed in OUR_IMPORT.findall(text)]
        text = OUR_IMPORT.sub(
            lambda match: f"{match[1]}from .{match[2].replace('.', '_')} import", text
        )
        files[name] = f"# From bosch-hybrid, {module}. Apache-2.0.\n{text}"
    return files
