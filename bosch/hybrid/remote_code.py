"""The code that loads a hybrid where this package is not installed, written into its folder.

transformers runs Python files of a checkpoint with `trust_remote_code=True`. It takes them from one
flat folder and follows relative imports only. So the modules a family needs are copied under flat
names (`bosch/hybrid/cache.py` becomes `bosch_hybrid_cache.py`), with their imports rewritten.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from transformers import PretrainedConfig

import bosch
from bosch.hybrid.models import family_of
from bosch.plugins import list_plugins
from bosch.run.manifest import write_atomically

ENTRY = "modeling_bosch.py"
PLUGINS = "bosch.plugins"  # finds files in folders; in a flat folder a list takes its place
ATTENTION = "bosch.hybrid.attention"
# What `import bosch` does for the package (bosch/hybrid/registration.py), at the entry file's end.
REGISTER = """

from bosch.hybrid.attention import register  # noqa: E402
from bosch.hybrid.models import share_conversions  # noqa: E402

register()
share_conversions(plain_config_class, config_class)
"""
PLUGINS_TEXT = '''\
"""The attention backends of this folder, by name."""

import sys
from types import ModuleType

{imports}

_FUNCTIONS = {{{functions}}}


def list_plugins(package: str) -> tuple[str, ...]:
    return tuple(_FUNCTIONS) if package == "bosch.backends" else ()


def load_plugin(package: str, name: str) -> ModuleType:
    return sys.modules[_FUNCTIONS[name].__module__]
'''

PACKAGE = Path(bosch.__file__).parent
OUR_IMPORT = re.compile(r"^( *)from (bosch\.[\w.]+) import", re.MULTILINE)
# An optional package is imported inside a function. transformers would demand it before it loads
# anything, because it reads import statements wherever they are.
OPTIONAL_IMPORT = re.compile(r"^( +)from (flash_attn\w*) import (\w+)$", re.MULTILINE)
NAME_LINE = re.compile(r'^NAME = "(\w+)"$', re.MULTILINE)


def write_remote_code(out: Path, config: PretrainedConfig) -> dict[str, str]:
    """Write the files, and return the `auto_map` that makes transformers find the classes."""
    family = family_of(config)
    for name, text in remote_code(family.__name__).items():
        write_atomically(out / name, text)
    module = ENTRY.removesuffix(".py")
    return {
        "AutoConfig": f"{module}.{family.config_class.__name__}",
        "AutoModelForCausalLM": f"{module}.{family.model_class.__name__}",
    }


def remote_code(family_module: str) -> Mapping[str, str]:
    """File name -> text: the family's module and all it needs of ours."""
    texts: dict[str, str] = {}
    waiting = [family_module]
    while waiting:
        module = waiting.pop()
        if module in texts:
            continue
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        source = _plugins_text() if module == PLUGINS else path.read_text("utf-8")
        source += REGISTER if module == family_module else ""
        waiting += [name for _, name in OUR_IMPORT.findall(source)]
        texts[module] = source
    files = {_flat(module): _rewrite(module, text) for module, text in texts.items()}
    files[ENTRY] = files.pop(_flat(family_module))
    return files


def _flat(module: str) -> str:
    return f"{module.replace('.', '_').replace('__', '_')}.py"


def _rewrite(module: str, text: str) -> str:
    text = OUR_IMPORT.sub(
        lambda match: f"{match[1]}from .{_flat(match[2]).removesuffix('.py')} import", text
    )
    text = OPTIONAL_IMPORT.sub(r'\1\3 = __import__("\2", fromlist=["\3"]).\3', text)
    if module == ATTENTION:
        # Each copy of the code registers a name of its own: two checkpoints of different versions,
        # or the package, in one process do not take each other's place.
        text, count = NAME_LINE.subn(
            'NAME = "bosch_" + hashlib.sha256(__name__.encode()).hexdigest()[:12]', text
        )
        text = text.replace("\nimport torch\n", "\nimport hashlib\n\nimport torch\n", 1)
        assert count == 1
        assert "import hashlib" in text
    return f"# From bosch-hybrid, {module}. Apache-2.0.\n{text}"


def _plugins_text() -> str:
    """Stands for bosch/plugins.py. Imports backends so that transformers fetches their files."""
    names = list_plugins("bosch.backends")
    imports = [f"from bosch.backends.{name} import attend as _{name}" for name in names]
    functions = ", ".join(f"{name!r}: _{name}" for name in names)
    return PLUGINS_TEXT.format(imports="\n".join(imports), functions=functions)
