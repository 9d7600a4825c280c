"""Lazily imported names for ``from metaflow import gpu_profile`` and ``--with gpu_profile``.

Metaflow loads this module with every ``import metaflow``, in any folder. It imports no other module of this
project, so that an unrelated package with the same name causes no error until a flow uses one of these names.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from metaflow_extensions.finetune.own_packages import exit_if_shadowed

if TYPE_CHECKING:
    from decorators import Profile

REQUIRED_PACKAGES = ("decorators", "estimator", "launchers")


class LazyDecorator:
    """Proxy for one of this project's step decorators, in flows and as a name for ``--with``."""

    def __init__(self, name: str, purpose: str) -> None:
        self.__name__, self.__doc__ = name, purpose

    @property
    def __signature__(self) -> inspect.Signature:
        """Arguments for completion and help in notebooks and editors."""
        exit_if_shadowed(REQUIRED_PACKAGES)
        from decorators.declared import signature

        return signature()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Decorate a step, without or with arguments for the decorator."""
        return self._load()(*arguments, **options)

    def parse_decorator_spec(self, text: str) -> Any:
        """Return the decorator with the arguments from ``--with NAME:arguments``. Called by Metaflow."""
        return self._load().parse_decorator_spec(text)

    def _load(self) -> Any:
        exit_if_shadowed(REQUIRED_PACKAGES)
        import decorators

        return getattr(decorators, self.__name__)


gpu_profile = LazyDecorator(
    "gpu_profile",
    "Measure a step, and request its hardware by a plan for a model (options of `finetune plan`), by sizes, "
    "or by what earlier runs used.",
)
"""Measure a step, and request its hardware from a plan: see ``decorators/gpu_profile.py``."""


def current_profile() -> Profile:
    """Return the profile of the running step; outside of a profiled step one that does nothing."""
    exit_if_shadowed(REQUIRED_PACKAGES)
    import decorators

    return decorators.current_profile()


def load_model(run: Any = None, *, device: Literal["auto", "cuda", "cpu"] = "auto") -> tuple[Any, Any]:
    """Load (model, tokenizer) of a run for generation: see ``decorators/finished_models.py``."""
    exit_if_shadowed(REQUIRED_PACKAGES)
    from decorators import finished_models

    return finished_models.load_model(run, device=device)


# Metaflow finds the name after --with among the imported decorator classes, by the last part of their names.
# Once the real class is imported, it is found before this proxy.
with suppress(ImportError, AttributeError):
    from metaflow.user_decorators.user_step_decorator import UserStepDecoratorMeta

    UserStepDecoratorMeta._all_registered_decorators.insert(gpu_profile.__name__, gpu_profile)
