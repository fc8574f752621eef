"""Entry point of one rank of `ebft-ds score`: python -m ebft_ds.cli.score_rank JOB, a ScoreJob as JSON."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import msgspec

from ebft_ds.errors import EbftError
from ebft_ds.train import report
from ebft_ds.trainers.score_job import ScoreJob


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit code; errors raised on purpose are one message."""
    rank = int(os.environ.get("RANK", "0"))
    [text] = sys.argv[1:] if argv is None else argv
    try:
        from ebft_ds.trainers.score import run_score_job

        run_score_job(msgspec.json.decode(text, type=ScoreJob))
        code, message = 0, ""
    except EbftError as error:
        code, message = error.exit_code, str(error)
    except Exception as error:  # noqa: BLE001  the supervisor of the whole rank: whatever it is, it is reported and ends the rank
        traceback.print_exc()
        code, message = 1, f"unexpected {type(error).__name__}: {error}"
    report(rank, code, message)
    return code


if __name__ == "__main__":
    sys.exit(main())
