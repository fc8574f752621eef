"""Ways to push weights: into the embedded engine, or to vLLM servers over gloo, files, NCCL, CUDA IPC, or as an adapter."""
