"""What a look at a store can bring to light."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvplane.controlplane.schema import Schema
from kvplane.controlplane.upkeep import kinds

EXAMPLES = 5
"""So many records are named for each problem."""


class Problem(StrEnum):
    """What can be wrong with a record. Each value is its name in reports."""

    SCHEMA_MISSING = "schema_missing"
    SCHEMA_TOO_NEW = "schema_too_new"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    NO_LEASE = "no_lease"
    HOLDING_OF_NOTHING = "holding_of_nothing"
    LOCATION_WITHOUT_HOLDING = "location_without_holding"
    CLAIM_WITHOUT_HOLDING = "claim_without_holding"
    LOCATION_OF_GONE_ENGINE = "location_of_gone_engine"
    CLAIM_OF_GONE_ENGINE = "claim_of_gone_engine"
    ORDER_FOR_NOBODY = "order_for_nobody"
    EPOCH_BEHIND = "epoch_behind"


MEANING = {
    Problem.SCHEMA_MISSING: "there are records but no schema version: no replica of this version has started",
    Problem.SCHEMA_TOO_NEW: "the store is for newer software than this; what is said here may be wrong",
    Problem.FOREIGN: "under a prefix that this version does not know: a newer one's, or not kvplane's",
    Problem.UNREADABLE: "cannot be read, has impossible numbers, or lies under another record's key",
    Problem.NO_LEASE: "hangs on no lease, so it stays for good when nobody removes it",
    Problem.HOLDING_OF_NOTHING: "points to a location or claim that is not there or not the same engine's",
    Problem.LOCATION_WITHOUT_HOLDING: "its engine can neither withdraw nor renew it",
    Problem.CLAIM_WITHOUT_HOLDING: "its engine can free the blocks under the reader",
    Problem.LOCATION_OF_GONE_ENGINE: "its engine is gone or has restarted; swept up by a replica",
    Problem.CLAIM_OF_GONE_ENGINE: "its engine is gone or has restarted; swept up by a replica",
    Problem.ORDER_FOR_NOBODY: "its engine is gone or has restarted; swept up by a replica",
    Problem.EPOCH_BEHIND: "a live engine's epoch is not on record, so its next one may not be larger",
}
"""What each problem means for the fleet."""


@dataclass(slots=True)
class Tally:
    """How many records of a kind there are, and the bytes of their keys and values."""

    records: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Finding:
    """How often a problem was found, and some of the records that have it, for people."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Inventory:
    """What a store holds. `revision` is the store's when reading began, `until_revision` when it ended."""

    schema: Schema | None = None
    revision: int = 0
    until_revision: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[Problem, Finding] = field(default_factory=dict)

    def note(self, problem: Problem, key: bytes) -> None:
        """Add a finding."""
        finding = self.findings.setdefault(problem, Finding())
        finding.count += 1
        if len(finding.examples) < EXAMPLES:
            finding.examples.append(kinds.readable(key))
