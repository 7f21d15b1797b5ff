"""What a stage yields: measured lines, and facts about its process."""

from dataclasses import dataclass
from typing import Any, TypeAlias

Facts: TypeAlias = dict[str, Any]  # of a stage, for example planned_gib


@dataclass(frozen=True)
class Measured:
    """A line of a stage. It fails with a problem, or with a value that is not within its bound."""

    case: str
    value: float | str = ""
    bound: float | None = None
    problem: str = ""
    skipped: str = ""  # why it was not measured

    @property
    def failed(self) -> bool:
        within = self.bound is None or (not isinstance(self.value, str) and self.value <= self.bound)
        return bool(self.problem) or not (within or self.skipped)


NO_TORCH = "torch is not installed: pip install torch, or in a clone bash scripts/setup.sh dev"
