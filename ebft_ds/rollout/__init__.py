"""Rollouts: the process on rank 0 that turns prompts into groups of completions, its client, and the feed in front of it.

Nothing is imported here, so that a parent can talk to the rollout process without loading a model library.
"""
