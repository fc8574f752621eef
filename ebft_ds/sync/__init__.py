"""Weight pushes: merged weights read from ZeRO-3 shards in buckets, sent to the rollout engine, checked by a probe."""
