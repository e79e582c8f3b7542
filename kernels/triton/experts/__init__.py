"""A mixture of experts: routing, products of tokens with their own experts, their sum."""
