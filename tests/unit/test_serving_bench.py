"""The benchmark before it sends: command line, data sets, traces, arrivals."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.serving_bench.data_sets import planned_requests
from scripts.serving_bench.options import Options, read_options
from scripts.serving_bench.requests import BenchRefused, arrival_times
from tests.pictures import size_of

# The command of the reference's page, but for the folder of the script.
REFERENCE_FLAGS = (
    "--base-url http://localhost:8099 --model Qwen/Qwen-Image --task t2i --dataset random "
    "--num-prompts 8 --request-rate inf --num-inference-steps 2 --width 256 --height 256 "
    "--output-file diffusion_replica_4.json"
)


def options(*arguments: str) -> Options:
    return read_options(arguments, "")


def trace(folder: Path, text: str, *arguments: str) -> Options:
    file = folder / "trace.txt"
    file.write_text(text)
    return options("--dataset", "trace", "--dataset-path", str(file), *arguments)


def test_the_references_command_line_is_read() -> None:
    read = options(*REFERENCE_FLAGS.split())
    assert read.base_url == "http://localhost:8099"
    assert read.model == "Qwen/Qwen-Image"
    assert read.parameters == {"width": 256, "height": 256, "num_inference_steps": 2}
    assert read.request_rate == math.inf
    assert read.max_concurrency is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--num-prompts 0", "'0' is not a whole number from 1 up"),
        ("--request-rate 0", "'0' is not above 0"),
        ("--request-rate -1", "'-1' is not a number from 0 up"),
        ("--max-concurrency 1.5", "'1.5' is not a whole number"),
        ("--report out.pdf", "use a name that ends in .html or .png"),
        ("--extra-body [1]", "is not a JSON object"),
        ("--random-request-config {}", "is not a JSON list of objects"),
        ('--random-request-config [{"weight":0}]', "all weights are 0"),
        ("--backend v1/videos", "use --task t2v"),
    ],
)
def test_a_wrong_command_line_names_the_fix(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*arguments.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_made_up_requests_are_the_same_each_time_and_no_two_alike() -> None:
    asked = options("--num-prompts", "40", "--seed", "7", "--width", "64")
    requests, _ = planned_requests(asked)
    assert requests == planned_requests(asked)[0]
    assert len({request.prompt for request in requests}) == 40
    assert [request.parameters["seed"] for request in requests[:2]] == [7, 8]
    assert "seed" not in planned_requests(options())[0][0].parameters


def test_a_trace_is_taken_whole_unless_told_otherwise(tmp_path: Path) -> None:
    text = 'Request(prompt="a")\n' * 30
    assert len(planned_requests(trace(tmp_path, text))[0]) == 30
    assert len(planned_requests(trace(tmp_path, text, "--num-prompts", "4"))[0]) == 4
    assert len(planned_requests(options())[0]) == 10


def test_profiles_are_drawn_by_weight() -> None:
    config = '[{"width":8,"height":8,"weight":0},{"width":16,"height":24}]'
    requests, _ = planned_requests(options("--random-request-config", config, "--num-prompts", "9"))
    assert {request.shape for request in requests} == {(16, 24, None)}


def test_a_trace_is_read_in_both_forms_and_in_the_order_of_arrival(tmp_path: Path) -> None:
    asked = trace(
        tmp_path,
        '# comment\nRequest(prompt="late", width=8, height=16, timestamp=12.5, slo_ms=900)\n\n'
        '{"text": "early", "timestamp": 10, "num_inference_steps": 3.0, "colour": 1}\n',
        "--num-inference-steps",
        "9",
    )
    requests, notes = planned_requests(asked)
    early, late = requests
    assert (early.prompt, early.steps) == ("early", 3)
    assert (late.shape, late.steps, late.slo_ms) == ((8, 16, None), 9, 900)
    assert notes == ["Keys of the trace that are not used: colour"]
    assert arrival_times(requests, asked) == ([0.0, 2.5], "timestamps of the trace")


def test_a_trace_can_be_replayed_faster_or_at_a_rate_of_its_own(tmp_path: Path) -> None:
    text = "".join(f'Request(prompt="p", timestamp={second})\n' for second in (4, 5, 8))
    requests, _ = planned_requests(trace(tmp_path, text))
    times, name = arrival_times(requests, options("--trace-speed", "2"))
    assert (times, name) == ([0.0, 0.5, 2.0], "timestamps of the trace, 2 times as fast")
    assert arrival_times(requests, options("--request-rate", "inf")) == ([0.0] * 3, "all at once")
    assert arrival_times(requests, options("--request-rate", "3"))[1] == "Poisson, 3 a second"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; write a line"),
        ("a red circle", "line 1 is not a request; write"),
        ('Request(prompt="a")\nRequest(prompt=open("/etc/passwd"))', "line 2 is not a request"),
        ('Other(prompt="a")', "line 1 is not a request"),
        ('{"prompt": "a"', "line 1 is not a request"),
        ("Request(width=8)", "line 1: has no prompt"),
        ('Request(prompt="a", width=1.5)', "line 1: width is 1.5, which is not a whole number"),
        ('Request(prompt="a", slo_ms="x")', "line 1: slo_ms is 'x', which is not a number"),
        ("Request(prompt=3)", "line 1: prompt is 3, which is not text"),
        ('Request(prompt="a", timestamp=1)\nRequest(prompt="b")', "1 of 2 requests have a timesta"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BenchRefused) as refused:
        planned_requests(trace(tmp_path, text))
    assert said in str(refused.value)


def test_data_sets_of_a_file_need_the_file(tmp_path: Path) -> None:
    with pytest.raises(BenchRefused, match="needs --dataset-path; nothing is downloaded"):
        planned_requests(options("--dataset", "vbench"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    asked = options("--dataset", "vbench", "--dataset-path", str(prompts), "--num-prompts", "3")
    assert [request.prompt for request in planned_requests(asked)[0]] == ["one", "two", "one"]


def test_a_task_with_images_brings_them(tmp_path: Path) -> None:
    requests, _ = planned_requests(options("--task", "i2i", "--num-input-images", "2"))
    assert [size_of(path) for path in requests[0].images] == [(512, 512)] * 2
    with pytest.raises(BenchRefused, match="give request 0 of the trace an image_path"):
        planned_requests(trace(tmp_path, 'Request(prompt="a")', "--task", "i2i"))


def test_poisson_arrivals_have_the_asked_mean_and_come_again_the_same() -> None:
    requests, _ = planned_requests(options("--num-prompts", "4000"))
    asked = options("--request-rate", "5")
    times, _ = arrival_times(requests, asked)
    assert times == arrival_times(requests, asked)[0]
    assert (
        times != arrival_times(requests, options("--request-rate", "5", "--arrival-seed", "1"))[0]
    )
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.05)
    # Of exponential gaps a share of 1/e is longer than the mean.
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
