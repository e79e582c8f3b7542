"""`pagewire.LLM`: batch work from Python, over a stack that is started for it."""
