"""What a run tells while it works, and how it is stopped; importing this does not import torch."""

from collections.abc import Mapping
from typing import Protocol

from PIL import Image


class Interrupted(BaseException):
    """Ends a run at a step boundary; raised by a `Progress`, caught by name in the task alone.

    A BaseException, because pipelines contain `except Exception` blocks that would swallow it.

    Attributes:
        reason: The word of the `Progress` for it, such as `canceled`, `timeout` or `hand_back`;
            the engine does not read it.
    """

    def __init__(self, reason: str) -> None:
        """End the run for `reason`."""
        super().__init__(reason)
        self.reason = reason


class Progress(Protocol):
    """Sees one run; called from the thread that runs it, one call at a time."""

    def on_step(self, step: int, steps: int) -> None:
        """Learn that `step` of `steps` denoising steps are done; return quickly.

        On a GPU the last of them may still be under way, since Python is one step ahead of it.
        Called with step 0 before the text is encoded and again before the first step, and then
        after each step; after the last one that is before decoding. A run that waits for its turn
        to encode or decode repeats its step every tenth of a second. `step` never falls,
        unless a run whose numbers do not fit the model's dtype begins anew in float32. `steps`
        counts the calls of the noise scheduler: before the text is encoded it is the number that
        was asked for, from the first step on the real one, which second-order schedulers make
        nearly twice as large.

        Raises:
            Interrupted: To end the run here; nothing is decoded.
        """

    def guidance(self) -> Mapping[str, float | None]:
        """Return the scales that were changed and count from the next step on; asked between steps.

        By the names of the parameters: `guidance_scale`, `true_cfg_scale`. None is the pipeline's
        own. What is not named stays as it was asked for.
        """

    def wants_preview(self) -> bool:
        """Return whether a picture of how it looks now is wanted; asked after each step."""

    def on_preview(self, step: int, picture: Image.Image) -> None:
        """Learn how it looks after `step`: a small RGB picture."""


class SilentProgress:
    """Lets a run go through; used to warm up."""

    def on_step(self, step: int, steps: int) -> None:
        """Do nothing."""

    def guidance(self) -> Mapping[str, float | None]:
        """Keep the guidance."""
        return {}

    def wants_preview(self) -> bool:
        """Want none."""
        return False

    def on_preview(self, step: int, picture: Image.Image) -> None:
        """Do nothing."""
