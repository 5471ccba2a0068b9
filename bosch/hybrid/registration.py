"""Tell transformers about our attention function and model classes, as late as possible.

`import bosch` must be enough for `AutoModelForCausalLM.from_pretrained(folder)`, whichever of the
two is imported first. Doing it at once would load torch and transformers (3 seconds on a desktop
core) into every process that only wants a mask or a stage's manifest. So where transformers is not
loaded yet, an import hook waits for it, and registers when the import that brought it in has ended.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Neither a config nor a model is found by its model_type without it.
AUTO_CLASSES = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register now if transformers' auto classes are loaded, or as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WaitForTransformers())


def _register() -> None:
    from bosch.hybrid import attention, models

    attention.register()
    models.register_families()


class _WaitForTransformers(MetaPathFinder):
    """Counts how deep in imports of transformers (and of ours, which import it) we are.

    Registering imports model files. In the middle of an import those may be half loaded, at depth 0
    none is.
    """

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("transformers", "bosch"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
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
