"""The contents of prefix caches, for programs elsewhere: events, and resets."""
