"""Reading requests: their JSON, its validation in bounded time, and what is wrong with it."""
