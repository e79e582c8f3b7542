"""The feature that has grammars compiled before their requests wait for a step."""
