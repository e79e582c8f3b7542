"""What the REST front end costs, with a scripted engine behind it: `python -m benchmarks.front_end`."""
