"""JSON schemas as grammars: exact, or refused with the place in the schema."""
