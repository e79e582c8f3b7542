"""The local stack: all services as processes of one machine, or as actors of a Ray cluster."""
