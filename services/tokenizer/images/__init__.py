"""Images: fetching, decoding and processing them."""
