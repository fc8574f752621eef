"""Entry point of the rollout process: `python -m ebft_ds.rollout.process --fd N --parent PID`, started by RolloutClient.

Only the standard library is imported before the process is tied to its parent: loading torch takes seconds, in which rank 0 may die.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import traceback

from ebft_ds.child_process import leave_signals_to_parent, tie_to_parent


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ebft_ds.rollout.process")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to rank 0")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    arguments = parser.parse_args()
    tie_to_parent(arguments.parent)
    leave_signals_to_parent()
    os.set_inheritable(arguments.fd, False)
    return serve(socket.socket(fileno=arguments.fd))


def serve(sock: socket.socket) -> int:
    """Host the loop; an exception is reported over the socket and in the log."""
    from ebft_ds.rollout import messages
    from ebft_ds.rollout.wire import Channel, ChannelClosed

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = Channel(sock, messages.ToProcess)
    try:
        start, _ = channel.receive()
        from ebft_ds.rollout.host import RolloutHost

        RolloutHost(channel, start.spec).serve()
    except ChannelClosed:
        return 0  # rank 0 has gone
    except BaseException as error:  # noqa: BLE001 - the supervisor: whatever it was goes to rank 0
        text = traceback.format_exc()
        sys.stderr.write(text)
        with contextlib.suppress(ChannelClosed, TimeoutError):  # the log has it
            channel.send(messages.Failed(type(error).__name__, str(error), text), timeout=5.0)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # daemon threads may still be inside the model: no interpreter shutdown around them
