"""Models of running stacks, as commands and programs of the same user reach them."""
