"""The noise scheduler of a stage: its class, its options, its sigmas, and what is known of it."""

import logging
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from configs.errors import ModelLoadFailed
from configs.known_models import Figure
from configs.parameters import TEXT_TO_IMAGE, Lora
from configs.scheduler_fields import SchedulerSettings
from configs.stage_config import EngineArgs, PipelineSettings
from scripts.lab.families import save_family
from scripts.lab.family_trial import pixels, small_request
from tests.engine.batch_requests import one_output_each, several_outputs
from tests.engine.batches import Batches, difference
from tests.engine.conftest import BUNDLED, MakeParameters, plan
from tests.engine.lora_files import save_lora
from tests.engine.recorder import Recorder
from workers.engine.engine import Engine
from workers.engine.known_settings import Defaults
from workers.engine.loader import load_pipeline
from workers.engine.loading.scheduler import set_scheduler
from workers.engine.schedulers import DISTILLED, made_scheduler, step_arguments

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
PAGE = "https://huggingface.co/org/model"
SAVED: dict[str, Any] = {
    "noise": diffusers.DDIMScheduler(),
    "v": diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"),
    "sample": diffusers.DDIMScheduler(prediction_type="sample"),
    "flow": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "by size": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    "wan": diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0),
}


class Model:
    """What of a pipeline has a scheduler."""

    def __init__(self, own: Any) -> None:
        self.scheduler = own


def chosen(saved: str, known: Any = None, **written: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The scheduler of a stage that says this, and what is published of it."""
    model = Model(made_scheduler(SAVED[saved], type(SAVED[saved]).__name__))
    name, sigmas = written.pop("class_name", None), tuple(written.pop("sigmas", ()))
    said = SchedulerSettings(name, written, sigmas) if name or written or sigmas else None
    found = set_scheduler(model, EngineArgs("org/model", scheduler=said), known)
    return model.scheduler, {name: dict(each) for name, each in found.settings.items()}


def test_what_a_stage_leaves_alone_is_the_models_own():
    scheduler, settings = chosen("flow")
    assert scheduler.config == SAVED["flow"].config
    assert not settings


def test_options_are_laid_over_what_is_saved():
    scheduler, settings = chosen(
        "noise", class_name="EulerDiscreteScheduler", timestep_spacing="trailing"
    )
    assert type(scheduler) is diffusers.EulerDiscreteScheduler
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 749, 499, 249]  # those of SDXL-Lightning
    assert scheduler.config.beta_end == SAVED["noise"].config.beta_end
    assert settings == {
        "class": {"value": "EulerDiscreteScheduler", "saved": "DDIMScheduler", "source": "stage"},
        "timestep_spacing": {"value": "trailing", "saved": "leading", "source": "stage"},
    }


@pytest.mark.parametrize("name", ["shift", "flow_shift"])
@pytest.mark.parametrize(
    ("saved", "class_name", "written"),
    [
        ("flow", None, "shift"),
        ("wan", None, "flow_shift"),
        ("wan", "DPMSolverMultistepScheduler", "flow_shift"),
        ("wan", "FlowMatchEulerDiscreteScheduler", "shift"),
        ("wan", "FlowMatchLCMScheduler", "shift"),
    ],
)
def test_both_names_of_the_shift_are_one(
    saved: str, class_name: str | None, written: str, name: str
):
    scheduler, settings = chosen(saved, class_name=class_name, **{name: 8.0})
    assert settings[written] == {"value": 8.0, "saved": 3.0, "source": "stage"}
    scheduler.set_timesteps(10)
    expected = 8 * 0.5 / (1 + 7 * 0.5)  # of the middle of an even schedule
    assert abs(scheduler.sigmas - expected).min() < 0.05
    assert scheduler.sigmas[-1] == 0


def test_a_class_without_a_shift_of_its_own_keeps_the_models():
    scheduler, _ = chosen("wan", class_name="FlowMatchEulerDiscreteScheduler")
    assert scheduler.config.shift == 3.0


@pytest.mark.parametrize(
    ("saved", "written", "said"),
    [
        ("noise", {"class_name": "LMCScheduler"}, "did you mean LCMScheduler? use DDIMScheduler, "),
        ("noise", {"class_name": "FlowMatchEulerDiscreteScheduler"}, "predicts epsilon"),
        ("v", {"class_name": "UniPCScheduler"}, "did you mean UniPCMultistepScheduler?"),
        ("sample", {"class_name": "KDPM2DiscreteScheduler"}, "not implemented yet: sample"),
        ("flow", {"class_name": "LCMScheduler"}, "predicts a flow"),
        ("flow", {"class_name": "DDIMScheduler"}, "use FlowMatchEulerDiscreteScheduler or"),
        ("noise", {"timestep_spaces": "trailing"}, "did you mean timestep_spacing? use sigmas, "),
        ("noise", {"flow_shift": 3.0}, "flow_shift: DDIMScheduler has no such option"),
        ("by size", {"shift": 3.0}, "no effect with this scheduler; leave it out, or add use_dyn"),
        ("v", {"class_name": "UniPCMultistepScheduler", "shift": 3.0}, "add use_flow_sigmas: true"),
        (
            "flow",
            {"class_name": "UniPCMultistepScheduler"},
            "set default_sampling_params.scheduler",
        ),
        ("flow", {"eta": 0.5}, "eta: FlowMatchEulerDiscreteScheduler has no such option"),
        ("noise", {"sigmas": [2.0, 1.0]}, "scheduler.sigmas: DDIMScheduler refuses it"),
        ("flow", {"shift_terminal": "x", "sigmas": [1.0, 0.5]}, "engine_args.scheduler"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(saved: str, written: Any, said: str):
    with pytest.raises(ModelLoadFailed, match=r"org/model: engine_args\.scheduler") as refused:
        chosen(saved, **written)
    assert said in str(refused.value)


def test_the_known_shift_lies_under_the_stages_and_a_difference_is_said(
    caplog: pytest.LogCaptureFixture,
):
    known = Figure("flow_shift", 8.0, PAGE)
    scheduler, settings = chosen("wan", known)
    assert scheduler.config.flow_shift == 8.0
    assert settings == {"flow_shift": {"value": 8.0, "saved": 3.0, "source": PAGE}}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for word in ("org/model", "flow_shift 8.0", PAGE, "saved with the model is 3.0"):
        assert word in record.getMessage()
    assert chosen("wan", known, flow_shift=5.0)[0].config.flow_shift == 5.0
    assert chosen("flow", known)[1]["shift"]["value"] == 8.0
    # Where the shift goes by the size, or there is none, nothing is laid over it.
    assert not chosen("by size", known)[1]
    assert not chosen("noise", known)[1]


def test_a_known_shift_that_is_the_models_own_changes_nothing(caplog: pytest.LogCaptureFixture):
    _, settings = chosen("flow", Figure("shift", 3.0, PAGE))
    assert settings == {"shift": {"value": 3.0, "saved": 3.0, "source": PAGE}}
    assert not caplog.records  # no warning


@pytest.mark.parametrize(
    ("saved", "class_name", "sigmas"),
    [
        ("flow", None, [1.0, 0.75, 0.5, 0.25]),
        ("by size", None, [1.0, 0.75, 0.5, 0.25]),
        ("wan", None, [0.9, 0.6, 0.3]),
        ("v", None, [14.6, 3.0, 0.5]),
    ],
)
def test_the_sigmas_of_a_stage_stand_for_those_of_the_pipeline(
    saved: str, class_name: str | None, sigmas: list[float]
):
    scheduler, settings = chosen(saved, class_name=class_name, sigmas=sigmas)
    assert settings["sigmas"]["value"] == sigmas
    steps, own = len(sigmas), SAVED[saved]
    mu = {"mu": 0.5} if saved == "by size" else {}
    copied = made_scheduler(scheduler, type(scheduler).__name__)
    for given in ({"num_inference_steps": steps}, {"sigmas": np.linspace(1, 1 / steps, steps)}):
        copied.set_timesteps(**given, **mu)
        assert len(copied.timesteps) == steps
        expected = made_scheduler(own, type(own).__name__)
        expected.set_timesteps(sigmas=np.array([*sigmas, *([0.0] if saved == "v" else [])]), **mu)
        assert torch.equal(copied.sigmas, expected.sigmas)
    copied.set_timesteps(steps + 3, **mu)  # other runs go by the scheduler's own
    expected.set_timesteps(steps + 3, **mu)
    assert torch.equal(copied.sigmas, expected.sigmas)


def test_the_steps_of_a_model_are_as_many_as_its_sigmas():
    model = Model(SAVED["flow"])
    args = EngineArgs("org/model", scheduler=SchedulerSettings(sigmas=(1.0, 0.5)))
    found = set_scheduler(model, args, None)
    known = Defaults({"num_inference_steps": 28}, {"num_inference_steps": PAGE})
    assert found.with_steps(known, {}).values == {"num_inference_steps": 2}
    with pytest.raises(ModelLoadFailed, match=r"4 is not the number of engine_args\.sched"):
        found.with_steps(known, {"num_inference_steps": 4})


class TakesNone(Model):
    def __call__(self) -> None:
        """Its signature is all that is asked."""


class TakesEta(Model):
    def __call__(self, eta: float = 0.0) -> None:
        """Its signature is all that is asked."""


@pytest.mark.parametrize("saved", ["v", "noise"])
def test_a_class_that_clips_by_default_does_so_only_where_the_models_own_did(saved: str):
    made, _ = chosen(saved, class_name="DDPMScheduler")
    assert made.config.clip_sample is (saved == "noise")
    corrected = diffusers.DDIMScheduler()
    corrected.register_to_config(clip_sample=False)  # as the constructor of a pipeline does
    model = Model(corrected)
    said = SchedulerSettings(None, {"timestep_spacing": "trailing"}, ())
    set_scheduler(model, EngineArgs("org/model", scheduler=said), None)
    assert model.scheduler.config.clip_sample is False


def test_eta_is_the_stages_then_the_schedulers_then_that_of_the_pipeline():
    def given(kind: type[Model] = TakesEta, **written: Any) -> dict[str, Any]:
        return step_arguments(kind(chosen("noise", **written)[0]))

    assert given() == {}
    assert given(eta=0.5) == {"eta": 0.5}
    assert given(class_name="TCDScheduler") == {"eta": 0.3}
    assert given(class_name="TCDScheduler", eta=0) == {}
    assert given(TakesNone, class_name="TCDScheduler") == {}
    assert "eta" not in made_scheduler(chosen("noise", eta=0.5)[0], "DDPMScheduler").config


# The same requests alone and together, each with the generator of its own seed.


@pytest.mark.parametrize("name", DISTILLED)
def test_steps_that_draw_noise_draw_each_requests_own(
    batches: Batches, parameters: MakeParameters, name: str
):
    for asked in (one_output_each(parameters), several_outputs(parameters)):
        few = {"scheduler": name, "num_inference_steps": 3}
        named = [each.with_changes(few) for each in asked]
        alone = batches.alone(named)
        again = [batches.engine.generate(each, Recorder()) for each in named]
        batches.encoded.clear()
        assert [made.images[0].tobytes() for made in alone] == [
            made.images[0].tobytes() for made in again
        ]
        started = batches.start(named, [Recorder() for _ in named])
        made = [each.result(60) for each in started]
        assert max(map(difference, made, alone)) <= 1
        assert {each.scheduler for each in made} == {name}
        assert min(each.batch_mean for each in made) > 1


def test_a_flow_that_draws_noise_draws_each_requests_own(tmp_path: Path):
    """Pipelines of flows give the step no generator."""
    pipe = load_pipeline(plan(save_family("stable_diffusion_3", tmp_path)))
    stage = EngineArgs("org/model", scheduler=SchedulerSettings("FlowMatchLCMScheduler"))
    set_scheduler(pipe, stage, None)
    batches = Batches(pipe, width=32, height=32)
    asked = [
        small_request(batches.engine.abilities, TEXT_TO_IMAGE, seed=seed, width=32)
        for seed in range(3)
    ]
    alone = batches.alone(asked)
    again = [batches.engine.generate(each, Recorder()) for each in asked]
    assert max(map(difference, again, alone)) == 0
    made = [each.result(60) for each in batches.start(asked, [Recorder() for _ in asked])]
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert {each.batch_mean for each in made} == {3.0}


@pytest.mark.parametrize("name", DISTILLED)
def test_their_noise_is_drawn_from_the_seed_and_from_nothing_else(
    batches: Batches, parameters: MakeParameters, name: str
):
    one, other = (
        batches.engine.generate(parameters(scheduler=name, seed=seed), Recorder())
        for seed in (1, 2)
    )
    assert difference(one, batches.engine.generate(parameters(scheduler=name), Recorder())) == 0
    torch.manual_seed(99)
    after = batches.engine.generate(parameters(scheduler=name), Recorder())
    assert after.images[0].tobytes() == one.images[0].tobytes()
    assert other.images[0].tobytes() != one.images[0].tobytes()


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The bundled model as an LCM-LoRA is served: the adapter, the scheduler, few steps."""
    adapter = tmp_path_factory.mktemp("loras") / "lcm.safetensors"
    save_lora(adapter, {"unet": load_pipeline(plan()).unet}, 1)
    defaults = {
        "lora": [{"name": "lcm", "scale": 0.8}],
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
    }
    settings = PipelineSettings(lora_dir=str(adapter.parent))
    scheduler = SchedulerSettings("LCMScheduler")
    return Engine.load(plan(BUNDLED, defaults, pipeline=settings, scheduler=scheduler))


def test_a_stage_serves_a_model_with_an_adapter_and_its_scheduler(
    fast: Engine, parameters: MakeParameters
):
    abilities = fast.abilities
    assert abilities.schedulers == ("LCMScheduler",)
    assert abilities.scheduler_steps == {"LCMScheduler": 50}
    assert abilities.default_lora == ({"name": "lcm", "scale": 0.8},)
    assert abilities.scheduler_settings["class"]["saved"] == "DDIMScheduler"
    fast.warm_up()  # which loads the adapter
    made = fast.generate(parameters(lora=(Lora("lcm", 0.8),), num_inference_steps=4), Recorder())
    assert (made.scheduler, made.steps) == ("LCMScheduler", 4)


@pytest.mark.parametrize(
    ("staged", "said"),
    [
        ({"scheduler": "LMCScheduler"}, "did you mean LCMScheduler? use DDIMScheduler"),
        ({"lora": [{"name": "x", "scale": 1.0}]}, "this stage has none: add it"),
        ({"scheduler": "TCDScheduler", "num_inference_steps": 60}, "60 is more than the 50 steps"),
    ],
)
def test_defaults_that_no_request_could_have_are_refused(staged: Any, said: str):
    with pytest.raises(ModelLoadFailed) as refused:
        Engine.load(plan(defaults=staged))
    assert str(refused.value).startswith("default_sampling_params.")
    assert said in str(refused.value)


def test_runs_of_another_number_of_steps_say_that_the_sigmas_were_not_theirs(tmp_path: Path):
    sigmas = SchedulerSettings(sigmas=(1.0, 0.6, 0.2))
    engine = Engine.load(plan(save_family("flux", tmp_path), scheduler=sigmas))
    assert engine.abilities.default_steps == 3
    assert engine.abilities.default_sources["num_inference_steps"] == "stage"
    asked = small_request(engine.abilities, TEXT_TO_IMAGE, num_inference_steps=3)
    made = engine.generate(asked, Recorder())
    assert not made.warnings
    other = engine.generate(asked.with_changes({"num_inference_steps": 2}), Recorder())
    assert "the 3 sigmas of this stage" in other.warnings[0]
    solved = asked.with_changes({"scheduler": "UniPCMultistepScheduler"})
    assert not engine.generate(solved, Recorder()).warnings
    plain = Engine.load(plan(tmp_path)).generate(asked, Recorder())
    assert not np.array_equal(pixels(plain), pixels(made))
