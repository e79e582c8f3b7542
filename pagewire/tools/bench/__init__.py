"""`pagewire bench`: measurements of a running server, and plots of them against load."""
