"""Models of the hub, from a stand-in on loopback: what is downloaded, told and refused."""

import importlib.util
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub import constants

from configs.errors import ModelLoadFailed
from configs.stage_config import PipelineSettings, Quantization
from scripts.lab.families import save_family
from tests.engine.conftest import BUNDLED, plan
from tests.hub import Hub, running_hub
from tests.waiting import wait_until
from workers.engine.known_settings import names_of
from workers.engine.loader import load
from workers.engine.loading.download import fetch

SOON_S = 60.0
NAME = "org/tiny"
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


class Told(NamedTuple):
    activity: str
    done: int | None = None
    total: int | None = None


class Teller:
    def __init__(self) -> None:
        self.told: list[Told] = []

    def __call__(self, activity: str, done: int | None = None, total: int | None = None) -> None:
        self.told.append(Told(activity, done, total))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that this process knows, and an empty cache."""
    with running_hub() as running:
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def refusal(model: str, **options: Any) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        load(plan(model, **options))
    assert caught.value.message.startswith(f"{model}: ")
    return caught.value


def test_a_hub_model_is_downloaded_and_then_loaded_from_its_folder(hub: Hub):
    unneeded = {"README.md": b"no", "tiny.safetensors": b"no", "unet/model.onnx": b"no"}
    tiny = hub.add(NAME, BUNDLED)
    tiny.files = {**tiny.files, **unneeded}
    teller = Teller()

    loaded = load(plan(NAME), teller)

    folder = Path(loaded.plan.stage.engine_args.model)
    assert (folder / WEIGHTS).read_bytes() == (BUNDLED / WEIGHTS).read_bytes()
    assert names_of(str(folder))[0] == NAME
    assert not unneeded.keys() & {path for path, _ in hub.sent}
    downloads = [each for each in teller.told if each.activity.startswith("downloading ")]
    assert downloads[-1].done == downloads[-1].total
    size = f"{(downloads[-1].total or 0) / 1e6:.1f}"
    assert downloads[-1].activity == f"downloading {size} of {size} MB"
    assert [each.done for each in downloads] == sorted(each.done or 0 for each in downloads)
    assert teller.told[-1].activity == "loading"

    sent = len(hub.sent)
    load(plan(NAME))
    assert len(hub.sent) == sent
    hub.failing = 503
    assert fetch(plan(NAME).stage.engine_args, teller) == folder


def test_qwen_image_edit_of_the_hub_needs_no_torchvision(hub: Hub, tmp_path: Path):
    assert importlib.util.find_spec("torchvision") is None  # as requirements.txt has it
    name = "Qwen/Qwen-Image-Edit"
    hub.add(name, save_family("qwen_image_edit", tmp_path / "saved"))
    loaded = load(plan(name))
    assert type(loaded.pipe).__name__.startswith("QwenImageEdit")
    assert names_of(loaded.plan.stage.engine_args.model)[0] == name


def test_a_cut_connection_is_resumed_where_it_was(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.add(NAME, BUNDLED)
    hub.cut.add(WEIGHTS)
    fetch(plan(NAME).stage.engine_args, Teller())
    assert [first > 0 for path, first in hub.sent if path == WEIGHTS] == [False, True]


def test_replicas_of_a_host_download_once_and_those_that_wait_say_so(hub: Hub):
    hub.add(NAME, BUNDLED)
    hub.held = WEIGHTS
    args = plan(NAME).stage.engine_args
    tellers = [Teller(), Teller()]
    threads = [threading.Thread(target=fetch, args=(args, teller)) for teller in tellers]
    for thread in threads:
        thread.start()

    def waits() -> bool:
        last = [each.told[-1] for each in tellers if each.told]
        return any(each.total and "waiting" in each.activity for each in last)

    wait_until(waits, SOON_S, "one to wait for the other")
    hub.release.set()
    for thread in threads:
        thread.join(SOON_S)

    paths = [path for path, _ in hub.sent]
    assert paths.count(WEIGHTS) == 1
    (waiting,) = {
        each.activity for each in (*tellers[0].told, *tellers[1].told) if "waiting" in each.activity
    }
    assert waiting == "waiting for the download by another process"


def test_weights_that_the_stage_has_from_a_file_are_not_downloaded(hub: Hub):
    hub.add(NAME, BUNDLED)
    weights = plan(NAME, pipeline=quantized_from("x.gguf")).stage.engine_args
    folder = fetch(weights, Teller())
    assert (folder / "unet" / "config.json").is_file()
    assert not (folder / WEIGHTS).exists()
    assert (folder / "vae" / "config.json").is_file()


def quantized_from(file: str) -> Any:
    return PipelineSettings(quantization=Quantization("gguf", ("unet",), file))


def test_too_little_room_is_said_before_anything_is_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    hub.add(NAME, BUNDLED)
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    error = refusal(NAME)
    assert "are to be downloaded to" in error.message
    assert "where 0.0 GB are free; free space, or set HF_HOME" in error.message
    assert error.lasting
    assert WEIGHTS not in {path for path, _ in hub.sent}


def test_a_wrong_id_is_said_to_be_one(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    error = refusal("org/none")
    assert "no model of this id, or it is private, which needs HF_TOKEN; check" in error.message
    assert error.lasting
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert "HF_TOKEN may not read it" in refusal("org/none").message


def test_a_gated_model_needs_its_terms_and_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.add(NAME, BUNDLED, gated=True)
    error = refusal(NAME)
    assert "gated and HF_TOKEN is not set; accept its terms" in error.message
    assert error.lasting
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert "the account of HF_TOKEN has no access to it" in refusal(NAME).message


def test_a_wrong_revision_is_said_to_be_one(hub: Hub):
    hub.add(NAME, BUNDLED)
    error = refusal(NAME, revision="v9")
    assert "no such engine_args.revision" in error.message
    assert error.lasting


@pytest.mark.parametrize(
    ("files", "about", "says"),
    [
        (["a-Q4.gguf", "README.md"], {}, "hf download org/tiny a-Q4.gguf"),
        (["x_lora.safetensors"], {"tags": ["lora"]}, "this id in engine_args.lora_modules"),
        (["config.json", "diffusion_pytorch_model.safetensors"], {}, "one part of a pipeline"),
        (["sd.safetensors"], {}, "sd.safetensors is a single checkpoint"),
        (["README.md"], {}, "give one that has that file"),
    ],
)
def test_what_is_no_pipeline_is_said_with_where_it_belongs(
    hub: Hub, files: list[str], about: Mapping[str, Any], says: str
):
    base = {"cardData": {"base_model": "org/base"}}
    hub.add(NAME, dict.fromkeys(files, b"x"), about={**base, **about})
    error = refusal(NAME)
    assert "not a diffusers pipeline: it has no model_index.json" in error.message
    assert says in error.message
    assert ("give org/base as model" in error.message) == (not says.startswith(("sd", "give")))
    assert error.lasting


def test_a_hub_that_is_down_is_tried_again(hub: Hub):
    hub.failing = 503
    error = refusal(NAME)
    assert "check the network, or give the path of a folder" in error.message
    assert not error.lasting
