"""The tables and the totals of a sweep over families. Knows no pipelines."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from scripts.family_sweep.trial import Findings

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
