"""The stage files that come with the service: each is accepted, and its weights fit its cards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.devices import check_machine
from configs.machine import Machine
from configs.settings import REPOSITORY
from configs.stages import load_stages, plan_replicas
from scripts.launcher.model_alone import fit, weights_of

# As nvidia-smi has them: L4, L40S and H100, in bytes.
CARDS = {"24gb": 23034 * 2**20, "48gb": 46068 * 2**20, "80gb": 81559 * 2**20}
FILES = sorted((REPOSITORY / "configs").glob("*gb/*.yaml"))
CAUTION = (None, "enable_cpu_offload", "enable_layerwise_offload")


def test_there_is_one_for_each_kind_of_card() -> None:
    assert {file.parent.name for file in FILES} == {"24gb", "48gb", "80gb", "8x80gb"}
    assert all(len(list(file.parent.iterdir())) <= 16 for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_shipped_stage_fits_its_cards(file: Path) -> None:
    count, _, card = file.parent.name.rpartition("x")
    gpus, memory = int(count or 1), CARDS[card]
    (stage,) = stages = load_stages(file)
    check_machine(stages, Machine(gpus, (0,)))
    args, plans = stage.engine_args, plan_replicas(stages)
    assert [device for plan in plans for device in plan.devices] == list(range(gpus))
    # What suits the model is in the table of known models alone.
    assert stage.default_sampling_params == {}
    assert args.dtype == "auto"

    weights = weights_of(args.model)
    assert weights is not None
    said = re.search(r"\b(\d+) GB of weights|(?:all|all the) (\d+) GB of weights", file.read_text())
    assert said is not None
    assert float(said[1] or said[2]) == round(weights.total / 1e9)
    host = 2**50
    chosen = fit(weights, gpus, memory, host)
    offload = next((key for key in CAUTION[1:] if getattr(args.pipeline, key or "")), None)
    # As what is chosen without a file, or with less on the card.
    assert CAUTION.index(offload) >= CAUTION.index(chosen.offload)
    if offload == chosen.offload and args.parallel_config.way != "context":
        assert (len(plans), stage.devices_per_replica) == (chosen.replicas, chosen.gpus_each)
        assert args.max_num_seqs == chosen.max_num_seqs
