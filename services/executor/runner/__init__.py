"""The model runner, which executes steps."""
