"""Entry point of one rank of a reward training: `deepspeed --module ebft_ds.reward RECIPE [key=value ...]`.

As ebft_ds.train, for recipes of `mode: reward`; a recipe that states no mode counts as one.
"""

from __future__ import annotations

import sys

from ebft_ds.train import main

if __name__ == "__main__":
    sys.exit(main(mode="reward"))
