"""Who drafts tokens: each way is a small class behind one protocol (`proposer`)."""
