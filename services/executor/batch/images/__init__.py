"""Images of prompts: the feature that encodes them and hands them to steps."""
