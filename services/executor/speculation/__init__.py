"""Proposers of drafts: one class for each method, behind one `Proposer` interface."""
