"""A process that calls reward functions: `python -m ebft_ds.rewards.worker_process --fd N --parent PID`, started by RewardWorker.

Functions run in its main thread, one call at a time, so that they may use signals and processes of their own.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
from multiprocessing.connection import Connection

from ebft_ds.child_process import leave_signals_to_parent, tie_to_parent


def main() -> int:
    """Serve until the connection ends."""
    parser = argparse.ArgumentParser(prog="python -m ebft_ds.rewards.worker_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the trainer")
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    arguments = parser.parse_args()
    tie_to_parent(arguments.parent)
    leave_signals_to_parent()
    os.set_inheritable(arguments.fd, False)
    return serve(Connection(socket.socket(fileno=arguments.fd).detach()))


def serve(connection: Connection) -> int:
    """First the functions, answered by None or what is wrong; then (index, texts), answered by (rewards, None) or (None, error)."""
    from ebft_ds.errors import EbftError
    from ebft_ds.rewards.functions import RewardFunction, call_reward_function, load_reward_function

    functions: list[tuple[str, RewardFunction]] = []
    try:
        for name, source in connection.recv():
            try:
                functions.append((name, load_reward_function(source) if isinstance(source, str) else pickle.loads(source)))
            except EbftError as error:
                connection.send(str(error))
                return 1
            except Exception as error:  # noqa: BLE001 - importing a user's module may raise anything
                connection.send(f"reward function {name} cannot be loaded: {type(error).__name__}: {error}")
                return 1
        connection.send(None)
        while True:
            index, texts = connection.recv()
            name, function = functions[index]
            try:
                connection.send((call_reward_function(name, function, texts), None))
            except EbftError as error:
                connection.send((None, str(error)))
    except (EOFError, OSError):  # the trainer has gone
        return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a user's threads do not keep the process
