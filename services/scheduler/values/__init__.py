"""Values that the parts of the scheduler pass to each other: requests, steps, and what executors report."""
