"""``gpu_profile`` for ``from metaflow import gpu_profile`` and ``--with gpu_profile``, imported when used.

Metaflow loads this with each ``import metaflow``, in whatever folder. So nothing of ours is imported here,
and a stranger's package of the same name breaks nothing until a flow uses one of these names.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from metaflow_extensions.finetune.own_packages import end_where_foreign

if TYPE_CHECKING:
    from decorators import Profile

NEEDED = ("decorators", "estimator", "launchers")


class LazyDecorator:
    """Stands for a step decorator of ours in flows and, by its name, behind ``--with``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Decorate a step, bare or with the decorator's own arguments."""
        return self._load()(*arguments, **options)

    def parse_decorator_spec(self, text: str) -> Any:
        """The decorator with what stands behind its name and a colon in ``--with``. Called by Metaflow."""
        return self._load().parse_decorator_spec(text)

    def _load(self) -> Any:
        end_where_foreign(NEEDED)
        import decorators

        return getattr(decorators, self.__name__)


gpu_profile = LazyDecorator("gpu_profile")
"""Measure a step, and with ``plan=`` ask for its hardware by a plan: see ``decorators/gpu_profile.py``."""


def current_profile() -> Profile:
    """The profile of the step that is running; one that ignores everything outside of a profiled step."""
    end_where_foreign(NEEDED)
    import decorators

    return decorators.current_profile()


def load_model(run: Any = None, *, device: Literal["auto", "cuda", "cpu"] = "auto") -> tuple[Any, Any]:
    """Load (model, tokenizer) of a run, ready to generate: see ``decorators/finished_models.py``."""
    end_where_foreign(NEEDED)
    from decorators import finished_models

    return finished_models.load_model(run, device=device)


# Metaflow looks for what stands behind --with among the classes of decorators that have been imported, by the
# last part of their names. The decorator's own class comes before this once it is there.
with suppress(ImportError, AttributeError):
    from metaflow.user_decorators.user_step_decorator import UserStepDecoratorMeta

    UserStepDecoratorMeta._all_registered_decorators.insert(gpu_profile.__name__, gpu_profile)
