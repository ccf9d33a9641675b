"""How often Python waits for the device: counted on a CPU, where each wait is a call that ends it.

On a GPU a wait costs the time in which the device is given nothing.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.conftest import MakeParameters, plan
from tests.engine.recorder import Recorder
from tests.engine.toy_denoiser import TIMEOUT_S, Requests
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs, call_arguments
from workers.engine.engine import Engine
from workers.engine.features.preview import Preview
from workers.engine.loader import load_pipeline
from workers.engine.steps import Pace
from workers.sharing import shared_forward
from workers.sharing.call import BatchStats, Call
from workers.sharing.cost import ForwardCost
from workers.sharing.rendezvous import Rendezvous
from workers.sharing.shared_forward import run_group

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}
MOVES = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class Waits(TorchDispatchMode):
    """Counts what would wait for a device, in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._moves = _Moves(self.counts)

    def __enter__(self) -> Any:
        self._moves.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._moves.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.counts.total()


class _Moves(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MOVES:
            self._counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(make: Any, parameters: MakeParameters, steps: int) -> Counter[str]:
    with Waits() as waits:
        make(parameters(num_inference_steps=steps))
    counts: Counter[str] = waits.counts
    return counts


def test_a_step_of_a_run_waits_no_more_than_the_pipeline_does(
    own_engine: Engine, pipe: Any, parameters: MakeParameters
):
    def bare(asked: Any) -> None:
        with torch.inference_mode():
            pipe(**call_arguments(asked, type(pipe), Inputs()))

    def ours(asked: Any) -> None:
        own_engine.generate(asked, Recorder())

    ours(parameters())
    counts = {
        (make.__name__, steps): count(make, parameters, steps)
        for make in (bare, ours)
        for steps in (4, 9)
    }
    for_five_steps = [counts[name, 9] - counts[name, 4] for name in ("bare", "ours")]
    assert for_five_steps[0] == for_five_steps[1]
    # Whether the last latents are finite, and whether the picture is: a truth value, which is read.
    more = counts["ours", 9] - counts["bare", 9]
    assert more == {"is_nonzero": 2, "_local_scalar_dense": 2}


def test_python_is_one_step_ahead_of_the_device_and_no_more():
    waited = []

    class Step:
        def __init__(self, index: int) -> None:
            self.index = index

        def synchronize(self) -> None:
            waited.append(self.index)

    pace = Pace()
    for index in range(4):
        pace.keep(Step(index))
        assert waited == list(range(index))


class Positioned(torch.nn.Module):
    """Adds to each row its time, and the positions that all have in common."""

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, img_ids: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (sample + timestep.reshape(-1, 1) + img_ids.sum(),)


def calls(module: Any, times: tuple[float, float], ids: list[torch.Tensor]) -> list[Call]:
    """One call each of two requests."""
    made = []
    rendezvous = Rendezvous([])
    for value, (time, positions) in enumerate(zip(times, ids, strict=True)):
        with rendezvous.member() as member:
            sample = torch.full((1, 3), float(value))
            arguments = {"sample": sample, "timestep": torch.tensor(time), "img_ids": positions}
            made.append(Call(module, (), arguments, member, 0.0))
        made[-1].describe(("sample", "timestep", "img_ids"))
        assert made[-1].layout is not None
    return made


def test_shared_forwards_read_once_and_compare_the_same_positions_once():
    stats, ids = BatchStats(), [torch.ones(4, 3), torch.ones(4, 3)]
    for times in ((1.0, 1.0), (1.0, 2.0)):  # checked, and once more where the times differ
        run_group(calls(Positioned(), times, ids), stats)
    assert stats.right
    stats.shown[False].discard(("timestep", 0))
    for times in ((3.0, 3.0), (4.0, 4.0)):
        group = calls(Positioned(), times, ids)
        with Waits() as waits:
            run_group(group, stats)
        assert waits.counts == {"tolist": 1}
        assert group[1].output[0][0, 0].item() == 1 + times[1] + 12
    stats.shown[False].add(("timestep", 0))
    with Waits() as waits:
        run_group(calls(Positioned(), (5.0, 6.0), ids), stats)
    assert waits.total == 0


class Slow:
    """The cost of a forward that the device has not done before it is told to."""

    def __init__(self) -> None:
        self.known = False
        self.waited = 0

    @property
    def seconds(self) -> float:
        assert self.known
        return 2.0

    def wait(self) -> None:
        self.waited += 1


def test_the_cost_of_a_forward_is_read_once_the_device_has_done_it():
    stats, first, second = BatchStats(), Slow(), Slow()
    stats.expect([2], first)
    assert stats.step_s(2) is None
    first.known = True
    stats.expect([2], second)
    assert stats.step_s(2) == 2.0
    assert (first.waited, second.waited) == (0, 0)
    stats.wait()
    assert second.waited == 1


def test_a_lone_request_waits_for_no_forward_and_several_wait_for_each(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
):
    waited: list[ForwardCost] = []

    class NotYet(ForwardCost):
        """That of a forward which the device still works at."""

        known = False

        def wait(self) -> None:
            waited.append(self)

    monkeypatch.setattr(shared_forward, "ForwardCost", NotYet)
    requests.start(calls=4).result(TIMEOUT_S)
    assert not waited
    for each in requests.meet(1.0, 2.0):
        each.result(TIMEOUT_S)
    assert waited


def test_the_memory_of_a_size_is_looked_at_once_in_a_while():
    stats = BatchStats()
    assert stats.wants_memory(2)
    stats.note_memory(2, 100, 1000)
    assert not stats.wants_memory(2)
    assert stats.wants_memory(4)
    for _ in range(200):
        stats.note([2], 1.0)
    assert stats.wants_memory(2)


@pytest.mark.parametrize("shape", [(3, 4, 9, 8, 8), (3, 4, 8, 8), (3, 64, 4)])
def test_a_preview_moves_the_frame_that_it_shows_and_no_other(shape: tuple[int, ...]):
    from PIL import Image

    preview = Preview(8)
    preview.learn(torch.randn(shape), Image.new("RGB", (64, 64), "red"))
    moved = []

    class Sizes(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.to and "cpu" in args:
                moved.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Sizes():
        assert preview.render(torch.randn(shape), 64, 64) is not None
    assert moved == [4 * 64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_waits_for_the_gpu_no_more_than_the_pipeline_does(parameters: MakeParameters):
    """Torch itself warns of each call that waits for the device."""
    import warnings

    pipe = load_pipeline(plan(device="cuda"))
    engine = Engine(pipe, inspect_abilities(pipe, {}))

    def bare(asked: Any) -> None:
        with torch.inference_mode():
            pipe(**call_arguments(asked, type(pipe), Inputs()))

    def ours(asked: Any) -> None:
        engine.generate(asked, Recorder())

    ours(parameters())
    found = {}
    for make in (bare, ours):
        for steps in (4, 9):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    make(parameters(num_inference_steps=steps))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found[make.__name__, steps] = sum("synchroniz" in str(each.message) for each in seen)
    assert found["ours", 9] - found["ours", 4] <= found["bare", 9] - found["bare", 4]
