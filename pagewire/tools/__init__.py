"""Commands for users, all of them clients of the services. Services do not import them."""
