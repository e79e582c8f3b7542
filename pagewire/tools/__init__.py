"""Commands for users, each a client of the services. No service imports one."""
