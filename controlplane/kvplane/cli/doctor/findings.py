"""What the doctor says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

TRUST = "give the file with the authority that its certificate is of: --http-ca FILE"
"""What to do about a certificate that is not to be trusted."""


class Severity(StrEnum):
    """How bad it is. PROBLEM: reuse or serving fails. WARNING: it works, but not well, or not for long."""

    PROBLEM = "problem"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: what kind it is; stable.
        what: in one sentence.
        evidence: what was seen.
        fix: what to do.
    """

    severity: Severity
    code: str
    what: str
    evidence: str
    fix: str

    def as_json(self) -> dict[str, str]:
        """Return it for programs."""
        return {name: str(value) for name, value in asdict(self).items()}


def problem(code: str, what: str, evidence: str, fix: str) -> Finding:
    """Return a finding that is a problem."""
    return Finding(Severity.PROBLEM, code, what, evidence, fix)


def warning(code: str, what: str, evidence: str, fix: str) -> Finding:
    """Return a finding that is a warning."""
    return Finding(Severity.WARNING, code, what, evidence, fix)
