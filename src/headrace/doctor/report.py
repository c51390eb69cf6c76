"""What `headrace doctor` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.doctor.finding import LEVELS, Finding

SCHEMA_VERSION = 1


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "problem" for finding in findings)


def as_dict(findings: Sequence[Finding], *, model: str | None) -> dict[str, Any]:
    """For machines."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "ok": is_healthy(findings),
        "counts": {level: sum(finding.level == level for finding in findings) for level in LEVELS},
        "findings": [
            {"check": each.check, "level": each.level, "message": each.message, "remedy": each.remedy}
            for each in findings
        ],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding under its topic, remedies below; then what matters, counted."""
    width = max(len(finding.check) for finding in findings)
    lines: list[str] = []
    topic = ""
    for finding in findings:
        head = finding.check.split(".")[0]
        if head != topic:
            lines += ["", head] if lines else [head]
            topic = head
        lines.append(f"  {finding.level:<7}  {finding.check:<{width}}  {finding.message}")
        if finding.remedy:
            lines.append(f"  {'':<7}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join([*lines, "", _summary(findings)])


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in reversed(LEVELS)}
    told = [_counted(counts[level], level) for level in ("problem", "warning", "note") if counts[level]]
    return ", ".join(told) if told else "nothing to mend"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
