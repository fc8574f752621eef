"""Scripts of this repository; importable from its root, not installed."""
