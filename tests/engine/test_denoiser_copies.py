"""Copies of a denoiser that share the rows of its calls make what one makes."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from configs.errors import ModelLoadFailed
from configs.parameters import Parameters
from configs.stage_config import EngineArgs, ParallelConfig, ReplicaPlan, RuntimeConfig, StageConfig
from tests.engine.conftest import BUNDLED, MakeParameters, patient
from tests.engine.recorder import Recorder
from tests.engine.test_sharing import PROMPTS, Starter, difference
from tests.engine.tiny_families import FAMILIES, save_family
from tests.engine.toy_denoiser import ToyDenoiser
from workers.devices.chunk import DeviceChunk
from workers.devices.copies import (
    DeviceThread,
    each_copy,
    open_device_threads,
    split_calls,
    split_rows,
    spread_rows,
)
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline


def plan_of_two(model: Path = BUNDLED, **parallel: Any) -> ReplicaPlan:
    """A plan for two CPU cores."""
    config = ParallelConfig(world_size=2, **parallel)
    args = EngineArgs(model=str(model), device="cpu", parallel_config=config, max_num_seqs=8)
    stage = StageConfig(0, RuntimeConfig((0, 1)), args)
    return ReplicaPlan("replica0", 0, stage, (0, 1))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A plan of two cores sets two torch threads for what is not the denoiser."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def device_threads() -> Iterator[list[DeviceThread]]:
    opened = open_device_threads("cpu", 2)
    yield opened
    for device_thread in opened:
        device_thread.close()


class Watched(ToyDenoiser):
    """Writes down the thread of each call too; `wrong` rows come out differently in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.wrong = False

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        new_condition: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
    ) -> tuple[Any]:
        self.threads.append(threading.current_thread().name)
        out = super().forward(sample, timestep)[0] * self.weight
        return (out + self.wrong * len(sample),)


@pytest.fixture
def denoiser(device_threads: list[DeviceThread]) -> Watched:
    made = Watched()
    spread_rows(made, device_threads)
    for each in each_copy(made):
        assert isinstance(each, Watched)
        each.seen, each.threads = [], []
    return made


@pytest.mark.parametrize(
    ("rows", "parts", "counts"),
    [(1, 2, [1]), (2, 2, [1, 1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1])],
)
def test_rows_are_split_evenly_and_no_part_is_empty(rows: int, parts: int, counts: list[int]):
    split = split_rows(rows, parts)
    assert sorted(map(len, split)) == sorted(counts)
    assert [row for part in split for row in part] == list(range(rows))


def test_a_device_thread_is_one_core_one_thread_and_the_callers_inference_mode(
    device_threads: list[DeviceThread],
):
    with torch.inference_mode():
        assert device_threads[0].submit(torch.is_inference_mode_enabled).result()
    assert not device_threads[0].submit(torch.is_inference_mode_enabled).result()
    assert [
        device_thread.submit(torch.get_num_threads).result() for device_thread in device_threads
    ] == [1, 1]
    if len(os.sched_getaffinity(0)) > 1:
        first, second = (
            device_thread.submit(os.sched_getaffinity, 0).result()
            for device_thread in device_threads
        )
        assert len(first) == len(second) == 1
        assert first != second


def test_device_threads_leave_the_threads_of_everything_else_as_they_are():
    torch.set_num_threads(2)
    for device_thread in open_device_threads("cpu", 2):
        device_thread.close()
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_each_copy_runs_its_rows_on_its_device_thread(denoiser: Watched):
    sample = torch.arange(10.0).reshape(5, 2)
    for _ in range(2):
        assert torch.equal(denoiser(sample, torch.tensor(1.0))[0], 2 * sample + 1)
    first, second = each_copy(denoiser)
    assert first is denoiser
    assert second.seen == [2, 2]
    assert denoiser.seen == [3, 5, 3]  # the first call checks itself uncut
    assert len({*first.threads, *second.threads}) == 3
    assert second.weight.data_ptr() == denoiser.weight.data_ptr()


def test_where_only_one_can_run_the_parts_each_call_runs_once():
    made = ToyDenoiser()
    split_calls(made, 1, made.forward, lambda *_: pytest.fail("there are no parts"))
    made(torch.ones(3, 2), torch.tensor(1.0))
    assert made.seen == [3]


def test_one_row_runs_on_the_first_alone(denoiser: Watched):
    denoiser(torch.ones(1, 2), torch.tensor(1.0))
    assert (denoiser.seen, each_copy(denoiser)[1].seen) == ([1], [])


def test_what_no_rule_can_cut_runs_whole(denoiser: Watched):
    made = denoiser(torch.ones(2, 2), torch.tensor(1.0), new_condition=torch.ones(2))
    assert made[0].tolist() == [[3.0, 3.0]] * 2
    assert (denoiser.seen, each_copy(denoiser)[1].seen) == ([2], [])


def test_a_denoiser_whose_rows_depend_on_each_other_is_never_cut(
    denoiser: Watched, caplog: pytest.LogCaptureFixture
):
    for each in each_copy(denoiser):
        each.wrong = True
    sample = torch.ones(2, 2)
    for _ in range(3):
        assert denoiser(sample, torch.tensor(1.0))[0].tolist() == [[5.0, 5.0]] * 2
    assert denoiser.seen == [1, 2, 2, 2]
    assert caplog.text.count("not cut over devices") == 1


def test_the_error_of_a_part_is_that_of_the_call_and_the_next_call_is_right(denoiser: Watched):
    def poisoned(sample: torch.Tensor):
        if (sample > 100).any():
            raise ValueError("poisoned")

    each_copy(denoiser)[1].before = poisoned
    with pytest.raises(ValueError, match="poisoned"):
        denoiser(torch.tensor([[1.0], [200.0]]), torch.tensor(1.0))
    assert denoiser(torch.ones(2, 1), torch.tensor(1.0))[0].tolist() == [[3.0], [3.0]]


class Tracked(torch.Tensor):
    """Writes down when it goes to another device."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            cls.seen.append("moved")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_all_inputs_are_moved_before_any_part_begins(device_threads: list[DeviceThread]):
    elsewhere = DeviceThread(torch.device("meta"))
    made = ToyDenoiser()
    spread_rows(made, [device_threads[0], elsewhere, elsewhere])

    def begin(_: torch.Tensor) -> None:
        Tracked.seen.append("began")
        raise ValueError("far enough")  # nothing comes back from meta

    for each in each_copy(made):
        each.before = begin
    with pytest.raises(ValueError, match="far enough"):
        made(torch.ones(3, 2).as_subclass(Tracked), torch.tensor(1.0))
    elsewhere.close()
    assert Tracked.seen == ["moved"] * 2 + ["began"] * 3


def test_a_denoiser_with_a_hook_inside_is_refused(device_threads: list[DeviceThread]):
    made = torch.nn.Sequential(torch.nn.Linear(2, 2))
    made[0].forward = made[0].forward
    with pytest.raises(ValueError, match=r"Sequential\.0: its forward is replaced by a hook"):
        spread_rows(made, device_threads)


def denoiser_of(pipe: Any) -> Any:
    return getattr(pipe, "unet", None) or pipe.transformer


def latents(pipe: Any, outputs: int = 1, size: int = 32) -> torch.Tensor:
    with torch.inference_mode():
        made: torch.Tensor = pipe(
            PROMPTS[0],
            height=size,
            width=size,
            num_inference_steps=2,
            num_images_per_prompt=outputs,
            generator=[torch.Generator().manual_seed(seed) for seed in range(outputs)],
            output_type="latent",
            **({"use_resolution_binning": False} if "PixArt" in type(pipe).__name__ else {}),
        ).images
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_families_make_on_two_copies_what_they_make_on_one(
    name: str, device_threads: list[DeviceThread]
):
    torch.manual_seed(0)
    pipe = FAMILIES[name]()
    pipe.set_progress_bar_config(disable=True)
    alone = latents(pipe, 3)
    denoiser = denoiser_of(pipe)
    spread_rows(denoiser, device_threads)
    calls: list[None] = []
    each_copy(denoiser)[1].register_forward_pre_hook(lambda *_: calls.append(None))
    made = latents(pipe, 3)
    assert len(calls) >= 2
    assert (made - alone).abs().max() <= 1e-4 * alone.abs().max()
    assert (alone[0] - alone[1]).abs().max() > 1e-2 * alone.abs().max()


def adapter_weights(name: str) -> dict[str, torch.Tensor]:
    """LoRA weights as files have them, which change the outputs clearly."""
    torch.manual_seed(1)
    pipe = FAMILIES[name]()
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    denoiser = denoiser_of(pipe)
    denoiser.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    weights = get_peft_model_state_dict(denoiser)
    return {f"{part}.{key}": value.clone() for key, value in weights.items()}


@pytest.mark.parametrize("name", ["stable_diffusion", "flux"])
def test_adapters_that_a_pipeline_loads_reach_the_copies(
    name: str, device_threads: list[DeviceThread]
):
    torch.manual_seed(0)
    pipe = FAMILIES[name]()
    pipe.set_progress_bar_config(disable=True)
    denoiser = denoiser_of(pipe)
    plain = latents(pipe, 2)
    spread_rows(denoiser, device_threads)
    latents(pipe, 2)  # checks that it may be cut
    pipe.load_lora_weights(adapter_weights(name), adapter_name="strong")
    pipe.set_adapters(["strong"], [2.0])
    assert not any(part.training for part in each_copy(denoiser)[1].modules())
    cut = latents(pipe, 2)
    assert (cut - plain).abs().max() > 1e-3 * plain.abs().max()
    whole = [latents_of_seed(pipe, denoiser, seed) for seed in range(2)]
    for row, expected in zip(cut, whole, strict=True):
        assert (row - expected).abs().max() <= 1e-4 * expected.abs().max()
    pipe.delete_adapters("strong")
    assert (latents(pipe, 2) - plain).abs().max() <= 1e-4 * plain.abs().max()


def latents_of_seed(pipe: Any, denoiser: Any, seed: int) -> torch.Tensor:
    """What the pipeline makes of that seed when no call is cut."""
    cut = denoiser.__dict__.pop("forward")
    try:
        with torch.inference_mode():
            made: torch.Tensor = pipe(
                PROMPTS[0],
                height=32,
                width=32,
                num_inference_steps=2,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
            ).images
        return made[0]
    finally:
        denoiser.forward = cut


def test_a_replica_of_two_cores_makes_the_pictures_of_one(
    engine: Engine, parameters: MakeParameters
):
    asked = [
        parameters(prompt=prompt, seed=seed, num_inference_steps=3)
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone = [engine.generate(each, Recorder()) for each in asked]
    of_two = Engine.load(plan_of_two())
    patient(of_two.rendezvous)
    made = [of_two.generate(each, Recorder()) for each in asked]
    again = [of_two.generate(each, Recorder()) for each in asked]
    assert max(map(difference, made, alone)) <= 1
    assert max(map(difference, made, again)) == 0
    start = threading.Barrier(4)

    def run(each: Parameters):
        return of_two.generate(each, Starter(start))

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, asked))
    assert max(map(difference, together, alone)) <= 1
    assert max(of_two.rendezvous.histogram) > 1


def test_spreading_parts_over_cores_is_refused():
    with pytest.raises(ModelLoadFailed, match="balanced spreads parts over CUDA devices"):
        load_pipeline(plan_of_two(device_map="balanced"))


def test_a_model_that_copies_do_not_go_with_is_refused_at_load(tmp_path: Path):
    plan = plan_of_two(save_family("stable_diffusion", tmp_path))
    pipe = load_pipeline(plan)
    pipe.unet.conv_in.forward = pipe.unet.conv_in.forward
    with pytest.raises(ModelLoadFailed, match=r"unet|UNet2DConditionModel\.conv_in"):
        DeviceChunk.open(pipe, plan)
