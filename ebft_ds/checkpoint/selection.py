"""Which checkpoint a run resumes from: the newest one that is whole, with the reasons why newer ones were passed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ebft_ds.checkpoint.layout import INCOMPLETE, finished, with_suffix
from ebft_ds.checkpoint.manifest import verify
from ebft_ds.errors import CheckpointError


@dataclass(frozen=True)
class Rejected:
    """A checkpoint folder that cannot be used."""

    path: Path
    problems: list[str]

    def __str__(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.path}: {self.problems[0]}{more}"


@dataclass(frozen=True)
class Resolution:
    """What to resume from (None: start from step 0), and what to warn about."""

    path: Path | None
    rejected: list[Rejected] = field(default_factory=list)


def find_usable(root: Path, *, deep: bool = True) -> tuple[Path | None, list[Rejected]]:
    """Newest whole checkpoint under `root`, and the newer folders that were passed over. One rank calls this; nothing is changed.

    A folder without a finished name was never finished and is rejected whatever it holds.
    """
    rejected = [Rejected(path, ["saving it never finished"]) for path in with_suffix(root, INCOMPLETE)]
    for path in finished(root):
        problems = verify(path, deep=deep)
        if not problems:
            return path, rejected
        rejected.append(Rejected(path, problems))
    return None, rejected


def resolve(resume_from_checkpoint: str | None, root: Path, *, deep: bool = True) -> Resolution:
    """Turn the option's value into a checkpoint. `root` is `output_dir/checkpoints`; call `clean_leftovers(root)` before.

    None: no resume. `auto`: the newest whole checkpoint, or none if the run never finished a save. Else a folder, or the name
    of one under `root`. Raises CheckpointError if an explicit folder is not whole (naming the newest good one beside it), and
    if under `auto` finished checkpoints exist and all are damaged: a run never silently starts over.
    """
    if resume_from_checkpoint is None:
        return Resolution(None)
    if resume_from_checkpoint != "auto":
        return Resolution(_explicit(Path(resume_from_checkpoint), root, deep=deep))
    path, rejected = find_usable(root, deep=deep)
    damaged = [entry for entry in rejected if not entry.path.name.endswith(INCOMPLETE)]
    if path is None and damaged:
        found = "; ".join(str(entry) for entry in damaged)
        raise CheckpointError(
            f"no checkpoint under {root} can be used: {found}. Restore one from a copy, or start over without resume_from_checkpoint "
            "in another output_dir"
        )
    return Resolution(path, rejected)


def _explicit(given: Path, root: Path, *, deep: bool) -> Path:
    path = given if given.exists() or given.is_absolute() or not (root / given).exists() else root / given
    problems = verify(path, deep=deep) if path.is_dir() else ["there is no such folder"]
    if not problems:
        return path
    good, _ = find_usable(path.parent, deep=deep)
    if good is None and path.parent.resolve() != root.resolve():
        good, _ = find_usable(root, deep=deep)
    advice = f"The newest usable one is {good}" if good is not None else f"There is no usable one beside it or under {root}"
    raise CheckpointError(f"cannot resume from {Rejected(path, problems)}. {advice}")
