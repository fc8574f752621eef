"""vLLM servers beside the trainer: command line, start, watch, stop, their HTTP routes, and the plugin that receives weights.

What touches vLLM's interface lies in few files: `command.py` (flags and environment), `api.py` (routes and payloads), `plugin.py` and
`receiver*.py` (classes inside the server), `supported.py` (tested versions), `ebft_ds/sync/transports/vllm_*.py` (trainer side).
"""
