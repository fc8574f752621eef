"""Long proofs with processes killed at bad moments: `make chaos`, not part of `make test`."""
