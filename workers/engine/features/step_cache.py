"""The caches of diffusers that reuse denoiser outputs from one step to the next.

Their state hangs on the shared denoiser, so one request runs at a time and each begins with it
empty.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, Self

import diffusers

from configs.errors import ModelLoadFailed
from configs.stage_config import PipelineSettings
from workers.devices.chunk import denoisers
from workers.devices.weights import DTYPES
from workers.engine.loading.settings import refusing
from workers.engine.run import Feature, Parts, Run
from workers.engine.schedulers import calls_of
from workers.patches import current_timestep, forget_state

_CONFIGS = {
    "first_block_cache": "FirstBlockCacheConfig",
    "taylorseer_cache": "TaylorSeerCacheConfig",
    "mag_cache": "MagCacheConfig",
    "faster_cache": "FasterCacheConfig",
    "pyramid_attention_broadcast": "PyramidAttentionBroadcastConfig",
}


# These keep one state for the prompt and one for its absence, told apart by the pipeline.
_NEED_CONTEXT = frozenset({"first_block_cache", "taylorseer_cache", "mag_cache"})


_FIX = "leave cache_backend out"


class StepCache(Feature):
    """The cache of one pipeline."""

    stateful = True

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return the cache of the settings; None where they name none."""
        return None if parts.settings.cache_backend is None else cls(parts.pipe, parts.settings)

    def __init__(self, pipe: Any, settings: PipelineSettings) -> None:
        """Put the cache of `settings` on the denoisers of `pipe`.

        Raises:
            ModelLoadFailed: The family has none of this kind, or an option is wrong.
        """
        self._backend = str(settings.cache_backend)
        self._options = dict(settings.cache_config)
        self._denoisers: list[Any] = list(denoisers(pipe).values())
        self._running: Any = None
        self._steps: int | None = None
        self._check(pipe)
        with refusing("cache_backend", self._backend, pipe, _FIX):
            self._enable(None)

    @contextmanager
    def around_call(self, run: Run) -> Iterator[None]:
        """Begin a run with the cache empty, and leave none of its tensors there."""
        self._running = run.pipe
        steps = calls_of(run.pipe.scheduler, run.steps)
        if self._backend == "mag_cache" and steps != self._steps:
            # Its ratios are one for each step.
            for denoiser in self._denoisers:
                denoiser.disable_cache()
            self._enable(steps)
        self._reset()
        try:
            yield
        finally:
            self._reset()
            self._running = None

    def _reset(self) -> None:
        forget_state(self._denoisers)

    def _check(self, pipe: Any) -> None:
        backend = self._backend
        for denoiser in self._denoisers:
            if not hasattr(denoiser, "enable_cache"):
                raise ModelLoadFailed(
                    f"engine_args.cache_backend: {backend} does not go with {type(pipe).__name__}: "
                    f"{type(denoiser).__name__} has no caches; {_FIX}"
                )
        code = inspect.unwrap(type(pipe).__call__).__code__
        if backend in _NEED_CONTEXT and "cache_context" not in code.co_names:
            raise ModelLoadFailed(
                f"engine_args.cache_backend: {backend} does not go with {type(pipe).__name__}, "
                "which does not tell the call with the prompt from the one without; "
                f"{_FIX}, or try pyramid_attention_broadcast"
            )
        known = _options(backend)
        for name in self._options:
            if name not in known:
                raise ModelLoadFailed(
                    f"engine_args.cache_config.{name} is not an option of {backend}; "
                    f"use {', '.join(sorted(known))}"
                )
        if backend == "mag_cache" and not self._options.get("mag_ratios"):
            raise ModelLoadFailed(
                "engine_args.cache_config.mag_ratios is missing: mag_cache needs the ratios of "
                'the model, a list of numbers, or the word "flux"'
            )

    def _enable(self, steps: int | None) -> None:
        self._steps = steps
        kind: Any = getattr(diffusers.hooks, _CONFIGS[self._backend])
        for denoiser in self._denoisers:
            denoiser.enable_cache(kind(**self._arguments(kind, denoiser, steps)))

    def _arguments(self, kind: Any, denoiser: Any, steps: int | None) -> Mapping[str, Any]:
        arguments = {name: _value(value) for name, value in self._options.items()}
        names = {field.name for field in fields(kind)}
        if "is_guidance_distilled" in names:
            # Such a denoiser is called without the half that has no prompt.
            distilled = bool(denoiser.config.get("guidance_embeds"))
            arguments.setdefault("is_guidance_distilled", distilled)
        if "current_timestep_callback" in names:
            arguments["current_timestep_callback"] = self._timestep
        if "num_inference_steps" in names and steps is not None:
            arguments["num_inference_steps"] = steps
        if arguments.get("mag_ratios") == "flux":
            arguments["mag_ratios"] = diffusers.hooks.mag_cache.FLUX_MAG_RATIOS
        return arguments

    def _timestep(self) -> Any:
        return current_timestep(self._running)


def _options(backend: str) -> set[str]:
    """Options that a stage file may set: plain values, no callbacks."""
    kind: Any = getattr(diffusers.hooks, _CONFIGS[backend])
    return {
        field.name
        for field in fields(kind)
        if not field.name.startswith("_")
        and not field.name.endswith("callback")
        and field.name not in {"num_inference_steps", "calibrate"}
        and (field.default is not MISSING or field.default_factory is not MISSING)
    }


def _value(value: Any) -> Any:
    """A value of the YAML as the configurations take it."""
    if isinstance(value, str):
        return DTYPES.get(value, value)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) for x in value):
        return tuple(value)
    return value
