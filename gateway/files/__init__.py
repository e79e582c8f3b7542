"""`/v1/files`: uploaded inputs of batches, and outputs of batches."""
