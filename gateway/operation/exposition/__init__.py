"""One exposition of the metrics of all services and of all gateway processes, in the format that a scraper asks for."""
