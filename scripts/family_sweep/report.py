"""The table and the totals of a sweep over families. Knows no pipelines."""

from collections.abc import Iterator, Sequence

from scripts.family_sweep.trial import Findings

_GOOD = ("runs", "cancels", "counts")


def is_at_fault(findings: Findings) -> bool:
    """Tell whether a family that is served does not do as it should; not merging is no fault."""
    if findings.status == "tried":
        wrong = any(getattr(findings, name) != "yes" for name in _GOOD)
        return wrong or findings.merges.startswith("WRONG")
    return findings.status in {"failed", "hung"}


def table(results: Sequence[Findings]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| pipeline | test | tasks | runs | merges | start together | cancel | steps |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in results:
        tried = each.status == "tried"
        cells = (
            f"`{each.pipeline}`" if each.pipeline else "",
            f"`{each.test}`",
            ", ".join(each.tasks),
            each.runs if tried else f"{each.status}: {each.reason}",
            each.merges,
            each.starts,
            each.cancels,
            each.counts,
        )
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


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
