"""The bundled model, loaded once by the loader that serves it, and parameters for it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from configs.parameters import Parameters
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from scripts.lab.families import save_family
from tests.engine.batches import Batches
from tests.engine.forked_ranks import ForkedRank
from tests.engine.toy_denoiser import Requests
from workers.devices import rank_processes
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.sharing.rendezvous import Rendezvous

MakeParameters = Callable[..., Parameters]
SavedFamily = Callable[[str], Path]
TIMEOUT_S = 60
BUNDLED = Path(__file__).parents[2] / "models" / "tiny"


def plan(
    model: Path | str = BUNDLED, defaults: dict[str, Any] | None = None, **options: Any
) -> ReplicaPlan:
    """A plan for one CPU core; `options` are engine arguments."""
    args = EngineArgs(model=str(model), **{"device": "cpu", **options})
    stage = StageConfig(0, RuntimeConfig((0,)), args, default_sampling_params=defaults or {})
    return ReplicaPlan("replica0", 0, stage, (0,))


def count_decodes(pipe: Any) -> list[Any]:
    """Return a list that grows by one item with every call of the autoencoder's decoder."""
    decodes: list[Any] = []
    decode = pipe.vae.decode

    def counted(*args: Any, **options: Any) -> Any:
        decodes.append(None)
        return decode(*args, **options)

    pipe.vae.decode = counted
    return decodes


def patient(rendezvous: Rendezvous) -> Rendezvous:
    """Whoever can meet does, however slow the machine is."""
    rendezvous.queue.max_wait_s = TIMEOUT_S
    rendezvous.queue.wait_share = 1e12
    return rendezvous


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads decide the order of sums, and with it the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def small_references() -> Iterator[None]:
    """Editing models scale the image that they get to a million pixels: here to a 64th of it."""
    calculated = pipeline_qwenimage_edit.calculate_dimensions
    preferred = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda area, ratio: calculated(area // 64, ratio),
        )
        patch.setattr(
            pipeline_flux_kontext,
            "PREFERRED_KONTEXT_RESOLUTIONS",
            [(width // 8, height // 8) for width, height in preferred],
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Ranks import nothing: a process that has done so is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "start_process", ForkedRank)
        yield


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedFamily:
    """Saves the tiny pipeline of a family when it is first asked for; leave the folder as it is."""
    return cache(lambda name: save_family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def pipe() -> Any:
    """The bundled pipeline, the test's own to break."""
    return load_pipeline(plan())


@pytest.fixture
def own_engine(pipe: Any) -> Engine:
    """Serves one request at a time."""
    return Engine(pipe, inspect_abilities(pipe, {}))


@pytest.fixture
def sharing(pipe: Any) -> Engine:
    """An engine of the test's own in which whoever can meet does."""
    engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=8)
    patient(engine.rendezvous)
    return engine


DEFAULTS = {"num_inference_steps": 20, "guidance_scale": 3.0}


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The bundled model, shared by all tests that leave it as it is; one request at a time."""
    return Engine.load(plan(defaults=DEFAULTS))


@pytest.fixture(scope="session")
def busy_engine() -> Engine:
    """The same, serving requests at once."""
    return Engine.load(plan(defaults=DEFAULTS, max_num_seqs=8))


@pytest.fixture
def parameters() -> MakeParameters:
    """Makes parameters: a red circle on blue, 64 x 64, 6 steps, unless said otherwise."""

    def make(**changes: Any) -> Parameters:
        usual = {
            "prompt": "a red circle on a blue background",
            "seed": 1,
            "width": 64,
            "height": 64,
            "num_inference_steps": 6,
            "guidance_scale": 3.0,
        }
        return Parameters(**{**usual, **changes})

    return make


@pytest.fixture(scope="module")
def shared_batches() -> Iterator[Batches]:
    batches = Batches(load_pipeline(plan()))
    yield batches
    batches.pool.shutdown()


@pytest.fixture
def batches(shared_batches: Batches) -> Batches:
    """An engine whose requests start together, which has encoded and decoded nothing yet."""
    shared_batches.encoded.clear()
    shared_batches.decoded.clear()
    return shared_batches


@pytest.fixture
def requests() -> Iterator[Requests]:
    """Requests of a toy denoiser, which is new."""
    requests = Requests()
    yield requests
    requests.close()


@pytest.fixture
def checked(requests: Requests) -> Requests:
    """Has shared a forward before, so that the next group needs no check."""
    for each in requests.meet(1.0, 2.0, texts=[{}, {"first_time": 1.0}]):
        each.result(TIMEOUT_S)
    requests.denoiser.seen.clear()
    return requests
