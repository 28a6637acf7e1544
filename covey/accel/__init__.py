"""GPU fast path: kernels, fused forward pass, packing, CUDA graphs."""
