"""How many tokens a step drafts: what drafts are likely to bring, and what they cost."""
