"""Values that the rooms of the scheduler pass to each other: requests, steps, and what executors report."""
