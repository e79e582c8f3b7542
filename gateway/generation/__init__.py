"""Chats and completions: bodies to requests, outputs to answers, whole or streamed. Other APIs build on it."""
