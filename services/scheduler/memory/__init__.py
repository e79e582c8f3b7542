"""KV memory: blocks, groups of layers, states and the prefix index."""
