"""Weights are counted before they are read, are not in memory twice, and load in turns."""

import gc
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, ParallelConfig, PipelineSettings, Quantization
from scripts.lab.families import FAMILIES, save_family
from scripts.lab.family_parts import WORDS
from tests.engine.conftest import BUNDLED, plan
from tests.engine.test_denoiser_copies import plan_of_two
from workers.devices.chunk import begin_ranks
from workers.engine import loader
from workers.engine.loader import load_pipeline
from workers.engine.loading.memory import Free, check_memory, estimate, free_memory
from workers.engine.loading.saved_parts import SavedPart, read_config, read_parts
from workers.engine.loading.settings import device_map_of
from workers.engine.loading.turns import turn_to_load

GB = 10**9
AMPLE = Free(10**13, (10**13,))

# Numbers in the parts of Qwen-Image, by their published configurations
# (configs/known_models.yaml): 20.43, 8.29 and 0.127 in billions, saved in bfloat16.
QWEN = {
    "transformer": SavedPart("transformer", "diffusers", "QwenImage", {}, {"BF16": 20_430_000_000}),
    "text_encoder": SavedPart("text_encoder", "transformers", "Qwen", {}, {"BF16": 8_290_000_000}),
    "vae": SavedPart("vae", "diffusers", "AutoencoderKLQwenImage", {}, {"F32": 127_000_000}),
}


def args_of(model: Path | str = "Qwen/Qwen-Image", **settings: Any) -> EngineArgs:
    dtype = settings.pop("dtype", "bfloat16")
    parallel = settings.pop("parallel", ParallelConfig())
    return EngineArgs(
        str(model), dtype=dtype, parallel_config=parallel, pipeline=PipelineSettings(**settings)
    )


def refused(args: EngineArgs, free: Free, device: str = "cuda") -> ModelLoadFailed:
    need = estimate(args, QWEN, device)
    with pytest.raises(ModelLoadFailed) as caught:
        check_memory(args, QWEN, need, free, free)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "devices", "host"),
    [
        ({}, (57.7,), 0),
        ({"dtype": "float32"}, (115.4,), 0),
        ({"dtype": {"default": "bfloat16", "vae": "float32"}}, (57.9,), 0),
        ({"enable_cpu_offload": True}, (40.9,), 57.7),
        ({"enable_layerwise_offload": True}, (0.3,), 57.4),
        ({"quantization": Quantization("int8")}, (37.3,), 0),
        ({"quantization": Quantization("int8", ("transformer", "text_encoder"))}, (29.0,), 0),
        ({"parallel": ParallelConfig(2, ulysses_degree=2)}, (57.7, 40.9), 0),
        ({"parallel": ParallelConfig(2, device_map="balanced")}, (57.7,), 0),
    ],
)
def test_what_weights_need_of_gpus_and_host(
    settings: dict[str, Any], devices: tuple[float, ...], host: float
):
    need = estimate(args_of(**settings), QWEN, "cuda")
    assert [round(each / GB, 1) for each in need.devices] == list(devices)
    assert round(need.host / GB, 1) == host


def test_numbers_that_are_saved_smaller_are_as_large_as_they_are_held():
    small = {"vae": SavedPart("vae", "diffusers", "V", {}, {"F8_E4M3": 1000, "U8": 10})}
    assert estimate(args_of(), small, "cuda").devices == (2010,)


def test_a_part_of_a_file_of_its_own_is_as_large_as_that(tmp_path: Path):
    file = tmp_path / "small.gguf"
    file.write_bytes(bytes(1000))
    args = args_of(quantization=Quantization("gguf", ("transformer",), str(file)))
    rest = {name: part for name, part in QWEN.items() if name != "transformer"}
    for parts in (QWEN, rest):  # a download leaves out what such a file is in place of
        assert estimate(args, parts, "cuda").parts["transformer"].total == 1000


def test_replicas_on_a_cpu_share_what_is_as_it_is_saved():
    need = estimate(args_of(), QWEN, "cpu")
    assert (round(need.host / GB, 1), round(need.host_own / GB, 2)) == (57.7, 0.25)
    whole = estimate(args_of(dtype="float32"), QWEN, "cpu")
    assert whole.host == 4 * (20_430_000_000 + 8_290_000_000 + 127_000_000)
    ranks = estimate(args_of(dtype="float32", parallel=ParallelConfig(2, 2)), QWEN, "cpu")
    assert ranks.host == whole.host + 4 * 20_430_000_000


def test_weights_that_do_not_fit_are_refused_with_numbers_and_ways():
    error = refused(args_of(), Free(100 * GB, (48 * GB,)))
    assert error.message == (
        "Qwen/Qwen-Image: the weights need 57.7 GB of the memory of GPU 0 of the replica, which"
        " has 48.0 GB free (the weights: transformer 40.9 GB, text_encoder 16.6 GB, vae 0.3 GB);"
        " set engine_args.quantization: int8, with which it is 37.3 GB; or set"
        " engine_args.quantization: bitsandbytes_4bit, with which it is 28.3 GB; or set"
        " engine_args.enable_cpu_offload: true, with which it is 40.9 GB and 57.7 GB of the host's;"
        " or set engine_args.enable_layerwise_offload: true, with which it is 0.3 GB and 57.4 GB"
        " of the host's; or give each replica 2 such GPUs with parallel_config.device_map: balanced"
    )
    assert error.lasting
    small = refused(args_of(), Free(16 * GB, (24 * GB,))).message
    assert "offload" not in small  # the host could not hold them either
    assert "balanced" not in small  # the transformer alone is larger
    spread = args_of(parallel=ParallelConfig(2, device_map="balanced"))
    assert "the largest part needs 40.9 GB" in refused(spread, Free(GB, (32 * GB,) * 2)).message
    host = refused(args_of(dtype="float32"), Free(64 * GB), "cpu").message
    assert "need 115.4 GB of the host's memory, which has 64.0 GB free" in host
    assert "dtype: bfloat16, with which it is 57.7 GB; or serve it by fewer replicas" in host


def test_what_others_hold_now_is_no_lasting_refusal():
    need = estimate(args_of(), QWEN, "cuda")
    with pytest.raises(ModelLoadFailed) as caught:
        check_memory(args_of(), QWEN, need, Free(GB, (40 * GB,)), Free(GB, (80 * GB,)))
    assert not caught.value.lasting


def test_little_that_is_left_for_runs_is_told(caplog: pytest.LogCaptureFixture):
    need = estimate(args_of(), QWEN, "cuda")
    check_memory(args_of(), QWEN, need, Free(GB, (60 * GB,)), AMPLE)
    assert "the weights leave 2.3 GB for runs" in caplog.text
    assert "vae_use_tiling" in caplog.text


def test_nothing_is_read_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    read = list[Any]()
    monkeypatch.setattr(loader, "free_memory", lambda _: (Free(10**6), Free(10**6)))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", read.append)
    with pytest.raises(ModelLoadFailed, match=r"the weights need .* of the host's memory"):
        load_pipeline(plan())
    assert not read


def test_the_estimate_is_what_a_loaded_pipeline_holds(tmp_path: Path):
    for name in ("stable_diffusion_xl", "wan", "qwen_image"):
        folder = save_family(name, tmp_path / name)
        args = EngineArgs(str(folder), dtype="float32")
        need = estimate(args, read_parts(folder), "cuda")
        pipe = load_pipeline(plan(folder))
        for part, size in need.parts.items():
            held = getattr(pipe, part).parameters()
            counted = sum(each.numel() * each.element_size() for each in held)
            buffers = getattr(pipe, part).buffers()
            extra = sum(each.numel() * each.element_size() for each in buffers)
            assert counted <= size.total <= counted + extra


def test_a_gpu_gets_weights_straight_where_nothing_stays_on_the_host():
    assert device_map_of(args_of(), "cuda") == "cuda"
    assert device_map_of(args_of(enable_cpu_offload=True), "cuda") is None
    assert device_map_of(args_of(enable_layerwise_offload=True), "cuda") is None
    assert device_map_of(args_of(parallel=ParallelConfig(2, device_map="balanced")), "cuda") == (
        "balanced"
    )
    assert device_map_of(args_of(), "cpu") is None


@pytest.mark.parametrize("name", ["wan", "stable_diffusion_3"])
def test_weights_that_go_straight_to_a_device_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = save_family(name, tmp_path)
    asked = plan(folder, dtype={"default": "bfloat16", "vae": "float32"})
    usual = load_pipeline(asked)
    # The way of a GPU, to the one device that is here.
    monkeypatch.setattr(loader, "device_map_of", lambda *_: "cpu")
    straight = load_pipeline(asked)
    kept = set[torch.dtype]()
    for part, other in usual.components.items():
        if isinstance(other, torch.nn.Module):
            module = getattr(straight, part)
            assert not hasattr(module, "_hf_hook")
            own = dict(module.named_parameters())
            for weight, value in other.named_parameters():
                assert own[weight].dtype == value.dtype
                assert torch.equal(own[weight], value)
            if part == "transformer":
                kept = {value.dtype for value in own.values()}
    # Wan's denoiser keeps its norms in float32, whatever is asked for.
    assert kept == ({torch.float32, torch.bfloat16} if name == "wan" else {torch.bfloat16})
    straight.to("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_what_was_estimated(tmp_path: Path):
    folder = save_family("stable_diffusion_xl", tmp_path)
    args = EngineArgs(str(folder), device="cuda", dtype="bfloat16")
    need = estimate(args, read_parts(folder), "cuda")
    before = torch.cuda.memory_allocated()
    pipe = load_pipeline(plan(folder, device="cuda", dtype="bfloat16"))
    modules = [getattr(pipe, name) for name in need.parts]
    assert {module.device.type for module in modules} == {"cuda"}
    # Each tensor is rounded up to 512 bytes.
    tensors = sum(len(list(module.parameters())) for module in modules)
    assert need.devices[0] <= torch.cuda.memory_allocated() - before
    assert torch.cuda.memory_allocated() - before < 2 * need.devices[0] + 1024 * tensors


def peak_of(folder: Path, dtype: str) -> int:
    """Bytes by which this process grew at most while it loaded, files that it maps included."""

    def status() -> Mapping[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        pairs = (line.split() for line in lines if line.endswith(" kB"))
        return {pair[0]: int(pair[1]) * 1024 for pair in pairs}

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status()["VmRSS:"]
    pipe = load_pipeline(plan(folder, dtype=dtype))
    assert pipe.transformer.dtype == getattr(torch, dtype)
    return status()["VmHWM:"] - before


def test_another_type_is_made_part_by_part(tmp_path: Path):
    pipe = FAMILIES["pixart"]()
    width, layers = 512, 6
    wide = T5Config(
        vocab_size=WORDS, d_model=width, d_ff=2048, d_kv=64, num_layers=layers, num_heads=8
    )
    pipe.text_encoder = T5EncoderModel(wide).eval()
    config = {**pipe.transformer.config, "num_layers": layers, "caption_channels": width}
    config |= {"attention_head_dim": 64, "num_attention_heads": 8, "cross_attention_dim": width}
    pipe.transformer = diffusers.PixArtTransformer2DModel.from_config(config)
    pipe.save_pretrained(tmp_path)
    del pipe
    need = estimate(EngineArgs(str(tmp_path), dtype="bfloat16"), read_parts(tmp_path), "cpu")
    files = {name: 2 * size.total for name, size in need.parts.items()}
    assert need.host_own == need.host == sum(files.values()) // 2
    slack = 16 * 2**20
    # All that is converted, and beside it one part as it is saved; not two, and not twice.
    limit = need.host + max(files.values()) + slack
    assert limit < sum(files.values()) + need.host - slack
    load_pipeline(plan(tmp_path, dtype="bfloat16"))  # what is imported by the first is no weight
    assert peak_of(tmp_path, "bfloat16") < limit
    # As they are saved they are the files: nothing is copied.
    same = estimate(EngineArgs(str(tmp_path), dtype="float32"), read_parts(tmp_path), "cpu")
    assert same.host_own == 0
    assert peak_of(tmp_path, "float32") < max(files.values())


def test_one_waits_where_memory_is_short_and_goes_on_when_the_other_has_loaded(tmp_path: Path):
    waits, loading, inside = threading.Event(), threading.Event(), list[str]()

    def second() -> None:
        with turn_to_load(60, lambda: 100, waits.set, loading.set, folder=tmp_path):
            inside.append("second")

    with turn_to_load(60, lambda: 100, folder=tmp_path):
        with turn_to_load(40, lambda: 100, folder=tmp_path):  # there is room for it
            inside.append("small")
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        assert inside == ["small"]
        assert not loading.is_set()
    thread.join(30)
    assert inside == ["small", "second"]
    assert loading.is_set()


def test_a_folder_that_somebody_else_put_there_is_not_used(tmp_path: Path):
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    link.symlink_to(theirs)
    with turn_to_load(60, lambda: 100, folder=link):
        assert list(theirs.iterdir()) == []


class _Begun:
    """What stands for ranks that have been started."""

    closed = 0

    def await_loaded(self) -> None:
        raise ModelLoadFailed("rank 1 of 2 could not start")

    def close(self) -> None:
        self.closed += 1


def test_ranks_end_when_the_load_fails(monkeypatch: pytest.MonkeyPatch):
    begun = _Begun()
    monkeypatch.setattr(loader, "begin_ranks", lambda *_: begun)
    with pytest.raises(ModelLoadFailed, match="rank 1 of 2 could not start"):
        loader.load(plan())
    assert begun.closed == 1


def test_ranks_are_begun_only_where_the_model_will_use_them(tmp_path: Path):
    folder = save_family("stable_diffusion_3", tmp_path)
    made = list[str]()

    def make(name: str) -> Any:
        made.append(name)
        with torch.device("meta"):
            return diffusers.SD3Transformer2DModel.from_config(read_config(folder, name))

    kinds = {"transformer": "SD3Transformer2DModel"}
    assert begin_ranks(plan_of_two(folder, cfg_parallel_size=2), kinds, "cpu", make) is None
    assert begin_ranks(plan(folder), kinds, "cpu", make) is None
    assert made == []
    assert begin_ranks(plan_of_two(folder), kinds, "cpu", make) is None  # copies are its way
    assert made == ["transformer"]


HOLDS = """
import sys
from pathlib import Path
from workers.engine.loading.turns import turn_to_load
with turn_to_load(100, lambda: 100, folder=Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_one_that_was_killed_while_it_loaded_holds_nobody_up(tmp_path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        cwd=BUNDLED.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"holds\n"
    with turn_to_load(100, lambda: 100, child.kill, folder=tmp_path):
        assert child.wait(30) == -9  # it had been waited for until then
    child.communicate()
    assert [file.name for file in tmp_path.iterdir()] == ["gate"]


def test_the_bundled_model_takes_turns_only_where_it_is_converted():
    parts = read_parts(BUNDLED)
    saved = EngineArgs(str(BUNDLED), dtype="float16")
    assert estimate(saved, parts, "cpu").host_own == 0
    assert estimate(replace(saved, dtype="float32"), parts, "cpu").host_own > 0
    free, whole = free_memory("cpu")
    assert 0 < free.host <= whole.host
