"""A process that ends while requests that started together still run ends in peace."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The process ends with its main thread: those of the requests are daemons here.
ENDING = """
import gc

gc.disable()  # while others import

import threading

import torch

from configs.stage_config import PipelineSettings
from configs.parameters import Parameters
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import FAMILIES
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine

torch.manual_seed(0)
pipe = FAMILIES["stable_diffusion_3"]()
pipe.set_progress_bar_config(disable=True)
abilities = inspect_abilities(pipe, {"width": 64, "height": 64})
engine = Engine(pipe, abilities, PipelineSettings(), max_num_seqs=8)
engine.warm_up()
running = threading.Event()


class Watcher(Recorder):
    def on_step(self, step, steps):
        if step == 2:
            running.set()


def make(asked):
    with engine.request_coming():
        together.wait()
        engine.generate(asked, Watcher())


requests = [
    Parameters(prompt="a star", seed=seed, width=64, height=64, num_inference_steps=40)
    for seed in range(3)
]
together = threading.Barrier(len(requests))
for each in requests:
    threading.Thread(target=make, args=(each,), daemon=True).start()
assert running.wait(60)
print([each.daemon for each in threading.enumerate() if each.name == "batch"])
"""


def test_the_process_waits_for_those_that_started_together():
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[False]"
