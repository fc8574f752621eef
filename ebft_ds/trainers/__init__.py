"""Trainers: the asynchronous EBFT loop, its policy step, evaluation and callbacks."""
