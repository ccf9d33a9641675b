"""A `Progress` that writes down where a run is, and may stop or steer it."""

from collections.abc import Mapping

from PIL import Image

from workers.engine.progress import Interrupted


class Recorder:
    """Keeps every `(step, steps)`; raises at call number `stop_at`; asks for a guidance scale."""

    def __init__(
        self, stop_at: int | None = None, guidance: float | None = None, *, preview: bool = False
    ) -> None:
        self.previews: list[tuple[int, Image.Image]] = []
        self._preview = preview
        self.calls: list[tuple[int, int]] = []
        self._stop_at = stop_at
        self._guidance = guidance

    def on_step(self, step: int, steps: int) -> None:
        self.calls.append((step, steps))
        if len(self.calls) - 1 == self._stop_at:
            raise Interrupted("canceled")

    def wants_preview(self) -> bool:
        return self._preview

    def on_preview(self, step: int, picture: Image.Image) -> None:
        self.previews.append((step, picture))

    def guidance(self) -> Mapping[str, float | None]:
        return {} if self._guidance is None else {"guidance_scale": self._guidance}


class Steerer(Recorder):
    """Asks for other scales once so many steps are done."""

    def __init__(self, at: int, **wanted: float | None) -> None:
        super().__init__()
        self._at, self._wanted = at, wanted

    def guidance(self) -> Mapping[str, float | None]:
        return self._wanted if self.calls[-1][0] >= self._at else {}
