"""`/v1/batches`: files of requests, which any gateway process answers in the background."""
