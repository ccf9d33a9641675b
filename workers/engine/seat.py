"""One request inside the engine: what it asks for, who watches it, and what became of it.

Knows no pipelines and no threads but that which waits for its end.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping

from PIL import Image

from routing.parameters import Parameters
from workers.engine.generation import Generation
from workers.engine.inputs import Inputs
from workers.engine.observer import Observer


class Seat:
    """A request, alone or among others that started with it.

    Attributes:
        company: Requests of equal ones may start as one pipeline call; None starts by itself.
        outputs: How many it makes.
        by_itself: Whether it is over for those it started with, and begins anew without them.
        steer_from: Step before which changes of its guidance do not count, since it has run that
            far without them.
        warnings: Sentences for the client.
        arrived: When, on the clock of `time.perf_counter`.
    """

    def __init__(self, parameters: Parameters, observer: Observer, inputs: Inputs) -> None:
        """Take the request as it came."""
        self.parameters = parameters
        self.inputs = inputs
        self.company: Hashable = None
        self.outputs = parameters.num_outputs_per_prompt
        self.by_itself = False
        self.steer_from = 0
        self.warnings: list[str] = []
        self.arrived = time.perf_counter()
        self._observer = observer
        self._told = 0
        self._turn_to_tell = threading.Lock()
        self._ended = threading.Event()
        self._generation: Generation | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over, in whatever way, or has to begin anew by itself."""
        return self._ended.is_set()

    def tell(self, step: int, steps: int) -> None:
        """Tell the observer; raises what it raises. Never less than was told before."""
        with self._turn_to_tell:
            self._told = max(self._told, step)
            self._observer.on_step(self._told, max(steps, self._told))

    def show(self, step: int, picture: Callable[[], Image.Image | None]) -> None:
        """Show the observer how it looks after `step`, if it wants to see that."""
        if self.ended or not self._observer.wants_preview():
            return
        shown = picture()
        if shown is not None:
            self._observer.on_preview(step, shown)

    def wanted_guidance(self, step: int) -> Mapping[str, float | None]:
        """Return the scales that were changed, by name, if they count from `step` on."""
        return self._observer.guidance() if step >= self.steer_from else {}

    def end(self, generation: Generation | None = None, error: BaseException | None = None) -> None:
        """End it; the first end counts."""
        with self._turn_to_tell:
            if not self.ended:
                self._generation, self._error = generation, error
                self._ended.set()

    def run_by_itself(self) -> None:
        """Send it away from the others, to begin anew."""
        with self._turn_to_tell:
            if not self.ended:
                self.by_itself = True
                self._ended.set()

    def anew(self) -> "Seat":
        """Return a seat for the same request that starts by itself and goes on telling."""
        seat = Seat(self.parameters, self._observer, self.inputs)
        seat.steer_from = self.steer_from
        seat.arrived, seat._told = self.arrived, self._told
        return seat

    def result(self) -> Generation | None:
        """Wait for the end; None where it has to begin anew by itself.

        Raises:
            BaseException: What it ended with.
        """
        self._ended.wait()
        if self.by_itself:
            return None
        error, self._error = self._error, None
        if error is None:
            return self._generation
        try:
            raise error
        finally:
            del error  # which its traceback would keep, with the tensors of the run
