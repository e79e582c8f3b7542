"""The processes of one executor: the leader, its followers, and the links between them."""
