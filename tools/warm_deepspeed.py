"""Build DeepSpeed's CPU communication op once, so that no run or test waits for the compiler (about half a minute)."""

from __future__ import annotations

import sys
import time


def main() -> int:
    """Build and load the op; a cached build returns at once."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    from ebft_ds.engine.build import use_own_ninja

    use_own_ninja()
    started = time.monotonic()
    ShareMemCommBuilder().load(verbose=False)
    print(f"deepspeed_shm_comm is ready ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
