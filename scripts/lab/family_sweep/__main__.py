"""Tries every pipeline that diffusers tests itself with, and prints the tables and totals."""

import argparse
import json
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from configs.errors import ModelLoadFailed
from scripts.lab.family_sweep.dummy_pipelines import TestClass, save_pipeline, test_classes
from scripts.lab.family_sweep.trial import Findings, describe, try_folder

_GOOD = ("runs", "cancels", "counts")
_LEFT_OUT = ("not built", "not served")


def is_at_fault(findings: Findings) -> bool:
    """Tell whether a family that is served does not do as it should; not merging is no fault."""
    if findings.status == "tried":
        wrong = any(getattr(findings, name) != "yes" for name in _GOOD)
        return wrong or findings.merges.startswith("WRONG")
    return findings.status in {"failed", "hung"}


def table(results: Sequence[Findings]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, of those that are built and served."""
    yield "| pipeline | tasks | as the bare pipeline | merges | start together | cancel | steps |"
    yield "|---|---|---|---|---|---|---|"
    lines = dict.fromkeys(_line(each) for each in results if each.status not in _LEFT_OUT)
    yield from sorted(lines)


def left_out(results: Sequence[Findings]) -> Iterator[str]:
    """Yield the lines of a list in Markdown: which were not tried, and why."""
    names = defaultdict[tuple[str, str], set[str]](set)
    for each in results:
        if each.status in _LEFT_OUT:
            name = each.pipeline or each.test
            names[each.status, each.reason.replace(name, "it")].add(f"`{name}`")
    for (status, reason), whose in sorted(names.items()):
        yield f"- {status}: {reason}: {', '.join(sorted(whose))}"


def totals(results: Sequence[Findings]) -> dict[str, int]:
    """Count what came out."""
    tried = [each for each in results if each.status == "tried"]
    return {
        "test classes": len(results),
        "not built": sum(each.status == "not built" for each in results),
        "not served": sum(each.status == "not served" for each in results),
        "tried": len(tried),
        "pipeline classes tried": len({each.pipeline for each in tried}),
        "run as the bare pipeline": sum(each.runs == "yes" for each in tried),
        "merge": sum(each.merges == "yes" for each in tried),
        "merge if prompts are equally long": sum(each.merges.startswith("if") for each in tried),
        "start together": sum(each.starts == "yes" for each in tried),
        "cancel": sum(each.cancels == "yes" for each in tried),
        "count their steps": sum(each.counts == "yes" for each in tried),
        "at fault": sum(map(is_at_fault, results)),
    }


def _line(findings: Findings) -> str:
    tried = findings.status == "tried"
    cells = (
        f"`{findings.pipeline or findings.test}`",
        ", ".join(findings.tasks),
        findings.runs if tried else f"{findings.status}: {findings.reason}",
        findings.merges,
        findings.starts,
        findings.cancels,
        findings.counts,
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


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
