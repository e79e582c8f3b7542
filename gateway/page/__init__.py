"""The page of the gateway: a chat, what the engine is doing, and the API's documentation."""
