"""What operators alone may ask for, on --admin-port where there is one."""
