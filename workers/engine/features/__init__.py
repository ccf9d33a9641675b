"""Features of the engine, each of which can be taken out with its line below.

They hang on the hooks of a run (:class:`workers.engine.run.Feature`), in this order, and know
nothing of each other.
"""

from collections.abc import Callable

from workers.engine.features import (
    adapters,
    clip_skip,
    float32_retry,
    guidance,
    preview,
    prompt_cache,
    prompt_weights,
    step_cache,
)
from workers.engine.run import Feature, Parts

FEATURES: tuple[Callable[[Parts], Feature | None], ...] = (
    float32_retry.Float32Retry.of,
    step_cache.StepCache.of,
    adapters.Adapters.of,
    clip_skip.ClipSkip.of,  # before the cache, which looks in its own memory first
    prompt_weights.PromptWeights.of,
    prompt_cache.PromptCache.of,
    guidance.Guidance.of,
    preview.Preview.of,
)
