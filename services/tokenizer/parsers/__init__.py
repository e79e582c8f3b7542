"""Output of a model told apart: reasoning, text and tool calls, from the marks that its chat template taught it.

Parsers read text. What they have told after a piece of it is a function of all the text so far, never of how it was cut
into pieces: a request that is resumed goes on where its client stopped reading. White space next to a mark belongs to
the mark; every other character is told. A call that cannot be read is text.
"""
