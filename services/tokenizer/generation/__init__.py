"""Requests for text, from their arrival to the last delta."""
