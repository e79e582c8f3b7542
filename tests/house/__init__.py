"""Tests of the repository itself: its folders, its imports and its prose."""
