"""Registers our attention function and model classes with transformers, as late as possible.

After `import bosch`, `AutoModelForCausalLM.from_pretrained(folder)` must work, whichever of the two
is imported first. Registering at once would load torch and transformers (3 seconds on a desktop
core) in processes that only read a mask or a manifest. So if transformers is not loaded yet, an
import hook waits for it, and registers when its import has finished.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError

logger = logging.getLogger("bosch")

TESTED = "5.24.0"  # of transformers, as in launch/constraints.txt
# Configs and models are found by their model_type through this module.
AUTO_CLASSES = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register now if transformers' auto classes are loaded, or as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WaitForTransformers())


def _register() -> None:
    """A broken family is named, and the others are registered."""
    from packaging.version import Version
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    if Version(__version__) > Version(TESTED) and os.environ.get("RANK", "0") == "0":
        # 5.24 renamed an argument: nothing failed, and no memory was saved.
        newer = "transformers %s is newer than %s, the newest that this package was tested with."
        logger.warning(newer, __version__, TESTED)
    from bosch.attention import register
    from bosch.hybrid import models, remote_code

    # Guarded before ours is registered, which takes these arguments.
    _guard_other_attention()
    register.register()
    for name in list_plugins("bosch.families"):
        try:
            family = load_plugin("bosch.families", name)
        except UserError as error:
            logger.warning("The family %s is left out. %s", name, error)
            continue
        AutoConfig.register(family.config_class.model_type, family.config_class, exist_ok=True)
        AutoModelForCausalLM.register(family.config_class, family.model_class, exist_ok=True)
        models.share_conversions(family.plain_config_class, family.config_class)
    models.HybridConfig.write_code = staticmethod(remote_code.write_remote_code)


def _guard_other_attention() -> None:
    """Make transformers' registered attention functions refuse our arguments, which they would
    ignore. `eager` is registered nowhere, and cannot."""
    from transformers import AttentionInterface

    def refusing(name: str, attention: Callable[..., Any], *args: Any, **others: Any) -> Any:
        for argument, value in others.items():
            if argument.startswith("bosch_") and value is not None:
                raise UserError(
                    f"attn_implementation={name!r} would ignore {argument}: load the model with "
                    'from_pretrained(..., attn_implementation="bosch").'
                )
        return attention(*args, **others)

    for name, attention in AttentionInterface().items():
        if not name.startswith("bosch"):
            guarded = update_wrapper(partial(refusing, name, attention), attention)
            AttentionInterface.register(name, guarded)


class _WaitForTransformers(MetaPathFinder):
    """Counts how deeply imports of transformers and bosch are nested. Registering imports model
    files. During an import these may be half loaded; at depth 0 none is."""

    depth = 0

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("transformers", "bosch"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        # The import itself is left to Python. Only its end is of interest here.
        run_module = spec.loader.exec_module

        def run_and_count(module: ModuleType) -> None:
            self.depth += 1
            try:
                run_module(module)
            finally:
                self.depth -= 1
            if self.depth == 0 and AUTO_CLASSES in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        loader: Any = spec.loader
        loader.exec_module = run_and_count
        return spec
