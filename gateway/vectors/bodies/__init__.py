"""The requests and answers of the routes for vectors."""
