"""DeepSpeed ZeRO-3 engines: loading sharded models, the network they wrap, optimizer groups, schedules."""
