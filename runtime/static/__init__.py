"""Static steps: graphs, buffers, masks, the optimizer, and the guard against compiling."""
