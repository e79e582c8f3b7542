"""`/v1/files`: what clients upload for batches, and what batches answer."""
