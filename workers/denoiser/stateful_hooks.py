"""Hooks of diffusers that keep state from one denoiser call to the next: caches of steps.

Their state belongs to the run that made it. Calls of another run in between, or merged calls, give
wrong outputs without a word (MagCache, PAB) or fail (first-block cache, TaylorSeer). Knows no runs.
"""

from collections.abc import Iterable
from typing import Any


def has_stateful_hooks(parts: Iterable[Any]) -> bool:
    """Tell whether such a hook is installed on one of the modules now, not counting their parts."""
    hooked = [part for part in parts if "_diffusers_hook" in part.__dict__]
    return any(hook._is_stateful for part in hooked for hook in part._diffusers_hook.hooks.values())


def forget_state(modules: Iterable[Any]) -> None:
    """Empty the hooks of the modules; a pipeline does so itself, but not when it is stopped."""
    for module in modules:
        for part in module.modules():
            registry = part.__dict__.get("_diffusers_hook")
            if registry is not None:
                registry.reset_stateful_hooks(recurse=False)
