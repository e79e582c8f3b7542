"""`/v1/batches`: files of requests that are answered in the background, by any gateway process."""
