"""Memory besides the KV cache of an executor: what it holds, saves of full blocks, and loads of what was saved."""
