"""The meaning of flags with values of their own: commands check them before they start anything, and the services read
them by the same functions."""
