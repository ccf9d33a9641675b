"""Does every family run, merge and end as it should? ``python -m scripts.family_sweep``.

`--diffusers` names a checkout of the repository of diffusers, whose tests build a tiny pipeline of
random weights for nearly every pipeline that it has. Each is saved, loaded by the loader of the
replicas and run by their engine, in a process and a time limit of its own. Needs `parameterized`,
and `sentencepiece` for Kolors. Prints a table, totals, and last one line of JSON.
"""

import argparse
import json
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from configs.errors import ModelLoadFailed
from scripts.family_sweep.dummy_pipelines import TestClass, save_pipeline, test_classes
from scripts.family_sweep.report import left_out, table, totals
from scripts.family_sweep.trial import Findings, describe, try_folder

_LIMIT_S = 300.0
_POLL_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Try what was asked for; 1 where a family that was tried does not do as it should."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--diffusers", type=Path, required=True, help="a checkout of diffusers")
    parser.add_argument("--only", default="", help="a regular expression of test classes")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds for each")
    parser.add_argument("--log", action="store_true", help="show what the engine logs")
    chosen = parser.parse_args(arguments)
    found = [each for each in test_classes(chosen.diffusers) if re.search(chosen.only, str(each))]
    # Once, and before the processes are made, which then have it already.
    torch.set_num_threads(1)
    sys.path.insert(0, str(chosen.diffusers.resolve()))
    logging.basicConfig(level=logging.INFO if chosen.log else logging.CRITICAL)
    results = []
    for findings in _try_all(found, chosen.jobs, chosen.limit):
        results.append(findings)
        print(f"{len(results)}/{len(found)} {json.dumps(findings.as_document())}", file=sys.stderr)
    results.sort(key=lambda each: each.test)
    print("\n".join([*table(results), "", *left_out(results)]))
    counts = totals(results)
    print("\n" + "\n".join(f"- {name}: {count}" for name, count in counts.items()))
    print(json.dumps({"totals": counts, "families": [each.as_document() for each in results]}))
    return int(counts["at fault"] > 0)


def _try_all(found: Sequence[TestClass], jobs: int, limit_s: float) -> Iterator[Findings]:
    fork: Any = multiprocessing.get_context("fork")
    waiting, running = list(found), dict[Connection, tuple[TestClass, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            each = waiting.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_try, args=(each, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = each, process, time.monotonic()
        for ours in wait(list(running), _POLL_S):
            each, process, began = running.pop(ours)  # type: ignore[call-overload]
            yield _received(ours, each, began)  # type: ignore[arg-type]
            process.join()
        for ours, (each, process, began) in list(running.items()):
            if time.monotonic() - began > limit_s:
                del running[ours]
                process.kill()
                process.join()
                yield Findings(str(each), status="hung", reason=f"not done after {limit_s:g} s")


def _received(ours: Connection, each: TestClass, began: float) -> Findings:
    try:
        findings: Findings = ours.recv()
    except EOFError:
        findings = Findings(str(each), reason="its process ended")
    findings.seconds = round(time.monotonic() - began, 1)
    return findings


def _try(each: TestClass, theirs: Connection) -> None:
    """In a process of its own: build, save, load and try one pipeline."""
    findings = Findings(str(each))
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir, folder = name, Path(name) / "model"
        try:
            findings.status = "not built"
            called_with = save_pipeline(each, folder, partial(setattr, findings, "pipeline"))
            findings.status = "not served"
            try_folder(folder, called_with, findings)
        except ModelLoadFailed as error:
            findings.status, findings.reason = "not served", describe(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is a row
            logging.getLogger(__name__).info("%s", traceback.format_exc())
            findings.reason = describe(error)
            if findings.status == "not served":
                findings.status = "failed"
        theirs.send(findings)


if __name__ == "__main__":
    sys.exit(main())
