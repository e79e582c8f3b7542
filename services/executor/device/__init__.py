"""Memory, uploads and clocks of a device."""
