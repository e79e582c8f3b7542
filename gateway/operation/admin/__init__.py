"""Routes for operators only, on --admin-port if it is set."""
