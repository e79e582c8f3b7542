"""Proposers of the tokens that a step checks: one class for each method, behind one `Proposer`."""
