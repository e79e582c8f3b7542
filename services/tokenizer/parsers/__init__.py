"""Splits the output of a model into reasoning, text and tool calls, by the marks that its chat template shows.

Parsers read text. Their result depends on the whole text until then, not on how it was cut into pieces: a resumed
request continues where its client stopped reading. White space next to a mark belongs to the mark; all other characters
are returned. A call that cannot be read is text.
"""
