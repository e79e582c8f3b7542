"""The feature of prefill and decode apart: some executors compute prompts, others continue them."""
