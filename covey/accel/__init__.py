"""GPU fast path of training and generation: kernels, packing, CUDA graphs."""
